//! The layout before PyTorch 1.6: pickles of a magic number, a protocol, facts about the machine, the object, and the
//! keys of the storages; then each storage as a 64-bit count and its elements.

use std::collections::HashMap;

use sd_core::{DType, Error, Result};

use super::pickle::{self, Persistent, Pickled, Value};
use super::{MAX_PICKLE, Stored, bad, check_storage, entry, tree};
use crate::cursor::{Cursor, Fault, read_growing};
use crate::file::SourceFile;
use crate::listing::Listing;
use crate::text::shown;

/// 0x1950a86a20f9469cfc6c, low byte first.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
const PROTOCOL: i64 = 1001;

pub(super) fn listing(file: &SourceFile) -> Result<Listing> {
    let header = read_growing(file, file.path(), MAX_PICKLE, "pickle", header)?;
    let stored = storages(file, &header)?;
    let tree = tree::tensors(&header.object).map_err(|f| bad(file, f))?;
    let mut tensors = Vec::with_capacity(tree.tensors.len());
    for (name, tensor) in tree.tensors {
        let storage = stored.get(tensor.storage.key.as_str()).ok_or_else(|| {
            let (name, key) = (shown(&name), shown(&tensor.storage.key));
            Error::bad_file(file.path(), format!("tensor {name}: the file has no storage {key}"))
        })?;
        tensors.push(entry(name, tensor, storage).map_err(|f| bad(file, f))?);
    }
    Ok(Listing { tensors, metadata: tree.metadata })
}

struct Header {
    object: Pickled,
    big_endian: bool,
    keys: Vec<String>,
    /// Where the first storage starts.
    end: u64,
}

fn header(mut c: Cursor<'_>) -> Result<Header, Fault> {
    let c = &mut c;
    let magic = pickle::run(c, &Persistent::None)?;
    match magic.root() {
        Value::Long(bytes) if **bytes == MAGIC => {}
        _ => return Err("a Python pickle that is no PyTorch checkpoint: it lacks PyTorch's magic number".into()),
    }
    match pickle::run(c, &Persistent::None)?.root().int() {
        Some(PROTOCOL) => {}
        _ => return Err(format!("a PyTorch checkpoint of a protocol that is not {PROTOCOL}").into()),
    }
    let machine = pickle::run(c, &Persistent::None)?;
    let big_endian = big_endian(&machine);
    let object = pickle::run(c, &Persistent::Storages)?;
    let listed = pickle::run(c, &Persistent::None)?;
    let Some(items) = listed.root().items() else {
        return Err("the keys of the storages are no list".into());
    };
    let keys = items.iter().map(|&id| match listed.get(id) {
        Value::Text(key) => Ok(key.to_string()),
        Value::Int(key) => Ok(key.to_string()),
        _ => Err(Fault::Bad("the key of a storage is no text".into())),
    });
    let keys = keys.collect::<Result<_, _>>()?;
    Ok(Header { object, big_endian, keys, end: c.at() })
}

fn big_endian(machine: &Pickled) -> bool {
    let Value::Dict(pairs) = machine.root() else { return false };
    pairs.iter().any(|(k, v)| {
        matches!(machine.get(*k), Value::Text(t) if **t == *"little_endian")
            && matches!(machine.get(*v), Value::Bool(false))
    })
}

/// Where each storage lies, found by walking over them.
fn storages(file: &SourceFile, header: &Header) -> Result<HashMap<String, Stored>> {
    let bad = |what: String| Error::bad_file(file.path(), what);
    let mut sizes: HashMap<&str, (Option<DType>, u64)> = HashMap::new();
    for s in header.object.storages() {
        let first = *sizes.entry(&s.key).or_insert((s.dtype, s.numel));
        if first != (s.dtype, s.numel) {
            return Err(bad(format!("storage {} has two types or sizes", shown(&s.key))));
        }
    }
    let mut out = HashMap::with_capacity(header.keys.len());
    let mut at = header.end;
    for key in &header.keys {
        let what = shown(key);
        let cut = |at: u64| bad(format!("the file is cut off in storage {what}, at byte {at} of {}", file.len()));
        let (dtype, numel) =
            *sizes.get(key.as_str()).ok_or_else(|| bad(format!("no tensor has storage {what}")))?;
        let start = at.checked_add(8).filter(|n| *n <= file.len()).ok_or_else(|| cut(at))?;
        let count = file.header(at..start)?;
        let count = count.first_chunk().copied().ok_or_else(|| cut(at))?;
        let count = if header.big_endian { u64::from_be_bytes(count) } else { u64::from_le_bytes(count) };
        if count != numel {
            return Err(bad(format!("storage {what} has {count} elements, its tensors say {numel}")));
        }
        let width = dtype.map_or(1, |d| d.block_bytes() as u64);
        let end = count.checked_mul(width).and_then(|n| n.checked_add(start));
        let end = end.filter(|n| *n <= file.len()).ok_or_else(|| cut(start))?;
        check_storage(key, dtype, numel, end - start).map_err(bad)?;
        let storage = Stored { range: start..end, big_endian: header.big_endian };
        if out.insert(key.clone(), storage).is_some() {
            return Err(bad(format!("storage {what} is listed twice")));
        }
        at = end;
    }
    if at != file.len() {
        return Err(bad(format!("{} unused bytes after the last storage", file.len() - at)));
    }
    Ok(out)
}
