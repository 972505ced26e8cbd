//! One open file whose bytes come on demand: mapped, read, or in memory from the start.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use sd_core::{Advice, Bytes, Error, Mapped, Result};

use crate::map::Map;

/// How tensor bytes are reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Access {
    /// Map the file; where the system refuses, read it.
    #[default]
    Map,
    /// Read each tensor into its own buffer.
    Read,
}

/// An open regular file of known length, or bytes in memory that go by a name.
pub(crate) struct SourceFile {
    path: PathBuf,
    len: u64,
    storage: Storage,
}

enum Storage {
    Disk(Arc<Opened>),
    Memory(Bytes),
}

/// A file on disk.
struct Opened {
    path: PathBuf,
    len: u64,
    file: Mutex<File>,
    map: Option<Map>,
}

impl SourceFile {
    pub(crate) fn open(path: &Path, access: Access) -> Result<SourceFile> {
        // Opening a pipe would wait for a writer, so what it is gets looked at first.
        let meta = fs::metadata(path).map_err(|e| Error::io(path, e))?;
        if !meta.is_file() {
            return Err(Error::bad_file(path, "not a regular file"));
        }
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        let len = file.metadata().map_err(|e| Error::io(path, e))?.len();
        let map = match access {
            Access::Map if len > 0 => match Map::new(&file) {
                Ok(m) => Some(m),
                Err(e) => {
                    tracing::warn!("{}: cannot be mapped ({e}), so it is read instead", path.display());
                    None
                }
            },
            _ => None,
        };
        let opened = Opened { path: path.into(), len, file: Mutex::new(file), map };
        Ok(SourceFile { path: path.into(), len, storage: Storage::Disk(Arc::new(opened)) })
    }

    pub(crate) fn in_memory(name: &Path, bytes: Bytes) -> SourceFile {
        SourceFile { path: name.into(), len: bytes.len() as u64, storage: Storage::Memory(bytes) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The first `len` bytes, or the whole file if it is shorter, read rather than mapped.
    pub(crate) fn prefix(&self, len: u64) -> Result<Bytes> {
        self.header(0..len.min(self.len))
    }

    /// The bytes of `range`, read rather than mapped: looking at a few bytes of a map brings in whole pages around
    /// them, and headers all over a large file would take much memory.
    ///
    /// # Errors
    /// As [`SourceFile::bytes`].
    pub(crate) fn header(&self, range: Range<u64>) -> Result<Bytes> {
        match &self.storage {
            Storage::Disk(opened) => opened.read(range).map(Bytes::from),
            Storage::Memory(bytes) => self.slice(bytes, range),
        }
    }

    /// The bytes of `range`.
    ///
    /// # Errors
    /// The range leaves the file, or the file has become shorter since it was opened.
    pub(crate) fn bytes(&self, range: Range<u64>) -> Result<Bytes> {
        match &self.storage {
            // Of a map that was lost the end is zeros, even if the file is whole again.
            Storage::Disk(opened) if opened.map.as_ref().is_some_and(|m| !m.is_lost()) => {
                opened.check_length(&range)?;
                self.slice(&Bytes::mapped(opened.clone()), range)
            }
            Storage::Disk(opened) => opened.read(range).map(Bytes::from),
            Storage::Memory(bytes) => self.slice(bytes, range),
        }
    }

    fn slice(&self, bytes: &Bytes, range: Range<u64>) -> Result<Bytes> {
        let part = match (usize::try_from(range.start), usize::try_from(range.end)) {
            (Ok(a), Ok(b)) => bytes.slice(a..b),
            _ => None,
        };
        part.ok_or_else(|| outside(&self.path, &range, self.len, self.len))
    }
}

impl Opened {
    fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        self.check_length(&range)?;
        let want = range.end.saturating_sub(range.start);
        let mut out = Vec::new();
        usize::try_from(want)
            .ok()
            .and_then(|n| out.try_reserve_exact(n).ok())
            .ok_or_else(|| Error::bad_file(&self.path, format!("no memory for {want} bytes")))?;
        // A poisoned lock only means that another read failed half way; the position is set anew here.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let io = |e| Error::io(&self.path, e);
        file.seek(SeekFrom::Start(range.start)).map_err(io)?;
        Read::by_ref(&mut *file).take(want).read_to_end(&mut out).map_err(io)?;
        if (out.len() as u64) < want {
            return Err(outside(&self.path, &range, self.len, range.start + out.len() as u64));
        }
        Ok(out)
    }

    fn check_length(&self, range: &Range<u64>) -> Result<()> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let now = file.metadata().map_err(|e| Error::io(&self.path, e))?.len();
        if range.start > range.end || range.end > now || range.end > self.len {
            return Err(outside(&self.path, range, self.len, now));
        }
        Ok(())
    }
}

impl AsRef<[u8]> for Opened {
    fn as_ref(&self) -> &[u8] {
        self.map.as_ref().map_or(&[], Map::bytes)
    }
}

impl Mapped for Opened {
    fn advise(&self, range: Range<usize>, advice: Advice) -> Result<()> {
        if advice == Advice::WillNeed {
            self.check_length(&(range.start as u64..range.end as u64))?;
        }
        if let Some(map) = &self.map {
            map.advise(range, advice);
        }
        Ok(())
    }

