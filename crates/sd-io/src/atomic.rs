//! Files that appear under their name only when they are complete.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sd_core::{Error, Result};

use crate::listing::TensorSpec;

/// A file under construction. Without [`Atomic::commit`] nothing remains of it.
pub(crate) struct Atomic {
    target: PathBuf,
    /// `None` once the file has its final name, or when the target is a device and is written directly.
    temp: Option<PathBuf>,
    out: Option<BufWriter<File>>,
}

impl Atomic {
    /// Starts a file that will be `path`; missing parent folders are made.
    pub(crate) fn create(path: &Path) -> Result<Atomic> {
        let error = |e| Error::io(path, e);
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
        if let Some(parent) = parent {
            fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
        }
        // Behind a link the file itself is replaced, and what is no file, such as a device, is written in place.
        let (target, in_place) = match fs::canonicalize(path) {
            Ok(found) => {
                let meta = fs::metadata(&found).map_err(error)?;
                if meta.is_dir() {
                    return Err(Error::request(format!("{}: is a folder, a file name is needed", path.display())));
                }
                (found, !meta.is_file())
            }
            Err(_) => (path.to_owned(), false),
        };
        if in_place {
            let file = File::options().write(true).open(&target).map_err(error)?;
            return Ok(Atomic { target, temp: None, out: Some(BufWriter::new(file)) });
        }
        let temp = temporary_name(&target)?;
        let file = File::options().write(true).create_new(true).open(&temp).map_err(error)?;
        Ok(Atomic { target, temp: Some(temp), out: Some(BufWriter::with_capacity(1 << 20, file)) })
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.out {
            Some(out) => out.write_all(bytes).map_err(|e| Error::io(&self.target, e)),
            None => Err(Error::internal("write to a finished file")),
        }
    }

    /// Ends writing, and lets `check` look at the file under its temporary name.
    pub(crate) fn verify(&mut self, check: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let error = |e| Error::io(&self.target, e);
        if let Some(out) = self.out.take() {
            let file = out.into_inner().map_err(|e| error(e.into_error()))?;
            if self.temp.is_some() {
                file.sync_all().map_err(error)?;
            }
        }
        self.temp.as_deref().map_or(Ok(()), check)
    }

    /// Gives the file its name.
    pub(crate) fn commit(mut self) -> Result<()> {
        let error = |e| Error::io(&self.target, e);
        if let Some(mut out) = self.out.take() {
            out.flush().map_err(error)?;
        }
        if let Some(temp) = &self.temp {
            fs::rename(temp, &self.target).map_err(error)?;
            self.temp = None;
        }
        Ok(())
    }
}

impl Drop for Atomic {
    fn drop(&mut self) {
        if let Some(temp) = self.temp.take() {
            self.out = None;
            if let Err(e) = fs::remove_file(&temp) {
                tracing::warn!("{}: left behind: {e}", temp.display());
            }
        }
    }
}

/// Where the bytes of one tensor of a file under construction go, in order.
pub struct Sink<'a> {
    out: &'a mut Atomic,
    written: u64,
}

impl Sink<'_> {
    /// Appends bytes.
    ///
    /// # Errors
    /// The disk's.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        self.out.write(bytes)
    }

    /// Lets `fill` write the bytes of a tensor, and returns how many there are.
    pub(crate) fn fill(
        out: &mut Atomic,
        spec: &TensorSpec,
        fill: &mut impl FnMut(&TensorSpec, &mut Sink<'_>) -> Result<()>,
    ) -> Result<u64> {
        let mut sink = Sink { out, written: 0 };
        fill(spec, &mut sink)?;
        spec.check(sink.written)?;
        Ok(sink.written)
    }
}

/// Writes a small file in one go.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut out = Atomic::create(path)?;
    out.write(bytes)?;
    out.commit()
}

/// A name beside `target` that no other writer uses.
fn temporary_name(target: &Path) -> Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = target.file_name();
    let name = name.ok_or_else(|| Error::request(format!("{}: has no file name", target.display())))?;
    let mut temp = OsString::from(".");
    // File systems limit the length of a name, so a long one is not made longer.
    temp.push(if name.len() < 128 { name.to_owned() } else { OsString::from("long") });
    temp.push(format!(".{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    Ok(target.with_file_name(temp))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::scratch;

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let dir = scratch("a").join("b");
        let path = dir.join("out.bin");
        let mut w = Atomic::create(&path).unwrap();
        w.write(b"half").unwrap();
        assert!(!path.exists());
        drop(w);
        assert!(names(&dir).is_empty());

        write_file(&path, b"one").unwrap();
        write_file(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(names(&dir), ["out.bin"]);
        let e = write_file(&dir, b"x").unwrap_err().to_string();
        assert!(e.contains("is a folder"), "{e}");
        fs::remove_dir_all(dir.ancestors().nth(2).unwrap()).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn links_and_devices_survive() {
        let path = scratch("file");
        let link = path.with_file_name("link");
        fs::write(&path, b"old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write_file(&link, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        write_file(Path::new("/dev/null"), b"x").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
