//! Models in several files: an index of shards, or files called `…-00001-of-00003.…`.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use sd_core::{Error, Result, WeightSource};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::sniff::{self, Kind};
use super::{Checkpoint, Format, listing};
use crate::file::{Access, SourceFile};
use crate::metadata::{Metadata, Value};
use crate::text::{cut, shown};

/// The longest index that is read.
const MAX_INDEX: u64 = 100_000_000;

/// The most parts a file name may claim.
const MAX_PARTS: usize = 1000;

/// Opens the shards that an index names; file names are relative to the index.
pub(crate) fn open_index(path: &Path, access: Access) -> Result<Checkpoint> {
    let mut out = Checkpoint::empty(path, Format::Safetensors);
    add_index(&mut out, path, "", access)?;
    Ok(out)
}

/// Adds the tensors of the shards that the index at `path` names.
pub(crate) fn add_index(out: &mut Checkpoint, path: &Path, prefix: &str, access: Access) -> Result<()> {
    let file = SourceFile::open(path, Access::Read)?;
    if file.len() > MAX_INDEX {
        return Err(Error::bad_file(
            path,
            format!("an index of {} bytes, at most {MAX_INDEX} are read", file.len()),
        ));
    }
    let index = parse_index(path, &file.prefix(file.len())?)?;
    let home: HashMap<&str, &str> = index.iter().map(|(t, f)| (t.as_str(), f.as_str())).collect();
    let shards: BTreeSet<&str> = home.values().copied().collect();
    for shard in shards {
        let at = path.parent().unwrap_or(Path::new("")).join(inside(path, shard)?);
        let listed = home.values().filter(|f| **f == shard).count();
        let wanted = || format!("shard of {} with {listed} tensors", path.display());
        let file = SourceFile::open(&at, access).map_err(|e| e.context(wanted()))?;
        let kind = sniff::kind(&file).map_err(|e| e.context(wanted()))?;
        if kind == Kind::Index {
            return Err(Error::bad_file(&at, "is an index, not a shard").context(wanted()));
        }
        let listing = listing(&file, kind).map_err(|e| e.context(wanted()))?;
        // A tensor that two shards hold is taken from the one the index names.
        out.add(file, listing, prefix, &|name| home.get(name).is_none_or(|f| *f == shard))?;
    }
    for (tensor, shard) in &index {
        if out.meta(&format!("{prefix}{tensor}")).is_none() {
            let what = format!("tensor {} is not in {}, where the index places it", shown(tensor), shown(shard));
            return Err(Error::bad_file(path, what));
        }
    }
    Ok(())
}

/// The path of a shard, which must not lead out of the folder of the index.
fn inside<'a>(index: &Path, shard: &'a str) -> Result<&'a Path> {
    let path = Path::new(shard);
    let plain = path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    // A backslash and a drive's colon lead elsewhere on Windows; an index must mean the same everywhere.
    if !plain || shard.is_empty() || shard.contains(['\\', ':']) {
        let what = format!("names the shard {}, which is not in the folder of the index", shown(shard));
        return Err(Error::bad_file(index, what).hint("put the shards beside the index and name them alone"));
    }
    Ok(path)
}

/// The `weight_map` of an index of shards: which file holds which tensor.
///
/// # Errors
/// Not such JSON, or a tensor listed twice; the message names `path`, which is used for nothing else.
pub fn parse_index(path: &Path, bytes: &[u8]) -> Result<Vec<(String, String)>> {
    let bad = |what: String| Error::bad_file(path, what);
    let index: Index = serde_json::from_slice(bytes).map_err(|e| {
        bad(format!("not an index of shards: {}", cut(&e.to_string(), 400)))
            .hint("give the model itself, or the index that has its weight_map")
    })?;
    let map = index.0;
    let mut seen = HashMap::with_capacity(map.len());
    for (tensor, file) in &map {
        if let Some(first) = seen.insert(tensor.as_str(), file) {
            let (t, a, b) = (shown(tensor), shown(first), shown(file));
            return Err(bad(format!("tensor {t} is listed twice, in {a} and {b}")));
        }
    }
    Ok(map)
}

/// The parts of a model that lies in several files.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Which one the user gave, from 0.
    this: usize,
    /// All of them.
    paths: Vec<PathBuf>,
}

/// The parts of the model that `path` is one part of, if its name says that it is.
pub(crate) fn parts(path: &Path) -> Option<Parts> {
    let name = path.file_name()?.to_str()?;
    let (stem, extension) = name.rsplit_once('.')?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (base, this) = rest.rsplit_once('-')?;
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(total) || !digits(this) {
        return None;
    }
    let (this, total): (usize, usize) = (this.parse().ok()?, total.parse().ok()?);
    if !(2..=MAX_PARTS).contains(&total) || !(1..=total).contains(&this) {
        return None;
    }
    let paths = (1..=total).map(|i| path.with_file_name(format!("{base}-{i:05}-of-{total:05}.{extension}")));
    Some(Parts { this: this - 1, paths: paths.collect() })
}

