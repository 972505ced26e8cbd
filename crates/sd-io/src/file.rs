//! One open file whose bytes come on demand: mapped, read, or in memory from the start.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::Mmap;
use sd_core::{Bytes, Error, Result};

use crate::map::map;

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
    Disk { file: Mutex<File>, map: Option<Arc<Mmap>> },
    Memory(Bytes),
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
            Access::Map if len > 0 => match map(&file) {
                Ok(m) => Some(Arc::new(m)),
                Err(e) => {
                    tracing::warn!("{}: cannot be mapped ({e}), so it is read instead", path.display());
                    None
                }
            },
            _ => None,
        };
        Ok(SourceFile { path: path.into(), len, storage: Storage::Disk { file: Mutex::new(file), map } })
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
            Storage::Disk { file, .. } => self.read(file, range).map(Bytes::from),
            Storage::Memory(bytes) => self.slice(bytes, range),
        }
    }

    /// The bytes of `range`.
    ///
    /// # Errors
    /// The range leaves the file, or the file has become shorter since it was opened.
    pub(crate) fn bytes(&self, range: Range<u64>) -> Result<Bytes> {
        match &self.storage {
            Storage::Disk { file, map: Some(map) } => {
                self.check_length(file, &range)?;
                self.slice(&Bytes::new(map.clone()), range)
            }
            Storage::Disk { file, map: None } => self.read(file, range).map(Bytes::from),
            Storage::Memory(bytes) => self.slice(bytes, range),
        }
    }

    fn slice(&self, bytes: &Bytes, range: Range<u64>) -> Result<Bytes> {
        let part = match (usize::try_from(range.start), usize::try_from(range.end)) {
            (Ok(a), Ok(b)) => bytes.slice(a..b),
            _ => None,
        };
        part.ok_or_else(|| self.outside(&range, self.len))
    }

    fn read(&self, file: &Mutex<File>, range: Range<u64>) -> Result<Vec<u8>> {
        self.check_length(file, &range)?;
        let want = range.end.saturating_sub(range.start);
        let mut out = Vec::new();
        usize::try_from(want)
            .ok()
            .and_then(|n| out.try_reserve_exact(n).ok())
            .ok_or_else(|| Error::bad_file(&self.path, format!("no memory for {want} bytes")))?;
        // A poisoned lock only means that another read failed half way; the position is set anew here.
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let io = |e| Error::io(&self.path, e);
        file.seek(SeekFrom::Start(range.start)).map_err(io)?;
        Read::by_ref(&mut *file).take(want).read_to_end(&mut out).map_err(io)?;
        if (out.len() as u64) < want {
            return Err(self.outside(&range, range.start + out.len() as u64));
        }
        Ok(out)
    }

    fn check_length(&self, file: &Mutex<File>, range: &Range<u64>) -> Result<()> {
        let file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let now = file.metadata().map_err(|e| Error::io(&self.path, e))?.len();
        if range.start > range.end || range.end > now || range.end > self.len {
            return Err(self.outside(range, now));
        }
        Ok(())
    }

    fn outside(&self, range: &Range<u64>, now: u64) -> Error {
        let was = self.len;
        let what = if now < was { format!(" (it had {was} when it was opened)") } else { String::new() };
        Error::bad_file(
            &self.path,
            format!("bytes {}..{} are wanted, the file has {now}{what}", range.start, range.end),
        )
    }
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
