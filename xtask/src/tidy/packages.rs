//! Rules about crates: who may use whom, which packages come in from outside, their licences and versions.

use super::{Finding, about, spdx};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// The crates of the workspace and which of their siblings each may use. No other edges.
const EDGES: &[(&str, &[&str])] = &[
    ("sd-core", &[]),
    ("sd-io", &["sd-core"]),
    ("sd-models", &["sd-core", "sd-io"]),
    ("sd-runtime", &["sd-core", "sd-io", "sd-models"]),
    ("sd-options", &["sd-runtime"]),
    ("sd-cli", &["sd-io", "sd-options", "sd-runtime"]),
    ("sd-server", &["sd-io", "sd-options", "sd-runtime"]),
    ("xtask", &["sd-core", "sd-io", "sd-models", "sd-runtime"]),
];

/// Outside packages that only some crates may name; a package that is absent here may be used by any of them.
const RESERVED: &[(&str, &[&str])] = &[
    ("ggml-sys", &["sd-core"]),
    ("rayon", &["sd-core"]),
    ("thiserror", &["sd-core"]),
    ("image", &["sd-io"]),
    ("memmap2", &["sd-io"]),
    ("safetensors", &["sd-io"]),
    ("anyhow", &["sd-cli", "sd-server", "xtask"]),
    ("clap", &["sd-options", "sd-cli", "sd-server", "xtask"]),
    ("clap_complete", &["sd-cli"]),
    ("toml", &["sd-cli"]),
    ("socket2", &["sd-core"]),
    ("tracing-subscriber", &["sd-cli", "sd-server"]),
    ("axum", &["sd-server"]),
    ("tokio", &["sd-cli", "sd-server"]),
];

/// Licences that ask for no more than a notice.
const LICENCES: &[&str] =
    &["0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "Unicode-3.0", "Unlicense", "Zlib"];

/// Packages that may be linked in more than one version, each with the reason.
const DUPLICATES: &[(&str, &str)] =
    &[("miniz_oxide", "flate2 and png move to a new version at different times; both are small")];

/// Crates that end up in a program we ship.
const SHIPPED: &[&str] = &["sd-cli", "sd-server"];

/// Checks manifests, the dependency list and the resolved graph.
///
/// # Errors
/// When a manifest cannot be read or `cargo metadata` fails.
pub fn check(root: &Path) -> Result<Vec<Finding>> {
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).context("read Cargo.toml")?;
    let listed = outside_dependencies(&manifest);
    let architecture = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap_or_default();
    let metadata = metadata(root)?;
    let graph = Graph::read(&metadata)?;

    let mut found = check_reasons(&listed, &architecture);
    found.extend(check_edges(root, &graph, &listed)?);
    found.extend(check_licences(&graph));
    found.extend(check_duplicates(&graph));
    Ok(found)
}

/// What `cargo metadata` says for the machine's own platform, from the lock file and without network.
fn metadata(root: &Path) -> Result<Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked", "--offline", "--filter-platform", &host()?])
        .current_dir(root)
        .output()
        .context("run cargo metadata")?;
    if !out.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&out.stderr));
    }
    serde_json::from_slice(&out.stdout).context("read the output of cargo metadata")
}

fn host() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out = Command::new(rustc).arg("-vV").output().context("run rustc -vV")?;
    let text = String::from_utf8_lossy(&out.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("host: "));
    line.map(str::to_owned).context("rustc -vV names no host")
}

/// Keys of `[workspace.dependencies]` that are not our own crates.
fn outside_dependencies(manifest: &str) -> BTreeSet<String> {
    section(manifest, "[workspace.dependencies]")
        .filter_map(|(_, line)| line.split_once('='))
        .map(|(key, _)| key.trim().to_owned())
        .filter(|key| !EDGES.iter().any(|(own, _)| own == key))
        .collect()
}