    fn check(&self) -> Result<()> {
        if !self.map.as_ref().is_some_and(Map::is_lost) {
            return Ok(());
        }
        self.check_length(&(0..self.len))?;
        Err(Error::bad_file(
            &self.path,
            "could not be read, or was shorter for a while, when its bytes were wanted",
        ))
    }

    fn read(&self, range: Range<usize>) -> Result<Vec<u8>> {
        Opened::read(self, range.start as u64..range.end as u64)
    }
}

/// The error of a range outside a file that had `was` bytes when it was opened and has `now` bytes.
fn outside(path: &Path, range: &Range<u64>, was: u64, now: u64) -> Error {
    let what = if now < was { format!(" (it had {was} when it was opened)") } else { String::new() };
    Error::bad_file(path, format!("bytes {}..{} are wanted, the file has {now}{what}", range.start, range.end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::scratch;

    #[test]
    fn a_file_that_shrinks_after_opening_is_an_error() {
        let path = scratch("shrinks.bin");
        for access in [Access::Map, Access::Read] {
            fs::write(&path, [7u8; 10_000]).unwrap();
            let f = SourceFile::open(&path, access).unwrap();
            assert_eq!(&f.bytes(9_000..9_003).unwrap()[..], &[7, 7, 7]);
            File::options().write(true).open(&path).unwrap().set_len(5_000).unwrap();
            let e = f.bytes(9_000..9_003).unwrap_err().to_string();
            assert!(e.contains("shrinks.bin") && e.contains("has 5000 (it had 10000"), "{e}");
            assert_eq!(f.bytes(0..5_000).unwrap().len(), 5_000);
        }
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn mapped_bytes_are_read_through_the_file_and_advice_changes_none() {
        let path = scratch("mapped.bin");
        let content: Vec<u8> = (0..100_000u32).map(|i| (i % 251) as u8).collect();
        fs::write(&path, &content).unwrap();
        let f = SourceFile::open(&path, Access::Map).unwrap();
        let bytes = f.bytes(1_000..90_000).unwrap();
        assert!(bytes.is_mapped() && !bytes.read().unwrap().is_mapped());
        for advice in [Advice::WillNeed, Advice::Cold] {
            bytes.advise(advice).unwrap();
            assert!(bytes[..] == content[1_000..90_000] && bytes.read().unwrap()[..] == bytes[..]);
        }
        File::options().write(true).open(&path).unwrap().set_len(50_000).unwrap();
        bytes.advise(Advice::Cold).unwrap();
        assert!(bytes.advise(Advice::WillNeed).is_err());
        let e = bytes.read().unwrap_err().to_string();
        assert!(e.contains("mapped.bin") && e.contains("has 50000 (it had 100000"), "{e}");
        assert!(bytes.slice(0..49_000).unwrap().read().unwrap()[..] == content[1_000..50_000]);
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn looking_at_what_is_gone_gives_zeros_and_an_error_afterwards() {
        let path = scratch("gone.bin");
        let content = [7u8; 100_000];
        fs::write(&path, content).unwrap();
        let f = SourceFile::open(&path, Access::Map).unwrap();
        let (other, bytes) = (SourceFile::open(&path, Access::Map).unwrap(), f.bytes(0..100_000).unwrap());
        let writer = File::options().write(true).open(&path).unwrap();
        writer.set_len(8_192).unwrap();
        bytes.check().unwrap();
        assert_eq!((bytes[8_191], bytes[50_000], bytes[99_999]), (7, 0, 0));
        let e = bytes.check().unwrap_err().to_string();
        assert!(e.contains("gone.bin") && e.contains("has 8192 (it had 100000"), "{e}");
        // Other maps, of this file too, are none the wiser until somebody looks.
        let twin = other.bytes(0..10).unwrap();
        twin.check().unwrap();
        assert_eq!(twin[0], 7);
        // Whole again, the file gives its bytes, though not where they were.
        fs::write(&path, content).unwrap();
        let again = f.bytes(40_000..100_000).unwrap();
        assert!(!again.is_mapped() && again[..] == content[40_000..]);
        let e = bytes.check().unwrap_err().to_string();
        assert!(e.contains("gone.bin: could not be read"), "{e}");
        // What is mapped after that may lie where the lost map was.
        drop((f, bytes, again));
        for _ in 0..100 {
            let f = SourceFile::open(&path, Access::Map).unwrap();
            let bytes = f.bytes(0..100_000).unwrap();
            assert!(bytes[..] == content && bytes.check().is_ok());
        }
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn ranges_outside_the_file() {
        let path = scratch("ranges.bin");
        fs::write(&path, [1u8; 16]).unwrap();
        for access in [Access::Map, Access::Read] {
            let f = SourceFile::open(&path, access).unwrap();
            for (start, end) in [(0, 17), (16, 17), (9, 8), (u64::MAX - 1, u64::MAX)] {
                assert!(f.bytes(start..end).is_err());
            }
            assert_eq!(f.bytes(16..16).unwrap().len(), 0);
        }
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