/// Opens all parts as one checkpoint.
pub(crate) fn open_all(path: &Path, parts: &Parts, access: Access) -> Result<Checkpoint> {
    let total = parts.paths.len();
    let is_one = || format!("{} is part {} of {total}", path.display(), parts.this + 1);
    let missing: Vec<&Path> = parts.paths.iter().map(PathBuf::as_path).filter(|p| !p.exists()).collect();
    if let Some(first) = missing.first() {
        let name = |p: &Path| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut names: Vec<String> = missing.iter().take(5).map(|p| name(p)).collect();
        if missing.len() > names.len() {
            names.push(format!("{} more", missing.len() - names.len()));
        }
        let what = format!(
            "is one of {total} parts of a model, of which {} are missing: {}",
            missing.len(),
            names.join(", ")
        );
        return Err(Error::bad_file(path, what).hint(format!("put {} beside it", name(first))));
    }
    let mut out = Checkpoint::empty(path, Format::Safetensors);
    for (i, part) in parts.paths.iter().enumerate() {
        let file = SourceFile::open(part, access).map_err(|e| e.context(is_one()))?;
        let kind = sniff::kind(&file).map_err(|e| e.context(is_one()))?;
        if kind == Kind::Index {
            return Err(Error::bad_file(part, "is an index, not a part of a model"));
        }
        out.format = kind.format();
        let listing = listing(&file, kind).map_err(|e| e.context(is_one()))?;
        if let Some((no, count)) = gguf_split(&listing.metadata)
            && (no, count) != (i as u64, total as u64)
        {
            let (no, i) = (no.saturating_add(1), i + 1);
            let what = format!("calls itself part {no} of {count}, its name says part {i} of {total}");
            return Err(Error::bad_file(part, what).hint("give the parts their names back"));
        }
        out.add(file, listing, "", &|_| true)?;
    }
    if let Some(want) = out.metadata.get("split.tensors.count").and_then(Value::as_u64)
        && want != out.tensors.len() as u64
    {
        let what = format!("the {total} parts hold {} tensors, the first says {want}", out.tensors.len());
        return Err(Error::bad_file(path, what));
    }
    Ok(out)
}

/// An error on a GGUF file that is a part of a model by what it says and not by its name.
pub(crate) fn check_whole(path: &Path, metadata: &Metadata) -> Result<()> {
    match gguf_split(metadata) {
        Some((no, count)) if count > 1 => {
            let no = no.saturating_add(1);
            let what = format!("is part {no} of {count} of a GGUF model; the others are found by name only");
            let hint = format!("name the parts …-{no:05}-of-{count:05}.gguf and so on");
            Err(Error::bad_file(path, what).hint(hint))
        }
        _ => Ok(()),
    }
}

/// Which part a GGUF file is, from 0, and of how many. Source of the keys: llama.cpp's `gguf-split`.
fn gguf_split(metadata: &Metadata) -> Option<(u64, u64)> {
    let number = |key: &str| metadata.get(key).and_then(Value::as_u64);
    Some((number("split.no")?, number("split.count")?))
}

struct Index(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Index, D::Error> {
        d.deserialize_map(IndexVisitor)
    }
}

struct IndexVisitor;

impl<'de> Visitor<'de> for IndexVisitor {
    type Value = Index;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if found.is_some() {
                return Err(A::Error::custom("weight_map appears twice"));
            } else {
                found = Some(map.next_value::<Pairs>()?.0);
            }
        }
        found.map(Index).ok_or_else(|| A::Error::missing_field("weight_map"))
    }
}

struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Pairs, D::Error> {
        d.deserialize_map(PairsVisitor)
    }
}

struct PairsVisitor;

impl<'de> Visitor<'de> for PairsVisitor {
    type Value = Pairs;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object that gives each tensor a file name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
        let mut out = Vec::new();
        while let Some(pair) = map.next_entry::<String, String>()? {
            out.push(pair);
        }
        Ok(Pairs(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let found = parts(Path::new("d/m.f16-00002-of-00003.safetensors")).unwrap();
        let want: Vec<PathBuf> = (1..=3).map(|i| format!("d/m.f16-0000{i}-of-00003.safetensors").into()).collect();
        assert_eq!(found, Parts { this: 1, paths: want });
        for name in
            ["m.gguf", "m-00001-of-00001.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf", "m-00000-of-00003.gguf"]
        {
            assert_eq!(parts(Path::new(name)), None, "{name}");
        }
    }

    #[test]
    fn shards_stay_in_the_folder() {
        for name in ["a.safetensors", "./a.safetensors", "sub/a.safetensors", "..a"] {
            assert_eq!(inside(Path::new("i.json"), name).unwrap(), Path::new(name));
        }
        for name in ["../a", "/etc/passwd", "sub/../../a", "C:\\a", "sub\\a", "c:a", "", ".."] {
            let e = inside(Path::new("i.json"), name).unwrap_err().to_string();
            assert!(e.contains("i.json: names the shard") && e.contains("not in the folder"), "{e}");
        }
    }
}
