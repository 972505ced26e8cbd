//! Rules that one file can break on its own.

use super::strip::{code_only, words};
use super::{Finding, about};
use anyhow::{Context, Result};
use std::path::Path;

/// The only places where `unsafe` may stand.
const UNSAFE_FOLDERS: &[&str] =
    &["crates/sd-core/src/ffi/", "crates/sd-core/src/kernels/", "crates/sd-io/src/map/"];

/// Crates whose roots must carry `#![forbid(unsafe_code)]`.
const FORBID_UNSAFE: &[&str] = &[
    "crates/sd-models/src/lib.rs",
    "crates/sd-runtime/src/lib.rs",
    "crates/sd-options/src/lib.rs",
    "crates/sd-cli/src/main.rs",
    "crates/sd-server/src/main.rs",
    "xtask/src/lib.rs",
    "xtask/src/main.rs",
];

const PRINTS: &[&str] = &["print", "println", "eprint", "eprintln"];
const UNFINISHED: &[&str] = &["dbg", "todo", "unimplemented"];

/// Longest file, in lines, by kind. A model family must fit in one reading.
const FAMILY_LINES: usize = 600;
const FILE_LINES: usize = 800;
const TEST_LINES: usize = 1200;

/// Folders of one machine. Split so that this file does not break its own rule.
const MACHINE_PATHS: &[&str] = &[
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/wo", "rk/"),
    concat!("/op", "t/ref"),
    concat!("/Us", "ers/"),
    concat!("C:\\Us", "ers"),
];

/// Checks the text of `file`, a path relative to the repository root with forward slashes.
pub fn check(file: &str, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    if !file.starts_with("oracle/fixtures/") && !file.ends_with("Cargo.lock") {
        check_text(file, text, &mut found);
    }
    if file.ends_with(".rs") {
        check_rust(file, text, &mut found);
    }
    if [".rs", ".py", ".sh"].iter().any(|ending| file.ends_with(ending)) {
        check_length(file, text, &mut found);
    }
    found
}

fn check_text(file: &str, text: &str, found: &mut Vec<Finding>) {
    for (number, line) in (1..).zip(text.split('\n')) {
        let mut push = |message: String| found.push(Finding { file: file.to_owned(), line: number, message });
        if line.ends_with([' ', '\t', '\r']) {
            push("trailing whitespace".to_owned());
        }
        for &path in MACHINE_PATHS {
            let at_path_start = |(at, _): (usize, &str)| {
                let before = line.get(..at).and_then(|head| head.chars().next_back());
                !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '}' | ')' | '/'))
            };
            if line.match_indices(path).any(at_path_start) {
                push(format!("names a folder of one machine ({path})"));
            }
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        found.push(about(file, "the last line lacks its line break"));
    }
}

/// Whether `file` holds tests or benches and nothing else.
fn is_test_file(file: &str) -> bool {
    ["/tests/", "/benches/"].iter().any(|folder| file.contains(folder))
        || ["tests/", "benches/", "fuzz/"].iter().any(|folder| file.starts_with(folder))
        || file.ends_with("/tests.rs")
        || file.ends_with("_tests.rs")
}

/// The first line (from 1) of the trailing test module, or one past the last line.
fn first_test_line(code: &str) -> usize {
    let lines: Vec<&str> = code.lines().map(str::trim).collect();
    let is_test_module = |pair: &[&str]| matches!(pair, [attribute, item] if *attribute == "#[cfg(test)]" && item.starts_with("mod ") && item.ends_with('{'));
    lines.windows(2).position(is_test_module).map_or(lines.len() + 1, |i| i + 1)
}

fn check_rust(file: &str, text: &str, found: &mut Vec<Finding>) {
    let code = code_only(text);
    let first_test = if is_test_file(file) { 0 } else { first_test_line(&code) };
    let may_print = file.starts_with("xtask/") || file.ends_with("build.rs");
    let may_be_unsafe = UNSAFE_FOLDERS.iter().any(|folder| file.starts_with(folder));
    for (number, line) in (1..).zip(code.lines()) {
        let mut push = |message: String| found.push(Finding { file: file.to_owned(), line: number, message });
        for (word, after) in words(line) {
            let is_macro = after.starts_with('!') && !after.starts_with("!=");
            if word == "unsafe" && !may_be_unsafe {
                push(format!("unsafe may stand only in {}", UNSAFE_FOLDERS.join(", ")));
            }
            if is_macro && UNFINISHED.contains(&word) {
                push(format!("{word}! is left over from development"));
            }
            if is_macro && PRINTS.contains(&word) && number < first_test && !may_print {
                push(format!("{word}! outside tests: return the value, log it with tracing, or write to a handle"));
            }
        }
        let dense: String = line.split_whitespace().collect();
        for attribute in ["ignore", "should_panic"] {
            let head = format!("#[{attribute}");
            let tail = dense.split_once(&head).map(|(_, tail)| tail);
            if tail.is_some_and(|tail| tail.starts_with([']', '=', '('])) {
                push(format!("#[{attribute}] is not used here: a test runs and asserts what it means"));
            }
        }
    }
}