/// The numbered lines below the heading `name`, up to the next one, without comments and blank lines.
fn section<'a>(manifest: &'a str, name: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
    (1..)
        .zip(manifest.lines())
        .skip_while(move |(_, line)| line.trim() != name)
        .skip(1)
        .take_while(|(_, line)| !line.starts_with('['))
        .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
}

/// Every outside dependency has a row ``| `name` | reason |`` under "## Dependencies" in ARCHITECTURE.md, and no row is stale.
fn check_reasons(listed: &BTreeSet<String>, architecture: &str) -> Vec<Finding> {
    let file = "ARCHITECTURE.md";
    let below = architecture.lines().skip_while(|line| line.trim() != "## Dependencies").skip(1);
    let rows: BTreeMap<&str, &str> = below
        .take_while(|line| !line.starts_with("## "))
        .filter_map(|line| line.trim().strip_prefix("| `")?.split_once("` |"))
        .map(|(name, rest)| (name, rest.trim().trim_end_matches('|').trim()))
        .collect();
    if rows.is_empty() {
        let message =
            "lacks the table of dependencies: a heading \"## Dependencies\" and rows \"| `name` | reason |\"";
        return vec![about(file, message)];
    }
    let mut found = Vec::new();
    for name in listed {
        match rows.get(name.as_str()) {
            None => found.push(about(file, format!("the dependency {name} has no row under \"## Dependencies\""))),
            Some(&"") => found.push(about(file, format!("the dependency {name} has no reason"))),
            Some(_) => {}
        }
    }
    for name in rows.keys().filter(|name| !listed.contains(**name)) {
        found.push(about(file, format!("{name} has a row under \"## Dependencies\" but is not one")));
    }
    found
}

struct Package {
    id: String,
    name: String,
    version: String,
    licence: Option<String>,
    ours: bool,
    proc_macro: bool,
    /// As written in the manifest: (key, kind).
    declared: Vec<(String, String)>,
}

struct Graph {
    packages: BTreeMap<String, Package>,
    /// Package id to (package id, kinds); the kind of a normal dependency is empty.
    edges: BTreeMap<String, Vec<(String, Vec<String>)>>,
}

impl Graph {
    fn read(metadata: &Value) -> Result<Graph> {
        let members: BTreeSet<String> = list(metadata, "workspace_members").iter().map(string).collect();
        let mut packages = BTreeMap::new();
        for package in list(metadata, "packages") {
            let id = field(package, "id");
            let target_is_macro =
                |target: &Value| list(target, "kind").iter().any(|kind| kind.as_str() == Some("proc-macro"));
            let declared = list(package, "dependencies").iter().map(|dependency| {
                let key = dependency.get("rename").and_then(Value::as_str).map(str::to_owned);
                (key.unwrap_or_else(|| field(dependency, "name")), field(dependency, "kind"))
            });
            packages.insert(
                id.clone(),
                Package {
                    ours: members.contains(&id),
                    id,
                    name: field(package, "name"),
                    version: field(package, "version"),
                    licence: package.get("license").and_then(Value::as_str).map(str::to_owned),
                    proc_macro: list(package, "targets").iter().any(target_is_macro),
                    declared: declared.collect(),
                },
            );
        }
        let nodes = metadata.get("resolve").context("cargo metadata without a resolved graph")?;
        let edges = list(nodes, "nodes").iter().map(|node| {
            let deps = list(node, "deps").iter().map(|dep| {
                (field(dep, "pkg"), list(dep, "dep_kinds").iter().map(|kind| field(kind, "kind")).collect())
            });
            (field(node, "id"), deps.collect())
        });
        let edges = edges.collect();
        if packages.is_empty() {
            bail!("cargo metadata lists no packages");
        }
        Ok(Graph { packages, edges })
    }

    fn ours(&self) -> impl Iterator<Item = &Package> {
        self.packages.values().filter(|package| package.ours)
    }

