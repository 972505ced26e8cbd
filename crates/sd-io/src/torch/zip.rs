//! The layout since PyTorch 1.6: a zip archive of `NAME/data.pkl` and `NAME/data/KEY` for each storage, none of them
//! compressed. Source of the archive format: PKWARE's `APPNOTE.TXT`, sections 4.3 and 4.5.3.

use std::collections::HashMap;
use std::ops::Range;

use sd_core::{Error, Result};

use super::pickle::{self, Persistent};
use super::{MAX_PICKLE, Stored, bad, check_storage, entry, tree};
use crate::cursor::{Cursor, Fault};
use crate::file::SourceFile;
use crate::listing::Listing;
use crate::text::shown;

/// The longest directory that is read.
const MAX_DIRECTORY: u64 = 64 << 20;

const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;
const MEMBER: u32 = 0x0201_4b50;
const LOCAL: u32 = 0x0403_4b50;

/// The end record without its comment, and the longest comment.
const END_LEN: u64 = 22;
const MAX_COMMENT: u64 = 0xffff;

pub(super) fn listing(file: &SourceFile) -> Result<Listing> {
    let members = directory(file)?;
    let pickle = find_pickle(file, &members)?;
    let folder = pickle.strip_suffix("data.pkl").unwrap_or_default();
    let range = members.get(pickle).map(|m| m.range(file, pickle)).transpose()?.unwrap_or_default();
    if range.end - range.start > MAX_PICKLE {
        let what =
            format!("{} takes {} bytes, at most {MAX_PICKLE} are read", shown(pickle), range.end - range.start);
        return Err(Error::bad_file(file.path(), what));
    }
    let program = file.header(range)?;
    let mut c = Cursor::new(&program, program.len() as u64);
    let pickled = pickle::run(&mut c, &Persistent::Storages).map_err(|f| bad(file, f))?;
    let big_endian = match members.get(&format!("{folder}byteorder")) {
        // No more is read than tells `big` from `little`.
        Some(m) => {
            let range = m.range(file, "byteorder")?;
            file.header(range.start..range.end.min(range.start + 8))?.trim_ascii() == b"big"
        }
        None => false,
    };

    let tree = tree::tensors(&pickled).map_err(|f| bad(file, f))?;
    let mut stored: HashMap<&str, Stored> = HashMap::new();
    let mut tensors = Vec::with_capacity(tree.tensors.len());
    for (name, tensor) in tree.tensors {
        let s = &tensor.storage;
        if !stored.contains_key(s.key.as_str()) {
            let member = format!("{folder}data/{}", s.key);
            let found = members.get(&member).ok_or_else(|| {
                let what = format!("tensor {}: the archive lacks {}", shown(&name), shown(&member));
                Error::bad_file(file.path(), what)
            })?;
            let range = found.range(file, &member)?;
            stored.insert(&s.key, Stored { range, big_endian });
        }
        let Some(storage) = stored.get(s.key.as_str()) else { continue };
        let got = storage.range.end - storage.range.start;
        check_storage(&s.key, s.dtype, s.numel, got).map_err(|what| Error::bad_file(file.path(), what))?;
        tensors.push(entry(name, tensor, storage).map_err(|f| bad(file, f))?);
    }
    Ok(Listing { tensors, metadata: tree.metadata })
}

/// The member with the pickle.
fn find_pickle<'a>(file: &SourceFile, members: &'a HashMap<String, Member>) -> Result<&'a str> {
    let mut names: Vec<&str> = members.keys().map(String::as_str).collect();
    names.sort_unstable();
    let refuse = |what: &str| Error::bad_file(file.path(), what);
    let named = |end: &str| names.iter().find(|n| n.rsplit('/').next() == Some(end));
    if named("constants.pkl").is_some() {
        return Err(refuse("is a TorchScript program, not a checkpoint").hint("save its state_dict() with PyTorch"));
    }
    let Some(pickle) = named("data.pkl") else {
        let first = names.iter().take(3).map(|n| shown(n)).collect::<Vec<_>>().join(", ");
        let what = format!("is a zip archive that PyTorch has not written; it holds {first}");
        return Err(refuse(&what).hint("if a model is among these, unpack the archive and give that file"));
    };
    Ok(pickle)
}

/// A member as the directory describes it.
struct Member {
    method: u16,
    size: u64,
    packed: u64,
    /// Where its local header starts.
    header: u64,
}

impl Member {
    /// Where its bytes lie in the file.
    fn range(&self, file: &SourceFile, name: &str) -> Result<Range<u64>> {
        let bad = |what: String| Error::bad_file(file.path(), format!("{}: {what}", shown(name)));
        if self.method != 0 || self.packed != self.size {
            return Err(
                bad("is compressed, which PyTorch never does".into()).hint("save the file anew with PyTorch")
            );
        }
        let cut = || bad(format!("lies outside of the {} bytes of the file; it is cut off or damaged", file.len()));
        let head_end = self.header.checked_add(30).filter(|n| *n <= file.len()).ok_or_else(cut)?;
        let head = file.header(self.header..head_end)?;
        let mut c = Cursor::new(&head, 30);
        let lengths = (|| -> Result<(u32, u16, u16), Fault> {
            let signature = c.u32("header")?;
            c.take(22, "header")?;
            Ok((signature, c.u16("header")?, c.u16("header")?))
        })();
        let Ok((LOCAL, name_len, extra_len)) = lengths else {
            return Err(bad(format!("no member starts at byte {}", self.header)));
        };
        let start = head_end + u64::from(name_len) + u64::from(extra_len);
        let end = start.checked_add(self.size).filter(|n| *n <= file.len()).ok_or_else(cut)?;
        Ok(start..end)
    }
}