fn check_length(file: &str, text: &str, found: &mut Vec<Finding>) {
    let whole = text.lines().count();
    let (lines, limit) = if is_test_file(file) {
        (whole, TEST_LINES)
    } else {
        let own = first_test_line(text).saturating_sub(1).min(whole);
        (own, if file.starts_with("crates/sd-models/src/") { FAMILY_LINES } else { FILE_LINES })
    };
    if lines > limit || whole > TEST_LINES {
        let limit = if lines > limit { limit } else { TEST_LINES };
        let lines = if lines > limit { lines } else { whole };
        found.push(about(file, format!("{lines} lines, limit {limit}: split it by idea")));
    }
}

/// Every crate outside the unsafe islands forbids `unsafe` at its root.
///
/// # Errors
/// When a crate root cannot be read.
pub fn check_crate_attributes(root: &Path) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for &file in FORBID_UNSAFE {
        let text = std::fs::read_to_string(root.join(file)).with_context(|| format!("read {file}"))?;
        if !code_only(&text).lines().any(|line| line.trim() == "#![forbid(unsafe_code)]") {
            found.push(about(file, "lacks #![forbid(unsafe_code)]"));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(file: &str, text: &str) -> Vec<(usize, String)> {
        check(file, text).into_iter().map(|f| (f.line, f.message)).collect()
    }

    fn assert_one(file: &str, text: &str, line: usize, part: &str) {
        let found = messages(file, text);
        assert!(matches!(&found[..], [(at, m)] if *at == line && m.contains(part)), "{file}: {text:?}: {found:?}");
    }

    #[test]
    fn unsafe_has_its_islands() {
        let text = "fn f() {\n    unsafe { g() }\n}\n";
        assert_one("crates/sd-models/src/a.rs", text, 2, "unsafe");
        assert_one("crates/sd-core/src/exec/a.rs", text, 2, "unsafe");
        assert_eq!(messages("crates/sd-core/src/ffi/a.rs", text), []);
        assert_one("crates/sd-io/src/map.rs", text, 2, "unsafe");
        assert_eq!(messages("crates/sd-io/src/map/a.rs", text), []);
        assert_eq!(
            messages("crates/sd-models/src/a.rs", "// unsafe\n#![forbid(unsafe_code)]\nlet s = \"unsafe\";\n"),
            []
        );
    }

    #[test]
    fn prints_belong_to_tests_and_to_developer_commands() {
        let text = "fn f() { println!(\"x\"); }\n";
        assert_one("crates/sd-io/src/a.rs", text, 1, "println!");
        assert_eq!(messages("xtask/src/a.rs", text), []);
        assert_eq!(messages("crates/sd-io/tests/a.rs", text), []);
        let in_tests = format!("#[cfg(test)]\nmod tests {{\n{text}}}\n");
        assert_eq!(messages("crates/sd-io/src/a.rs", &in_tests), []);
        assert_one("crates/sd-io/tests/a.rs", "fn f() { dbg!(1); }\n", 1, "dbg!");
        assert_eq!(messages("crates/sd-io/src/a.rs", "if print != 1 {}\n"), []);
    }

    #[test]
    fn skipped_tests_are_refused() {
        assert_one("crates/sd-io/tests/a.rs", "#[ignore = \"slow\"]\nfn f() {}\n", 1, "ignore");
        assert_one("crates/sd-io/tests/a.rs", "#[should_panic(expected = \"x\")]\n", 1, "should_panic");
        assert_eq!(messages("crates/sd-io/tests/a.rs", "#[ignored_thing]\n"), []);
    }

    #[test]
    fn long_files_are_refused() {
        let lines = |n: usize| "x\n".repeat(n);
        assert_eq!(messages("crates/sd-models/src/a.rs", &lines(600)), []);
        assert_one("crates/sd-models/src/a.rs", &lines(601), 0, "limit 600");
        assert_one("crates/sd-io/src/a.rs", &lines(801), 0, "limit 800");
        assert_one("crates/sd-io/tests/a.rs", &lines(1201), 0, "limit 1200");
        let with_tests = format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", lines(600), lines(300));
        assert_eq!(messages("crates/sd-models/src/a.rs", &with_tests), []);
        let long_tests = format!("{}#[cfg(test)]\nmod tests {{\n{}}}\n", lines(600), lines(700));
        assert_one("crates/sd-models/src/a.rs", &long_tests, 0, "limit 1200");
    }

    #[test]
    fn text_rules() {
        assert_one("README.md", "a \nb\n", 1, "trailing");
        assert_one("README.md", "a", 0, "line break");
        assert_one("README.md", concat!("see /ro", "ot/x\n"), 1, "one machine");
        assert_eq!(messages("README.md", concat!("see target/ho", "me/x and net/wo", "rk/y\n")), []);
    }
}