    /// Ids of what is linked into the shipped programs: normal dependencies, without what runs in the compiler.
    fn linked(&self) -> BTreeSet<&str> {
        let roots = self.ours().filter(|p| SHIPPED.contains(&p.name.as_str()));
        let mut todo: Vec<&str> = roots.map(|p| p.id.as_str()).collect();
        let mut seen = BTreeSet::new();
        while let Some(id) = todo.pop() {
            if self.packages.get(id).is_none_or(|p| p.proc_macro) || !seen.insert(id) {
                continue;
            }
            let normal = self.edges.get(id).into_iter().flatten();
            todo.extend(normal.filter(|(_, kinds)| kinds.iter().any(String::is_empty)).map(|(to, _)| to.as_str()));
        }
        seen
    }
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// A string field; absent and null read as empty.
fn field(value: &Value, key: &str) -> String {
    value.get(key).map(string).unwrap_or_default()
}

fn check_edges(root: &Path, graph: &Graph, listed: &BTreeSet<String>) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    let mut used = BTreeSet::new();
    for package in graph.ours() {
        let folder = if package.name == "xtask" { "xtask".to_owned() } else { format!("crates/{}", package.name) };
        let file = format!("{folder}/Cargo.toml");
        let Some((_, siblings)) = EDGES.iter().find(|(name, _)| *name == package.name) else {
            found.push(about(file, "is not in the table of crates; give it a row in xtask/src/tidy/packages.rs"));
            continue;
        };
        for (key, kind) in &package.declared {
            used.insert(key.as_str());
            let sibling = EDGES.iter().any(|(name, _)| name == key);
            let reserved = RESERVED.iter().find(|(name, _)| name == key);
            if sibling && !siblings.contains(&key.as_str()) {
                found.push(about(&file, format!("{} must not use {key}", package.name)));
            } else if !sibling && !listed.contains(key) {
                found.push(about(&file, format!("{key} is not in [workspace.dependencies]")));
            } else if let Some((_, owners)) = reserved
                && !owners.contains(&package.name.as_str())
                && kind != "dev"
            {
                found
                    .push(about(&file, format!("{key} belongs to {}, not to {}", owners.join(", "), package.name)));
            }
        }
        let text = std::fs::read_to_string(root.join(&file)).with_context(|| format!("read {file}"))?;
        found.extend(check_versions_are_shared(&file, &text));
    }
    for (name, _) in EDGES.iter().filter(|(name, _)| !graph.ours().any(|p| p.name == *name)) {
        found.push(about("Cargo.toml", format!("the crate {name} is missing from the workspace")));
    }
    for name in listed.iter().filter(|name| !used.contains(name.as_str())) {
        found.push(about("Cargo.toml", format!("no crate uses the dependency {name}")));
    }
    Ok(found)
}

/// A crate takes every dependency from the workspace table.
fn check_versions_are_shared(file: &str, manifest: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for name in ["[dependencies]", "[dev-dependencies]", "[build-dependencies]"] {
        for (line, text) in section(manifest, name) {
            if !text.replace(' ', "").contains("workspace=true") {
                let message = "take it from the workspace table: name.workspace = true".to_owned();
                found.push(Finding { file: file.to_owned(), line, message });
            }
        }
    }
    found
}

fn check_licences(graph: &Graph) -> Vec<Finding> {
    let mut found = Vec::new();
    for package in graph.packages.values() {
        let Package { name, version, .. } = package;
        let problem = match &package.licence {
            None => Some("names no licence".to_owned()),
            Some(licence) => match spdx::satisfied(licence, &|id| LICENCES.contains(&id)) {
                Ok(true) => None,
                Ok(false) => Some(format!("is under {licence}, which is not on the list of licences")),
                Err(e) => Some(format!("{e:#}")),
            },
        };
        found.extend(problem.map(|problem| about("Cargo.lock", format!("{name} {version} {problem}"))));
    }
    found
}