/// The members by name.
fn directory(file: &SourceFile) -> Result<HashMap<String, Member>> {
    let fault = |f: Fault| match f {
        Fault::Bad(what) => Error::bad_file(file.path(), what),
        Fault::More(_) => Error::bad_file(file.path(), "the directory of the zip archive is cut off"),
    };
    let tail_start = file.len().saturating_sub(END_LEN + MAX_COMMENT);
    let tail = file.header(tail_start..file.len())?;
    let ends_here = |at: usize| {
        let record = tail.get(at..).unwrap_or_default();
        let comment = record.get(20..).and_then(|b| b.first_chunk()).map(|b| usize::from(u16::from_le_bytes(*b)));
        record.starts_with(&END.to_le_bytes()) && comment.is_some_and(|n| n + END_LEN as usize == record.len())
    };
    let at = (0..tail.len()).rev().find(|&at| ends_here(at)).ok_or_else(|| {
        Error::bad_file(file.path(), "a PyTorch checkpoint (zip) whose end is missing; the file is cut off")
            .hint("download it again")
    })?;
    let end_at = tail_start + at as u64;
    let (count, len, start) = end_record(file, end_at, tail.get(at..).unwrap_or_default()).map_err(fault)?;
    let within = start.checked_add(len).is_some_and(|end| end <= end_at);
    if !within || len > MAX_DIRECTORY || count.saturating_mul(46) > len {
        let what = format!("the zip archive claims {count} members in {len} bytes at byte {start}; it is damaged");
        return Err(Error::bad_file(file.path(), what));
    }
    let bytes = file.header(start..start + len)?;
    let mut c = Cursor::new(&bytes, len);
    let mut out = HashMap::new();
    for i in 0..count {
        let (name, member) = member(&mut c).map_err(|f| fault(f).context(format!("member {i} of the archive")))?;
        let shown = shown(&name);
        if out.insert(name, member).is_some() {
            return Err(Error::bad_file(file.path(), format!("{shown} appears twice in the archive")));
        }
    }
    Ok(out)
}

/// The number of members, and the length and start of the directory.
fn end_record(file: &SourceFile, at: u64, record: &[u8]) -> Result<(u64, u64, u64), Fault> {
    let mut c = Cursor::new(record, record.len() as u64);
    c.take(10, "the end of the archive")?;
    let count = c.u16("the end of the archive")?;
    let len = c.u32("the end of the archive")?;
    let start = c.u32("the end of the archive")?;
    if count != u16::MAX && len != u32::MAX && start != u32::MAX {
        return Ok((count.into(), len.into(), start.into()));
    }
    // A locator before the end record says where the record with 64-bit numbers is.
    let read = |range: Range<u64>| file.header(range).map_err(|e| Fault::Bad(e.to_string()));
    let lost = || Fault::Bad("the zip archive lacks its 64-bit end record; it is damaged".into());
    let locator_at = at.checked_sub(20).ok_or_else(lost)?;
    let locator = read(locator_at..at)?;
    let mut c = Cursor::new(&locator, 20);
    if c.u32("locator")? != LOCATOR_64 {
        return Err(lost());
    }
    c.take(4, "locator")?;
    let at = c.u64("locator")?;
    let end = at.checked_add(56).filter(|end| *end <= locator_at).ok_or_else(lost)?;
    let record = read(at..end)?;
    let mut c = Cursor::new(&record, 56);
    if c.u32("end record")? != END_64 {
        return Err(lost());
    }
    c.take(28, "end record")?;
    Ok((c.u64("end record")?, c.u64("end record")?, c.u64("end record")?))
}

fn member(c: &mut Cursor<'_>) -> Result<(String, Member), Fault> {
    if c.u32("signature")? != MEMBER {
        return Err("no member of a zip archive; it is damaged".into());
    }
    c.take(6, "member")?;
    let method = c.u16("method")?;
    c.take(8, "member")?;
    let packed = c.u32("packed size")?;
    let size = c.u32("size")?;
    let (name, extra, comment) = (c.u16("name")?, c.u16("extra field")?, c.u16("comment")?);
    c.take(8, "member")?;
    let header = c.u32("start")?;
    let name = String::from_utf8_lossy(c.take(name.into(), "name")?).into_owned();
    let extra = c.take(extra.into(), "extra field")?;
    c.take(comment.into(), "comment")?;
    let (size, packed, header) = wide(extra, size, packed, header)?;
    Ok((name, Member { method, size, packed, header }))
}

/// Sizes and start, from the extra field with 64-bit numbers where the 32-bit ones are all ones.
fn wide(extra: &[u8], size: u32, packed: u32, header: u32) -> Result<(u64, u64, u64), Fault> {
    let mut c = Cursor::new(extra, extra.len() as u64);
    let mut field = Cursor::new(&[], 0);
    while c.remaining() >= 4 {
        let id = c.u16("extra field")?;
        let len = c.u16("extra field")?;
        let part = c.take(len.into(), "extra field")?;
        if id == 1 {
            field = Cursor::new(part, part.len() as u64);
            break;
        }
    }
    let mut next = |v: u32| if v == u32::MAX { field.u64("64-bit size") } else { Ok(v.into()) };
    Ok((next(size)?, next(packed)?, next(header)?))
}
