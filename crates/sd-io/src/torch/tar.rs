//! The layout before PyTorch 0.4: a tar archive of `storages`, `tensors` and `pickle`. The first two start with a
//! pickled count; each storage is a pickled description, a 64-bit count and its elements; each tensor a pickled
//! description, its number of axes, sizes, strides and offset. Source: `_load` of `torch/serialization.py`.

use std::collections::HashMap;
use std::ops::Range;

use sd_core::shape::MAX_RANK;
use sd_core::{Error, Result};

use super::classes::Class;
use super::pickle::{self, Persistent, Pickled, StorageRef, TensorRef, Value};
use super::{MAX_PICKLE, Stored, bad, entry, tree};
use crate::cursor::{Cursor, Fault};
use crate::file::SourceFile;
use crate::listing::Listing;
use crate::text::shown;

const BLOCK: u64 = 512;

/// The most members that are looked at.
const MAX_MEMBERS: usize = 64;

/// The most storages or tensors.
const MAX_COUNT: i64 = 1 << 18;

pub(super) fn is_tar(start: &[u8]) -> bool {
    start.get(257..262) == Some(b"ustar")
}

pub(super) fn listing(file: &SourceFile) -> Result<Listing> {
    let members = members(file)?;
    let member = |name: &str| {
        members.get(name).cloned().ok_or_else(|| {
            let mut held: Vec<String> = members.keys().take(3).map(|n| shown(n)).collect();
            held.sort();
            let what = format!(
                "is a tar archive that PyTorch has not written: it lacks {name}, it holds {}",
                held.join(", ")
            );
            Error::bad_file(file.path(), what).hint("if a model is in it, unpack the archive and give that file")
        })
    };
    let (storages_at, tensors_at, pickle_at) = (member("storages")?, member("tensors")?, member("pickle")?);
    let mut stored = HashMap::new();
    let known = storages(file, storages_at, &mut stored)?;

    let what = |name: &'static str| move |e: Error| e.context(name);
    let bytes = small(file, tensors_at).map_err(what("tensors"))?;
    let mut c = Cursor::new(&bytes, bytes.len() as u64);
    let known = tensors(&mut c, &known).map_err(|f| bad(file, f).context("tensors"))?;

    let bytes = small(file, pickle_at).map_err(what("pickle"))?;
    let mut c = Cursor::new(&bytes, bytes.len() as u64);
    let pickled = pickle::run(&mut c, &Persistent::Known(&known)).map_err(|f| bad(file, f))?;
    let tree = tree::tensors(&pickled).map_err(|f| bad(file, f))?;
    let mut out = Vec::with_capacity(tree.tensors.len());
    for (name, tensor) in tree.tensors {
        let storage = stored.get(&tensor.storage.key);
        let storage = storage.ok_or_else(|| bad(file, format!("no storage for tensor {}", shown(&name)).into()))?;
        out.push(entry(name, tensor, storage).map_err(|f| bad(file, f))?);
    }
    Ok(Listing { tensors: out, metadata: tree.metadata })
}

/// The bytes of a member that is read at once.
fn small(file: &SourceFile, range: Range<u64>) -> Result<sd_core::Bytes> {
    let len = range.end - range.start;
    if len > MAX_PICKLE {
        return Err(Error::bad_file(file.path(), format!("takes {len} bytes, at most {MAX_PICKLE} are read")));
    }
    file.header(range)
}

/// The regular members by name, with where their bytes are.
fn members(file: &SourceFile) -> Result<HashMap<String, Range<u64>>> {
    let mut out = HashMap::new();
    let mut at = 0;
    for _ in 0..MAX_MEMBERS {
        if at + BLOCK > file.len() {
            break;
        }
        let head = file.header(at..at + BLOCK)?;
        let name = head.get(..100).unwrap_or_default();
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        if name.is_empty() {
            break;
        }
        let name = String::from_utf8_lossy(name).into_owned();
        let name = name.strip_prefix("./").unwrap_or(&name).to_owned();
        let size = octal(head.get(124..136).unwrap_or_default());
        let start = at + BLOCK;
        let end = size.and_then(|n| n.checked_add(start)).filter(|n| *n <= file.len());
        let end = end.ok_or_else(|| {
            Error::bad_file(
                file.path(),
                format!("{} leaves the tar archive; it is cut off or damaged", shown(&name)),
            )
        })?;
        out.insert(name, start..end);
        at = end.next_multiple_of(BLOCK);
    }
    Ok(out)
}

fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    u64::from_str_radix(text.trim_matches(|c: char| c == '\0' || c == ' '), 8).ok()
}