fn check_duplicates(graph: &Graph) -> Vec<Finding> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for id in graph.linked() {
        if let Some(package) = graph.packages.get(id) {
            versions.entry(&package.name).or_default().insert(&package.version);
        }
    }
    versions.retain(|_, versions| versions.len() > 1);
    let mut found = Vec::new();
    for (name, versions) in &versions {
        if !DUPLICATES.iter().any(|(allowed, _)| allowed == name) {
            let versions: Vec<&str> = versions.iter().copied().collect();
            found.push(about("Cargo.lock", format!("{name} is linked in versions {}", versions.join(", "))));
        }
    }
    for (name, _) in DUPLICATES.iter().filter(|(name, _)| !versions.contains_key(name)) {
        found.push(about(
            "xtask/src/tidy/packages.rs",
            format!("{name} is no longer linked twice: drop its exception"),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dependency_table_is_read_from_the_manifest() {
        let manifest = "[workspace]\nx = 1\n[workspace.dependencies]\nsd-core = { path = \"a\" }\n# c\nhalf = \"2\"\n\n[lints]\ny = 1\n";
        assert_eq!(outside_dependencies(manifest), BTreeSet::from(["half".to_owned()]));
    }

    #[test]
    fn every_dependency_needs_a_reason_and_no_reason_is_stale() {
        let listed = BTreeSet::from(["half".to_owned(), "clap".to_owned()]);
        let page = "## Dependencies\n| crate | reason |\n|---|---|\n| `half` | f16 |\n| `old` | gone |\n| `clap` | |\n## Next\n| `x` | y |\n";
        let messages: Vec<String> = check_reasons(&listed, page).into_iter().map(|f| f.message).collect();
        assert_eq!(
            messages,
            ["the dependency clap has no reason", "old has a row under \"## Dependencies\" but is not one"]
        );
        assert_eq!(check_reasons(&listed, "").len(), 1);
    }

    #[test]
    fn versions_come_from_the_workspace() {
        let manifest = "[package]\nname = \"a\"\n[dependencies]\nhalf.workspace = true\nserde = \"1\"\n[lints]\nworkspace = true\n";
        let found = check_versions_are_shared("a", manifest);
        assert_eq!(found.iter().map(|f| f.line).collect::<Vec<_>>(), [5]);
    }

    fn package(id: &str, ours: bool, licence: &str) -> (String, Package) {
        let (name, version) = id.split_once('@').unwrap();
        let package = Package {
            id: id.into(),
            name: name.into(),
            version: version.into(),
            licence: Some(licence.into()),
            ours,
            proc_macro: false,
            declared: Vec::new(),
        };
        (id.to_owned(), package)
    }

    fn edge(from: &str, to: &[(&str, &str)]) -> (String, Vec<(String, Vec<String>)>) {
        (from.into(), to.iter().map(|(id, kind)| ((*id).into(), vec![(*kind).into()])).collect())
    }

    #[test]
    fn only_what_is_linked_counts_as_a_duplicate() {
        let packages = [("sd-cli@1", true), ("a@1", false), ("a@2", false), ("b@1", false), ("b@2", false)];
        let graph = Graph {
            packages: packages.iter().map(|(id, ours)| package(id, *ours, "MIT")).collect(),
            edges: [edge("sd-cli@1", &[("a@1", ""), ("b@1", ""), ("b@2", "build")]), edge("b@1", &[("a@2", "")])]
                .into(),
        };
        let messages: Vec<String> = check_duplicates(&graph).into_iter().map(|f| f.message).collect();
        assert!(messages.contains(&"a is linked in versions 1, 2".to_owned()), "{messages:?}");
        assert!(!messages.iter().any(|m| m.starts_with("b ")), "{messages:?}");
    }

    #[test]
    fn licences_are_held_to_the_list() {
        let graph = Graph {
            packages: [package("a@1", false, "GPL-3.0"), package("b@1", false, "MIT OR GPL-3.0")].into(),
            edges: BTreeMap::new(),
        };
        let found = check_licences(&graph);
        assert!(matches!(&found[..], [f] if f.message.starts_with("a 1 is under GPL-3.0")), "{found:?}");
    }
}
