//! Reading a header of which only the first part may be in memory.

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

/// A position in the first part of a file.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: u64,
    file_len: u64,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8], file_len: u64) -> Cursor<'a> {
        Cursor { bytes, at: 0, file_len }
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

    pub(crate) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let part = self.take(N as u64, what)?;
        part.first_chunk().copied().ok_or_else(|| Fault::Bad(format!("{what} is cut off")))
    }

    pub(crate) fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string: a u64 length and that many bytes.
    pub(crate) fn string(&mut self, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.u64(what)?;
        self.take(len, what)
    }

    /// A string that must be UTF-8.
    pub(crate) fn utf8(&mut self, what: &str) -> Result<&'a str, Fault> {
        let bytes = self.string(what)?;
        std::str::from_utf8(bytes).map_err(|e| Fault::Bad(format!("{what} is not UTF-8: {e}")))
    }
}