/// The storages and their views, by number; `stored` gets where each lies.
fn storages(
    file: &SourceFile,
    range: Range<u64>,
    stored: &mut HashMap<String, Stored>,
) -> Result<HashMap<i64, Value>> {
    let fault = |f: Fault| bad(file, f).context("storages");
    let mut at = range.start;
    // Descriptions lie between storages of any length, so each is read from a window of its own.
    let run = |at: &mut u64| -> Result<Pickled> {
        let mut len = 4096;
        loop {
            let window = file.header(*at..range.end.min(at.saturating_add(len)))?;
            let mut c = Cursor::new(&window, range.end.saturating_sub(*at));
            match pickle::run(&mut c, &Persistent::None) {
                Ok(pickled) => {
                    *at += c.at();
                    return Ok(pickled);
                }
                Err(Fault::More(_)) if len < MAX_DESCRIPTION => len *= 16,
                Err(other) => return Err(fault(other)),
            }
        }
    };
    let count = count(run(&mut at)?.root()).map_err(fault)?;
    let mut known = HashMap::new();
    for _ in 0..count {
        let described = run(&mut at)?;
        let (key, dtype) =
            match described.root().items().map(|p| p.iter().map(|&i| described.get(i)).collect::<Vec<_>>()) {
                Some(parts) => match parts[..] {
                    [Value::Int(key), _, Value::Class(Class::Storage(Some(dtype)))] => (*key, *dtype),
                    _ => return Err(fault("the description of a storage is not one".into())),
                },
                None => return Err(fault("the description of a storage is no tuple".into())),
            };
        let cut = || fault(format!("the file is cut off in storage {key}").into());
        let start = at.checked_add(8).filter(|n| *n <= range.end).ok_or_else(cut)?;
        let numel = file.header(at..start)?.first_chunk().map(|b| u64::from_le_bytes(*b)).ok_or_else(cut)?;
        let len = numel.checked_mul(dtype.block_bytes() as u64);
        let end = len.and_then(|n| n.checked_add(start)).filter(|n| *n <= range.end).ok_or_else(cut)?;
        let name = key.to_string();
        let storage = StorageRef { key: name.clone(), dtype: Some(dtype), numel, view: None };
        if known.insert(key, Value::Storage(Box::new(storage))).is_some() {
            return Err(fault(format!("storage {key} appears twice").into()));
        }
        stored.insert(name, Stored { range: start..end, big_endian: false });
        at = end;
    }
    views(&run(&mut at)?, &mut known).map_err(fault)?;
    Ok(known)
}

/// The longest description of a storage, and the longest list of views.
const MAX_DESCRIPTION: u64 = 1 << 20;

/// Adds the views of storages: tuples of a number, the storage's number, an offset and a size in elements.
fn views(listed: &Pickled, known: &mut HashMap<i64, Value>) -> Result<(), Fault> {
    for &id in listed.root().items().ok_or("the views are no list")? {
        let parts = listed.get(id).items().unwrap_or_default();
        let numbers: Option<Vec<i64>> = parts.iter().take(5).map(|&i| listed.get(i).int()).collect();
        let Some([key, root, offset, len]) = numbers.as_deref().and_then(|n| n.as_array().copied()) else {
            return Err("a view is no tuple of four numbers".into());
        };
        let Some(Value::Storage(root)) = known.get(&root) else {
            return Err(format!("a view of storage {root}, which is not there").into());
        };
        let start = u64::try_from(offset).ok();
        let end = start.zip(u64::try_from(len).ok()).and_then(|(s, n)| s.checked_add(n));
        match (start, end.filter(|end| *end <= root.numel)) {
            (Some(start), Some(end)) => {
                let view = StorageRef { view: Some(start..end), ..(**root).clone() };
                known.insert(key, Value::Storage(Box::new(view)));
            }
            _ => return Err(format!("a view leaves storage {}", shown(&root.key)).into()),
        }
    }
    Ok(())
}

/// The tensors by number.
fn tensors(c: &mut Cursor<'_>, storages: &HashMap<i64, Value>) -> Result<HashMap<i64, Value>, Fault> {
    let mut known = storages.clone();
    for _ in 0..count(pickle::run(c, &Persistent::None)?.root())? {
        let described = pickle::run(c, &Persistent::None)?;
        let parts = described.root().items().unwrap_or_default();
        let part = |i: usize| parts.get(i).and_then(|&id| described.get(id).int());
        let (Some(key), Some(storage)) = (part(0), part(1)) else {
            return Err("the description of a tensor is not one".into());
        };
        let Some(Value::Storage(storage)) = storages.get(&storage) else {
            return Err(format!("tensor {key} has storage {storage}, which is not there").into());
        };
        let axes = c.u32("axes")?;
        c.u32("axes")?; // once a 64-bit number
        if axes as usize > MAX_RANK {
            return Err(format!("tensor {key} has {axes} axes, at most {MAX_RANK} are supported").into());
        }
        let mut numbers = || (0..axes).map(|_| c.u64("axis")).collect::<Result<Vec<u64>, Fault>>();
        let (dims, strides) = (numbers()?, numbers()?);
        let offset = c.u64("offset")?;
        let dtype = storage.dtype.ok_or("a storage without a type")?;
        let tensor = TensorRef { storage: (**storage).clone(), dtype, offset, dims, strides };
        known.insert(key, Value::Tensor(Box::new(tensor)));
    }
    Ok(known)
}

fn count(v: &Value) -> Result<i64, Fault> {
    match v.int() {
        Some(n @ 0..=MAX_COUNT) => Ok(n),
        _ => Err("the count is none".into()),
    }
}
