//! Reading a header of which only the first part may be in memory.

use std::path::Path;

use sd_core::{Error, Result};

use crate::file::SourceFile;

/// Why a read did not succeed.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The file has these bytes and the part in memory does not; it must reach at least this far.
    More(u64),
    /// The file is wrong.
    Bad(String),
}

impl From<String> for Fault {
    fn from(what: String) -> Fault {
        Fault::Bad(what)
    }
}

impl From<&str> for Fault {
    fn from(what: &str) -> Fault {
        Fault::Bad(what.to_owned())
    }
}

/// Reads a header of unknown length, of at most `most` bytes: `parse` is given longer and longer first parts of the
/// file until it is content. Messages call the file `path` and the header `what`.
pub(crate) fn read_growing<T>(
    file: &SourceFile,
    path: &Path,
    most: u64,
    what: &str,
    mut parse: impl FnMut(Cursor<'_>) -> Result<T, Fault>,
) -> Result<T> {
    let mut len = 1 << 20;
    loop {
        let prefix = file.prefix(len)?;
        let wanted = match parse(Cursor::new(&prefix, file.len())) {
            Ok(out) => return Ok(out),
            Err(Fault::Bad(what)) => return Err(Error::bad_file(path, what)),
            Err(Fault::More(wanted)) => wanted,
        };
        if wanted > most {
            return Err(Error::bad_file(path, format!("the {what} goes on after {most} bytes")));
        }
        len = wanted.max(len * 4).min(most);
    }
}

/// A position in the first part of a file, and how the file writes its numbers.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: u64,
    file_len: u64,
    big_endian: bool,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8], file_len: u64) -> Cursor<'a> {
        Cursor { bytes, at: 0, file_len, big_endian: false }
    }

    /// From here on numbers have their high byte first.
    pub(crate) fn set_big_endian(&mut self) {
        self.big_endian = true;
    }

    pub(crate) fn is_big_endian(&self) -> bool {
        self.big_endian
    }

    /// How far the cursor is from the start of the file.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// How many bytes of the file follow.
    pub(crate) fn remaining(&self) -> u64 {
        self.file_len.saturating_sub(self.at)
    }

    /// The next `len` bytes; `what` says what they are.
    pub(crate) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], Fault> {
        let left = self.remaining();
        if len > left {
            let at = self.at;
            return Err(Fault::Bad(format!("{what} takes {len} bytes at byte {at}, the file has {left} more")));
        }
        let end = self.at + len;
        let part = match (usize::try_from(self.at), usize::try_from(end)) {
            (Ok(a), Ok(b)) => self.bytes.get(a..b),
            _ => None,
        };
        let part = part.ok_or(Fault::More(end))?;
        self.at = end;
        Ok(part)
    }

    /// The bytes up to a line feed, which is passed over.
    pub(crate) fn line(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let rest = usize::try_from(self.at).ok().and_then(|a| self.bytes.get(a..)).unwrap_or_default();
        match rest.iter().position(|b| *b == b'\n') {
            Some(len) => {
                let line = self.take(len as u64, what)?;
                self.take(1, what)?;
                Ok(line)
            }
            None if (self.bytes.len() as u64) < self.file_len => Err(Fault::More(self.bytes.len() as u64 + 1)),
            None => Err(Fault::Bad(format!("{what} at byte {} does not end", self.at))),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let part = self.take(N as u64, what)?;
        part.first_chunk().copied().ok_or_else(|| Fault::Bad(format!("{what} is cut off")))
    }

    /// A number of `N` bytes, the low one first.
    pub(crate) fn number<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let mut bytes = self.array(what)?;
        if self.big_endian {
            bytes.reverse();
        }
        Ok(bytes)
    }

    pub(crate) fn u8(&mut self, what: &str) -> Result<u8, Fault> {
        let [byte] = self.array(what)?;
        Ok(byte)
    }

    pub(crate) fn u16(&mut self, what: &str) -> Result<u16, Fault> {
        self.number(what).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.number(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.number(what).map(u64::from_le_bytes)
    }
}
