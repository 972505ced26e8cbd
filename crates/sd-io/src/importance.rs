//! Importance matrices: for each weight, the mean square of what its columns are multiplied by. Quantisation keeps the
//! columns that matter most closest.
//!
//! Two layouts are read: that of llama.cpp before it used GGUF, which stable-diffusion.cpp writes too, and its GGUF files.
//! The former is written. In it stand a count of weights, for each a name with its length before it, a count of calls, a
//! count of columns and as many numbers, which are mean squares times calls; last of all the number of the last call. Integers
//! are little-endian and of 32 bits, numbers are f32.

use std::collections::BTreeMap;
use std::path::Path;

use sd_core::convert::to_f32;
use sd_core::{Error, Result, WeightSource};

use crate::atomic::write_file;
use crate::checkpoint::Checkpoint;
use crate::cursor::{Cursor, Fault};
use crate::file::{Access, SourceFile};

/// The largest file that is read; those of the largest networks have some tens of megabytes.
const MAX_FILE: u64 = 512 << 20;

/// The longest name of a weight.
const MAX_NAME: u32 = 4096;

/// What GGUF files put after the name of a weight.
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// Mean squares by the name of the weight and its columns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Importance {
    entries: BTreeMap<String, Columns>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Columns {
    /// Mean squares times calls.
    sums: Vec<f64>,
    calls: u32,
}

impl Importance {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, is of neither layout, is cut off, or holds values that are negative or not finite.
    pub fn open(path: impl AsRef<Path>) -> Result<Importance> {
        let path = path.as_ref();
        let file = SourceFile::open(path, Access::Read)?;
        if file.len() > MAX_FILE {
            return Err(Error::bad_file(path, format!("an importance matrix of {} bytes", file.len())));
        }
        let bytes = file.prefix(file.len())?;
        if bytes.starts_with(b"GGUF") {
            return Importance::from_gguf(&Checkpoint::open_with(path, Access::Read)?);
        }
        Importance::parse(&bytes).map_err(|what| Error::bad_file(path, format!("no importance matrix: {what}")))
    }

    /// Reads the layout without GGUF from memory; the error says what is wrong.
    pub fn parse(bytes: &[u8]) -> std::result::Result<Importance, String> {
        let fault = |f: Fault| match f {
            Fault::Bad(what) => what,
            Fault::More(_) => "it is cut off".to_owned(),
        };
        let mut at = Cursor::new(bytes, bytes.len() as u64);
        let count = at.u32("the count of weights").map_err(fault)?;
        let mut out = Importance::default();
        // Each takes 16 bytes and more.
        if count == 0 || u64::from(count) > at.remaining() / 16 {
            return Err(format!("it claims {count} weights in {} bytes", bytes.len()));
        }
        for _ in 0..count {
            let len = at.u32("the length of a name").map_err(fault)?;
            if len == 0 || len > MAX_NAME {
                return Err(format!("a name of {len} bytes"));
            }
            let name = at.take(u64::from(len), "a name").map_err(fault)?;
            let name = std::str::from_utf8(name).map_err(|_| "a name that is not UTF-8".to_owned())?;
            let calls = at.u32("a count of calls").map_err(fault)?;
            let columns = at.u32("a count of columns").map_err(fault)?;
            let values = at.take(u64::from(columns) * 4, name).map_err(fault)?;
            let values = values.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
            out.insert(name, values.collect(), calls)?;
        }
        Ok(out)
    }

    fn from_gguf(file: &Checkpoint) -> Result<Importance> {
        let bad = |what: String| Error::bad_file(file.path(), format!("no importance matrix: {what}"));
        let mut out = Importance::default();
        for name in file.names().into_iter().filter_map(|n| n.strip_suffix(SUMS)) {
            let values = |end: &str| -> Result<Vec<f32>> {
                let full = format!("{name}{end}");
                let meta = file.meta(&full).ok_or_else(|| bad(format!("{full} is missing")))?;
                to_f32(meta.dtype, &file.bytes(&full)?.read()?, meta.shape.elements())
            };
            let (sums, counts) = (values(SUMS)?, values(COUNTS)?);
            // Weights of experts have a count each and stand one after another; those here have one.
            let [count] = counts[..] else { return Err(bad(format!("{name} has {} counts", counts.len()))) };
            if !(0.0..=f32::from(u16::MAX) * 65536.0).contains(&count) {
                return Err(bad(format!("{name} has the count {count}")));
            }
            out.insert(name, sums.into_iter().map(f64::from).collect(), count as u32).map_err(bad)?;
        }
        if out.entries.is_empty() { Err(bad(format!("no tensor ends in {SUMS}"))) } else { Ok(out) }
    }

    fn insert(&mut self, name: &str, sums: Vec<f64>, calls: u32) -> std::result::Result<(), String> {
        if let Some(wrong) = sums.iter().find(|v| !v.is_finite() || **v < 0.0) {
            return Err(format!("{name} has the value {wrong}"));
        }
        if self.entries.insert(name.to_owned(), Columns { sums, calls }).is_some() {
            return Err(format!("{name} is there twice"));
        }
        Ok(())
    }

    /// Adds what another collection found.
    ///
    /// # Errors
    /// A weight has another number of columns there.
    pub fn merge(&mut self, other: Importance) -> Result<()> {
        for (name, columns) in other.entries {
            let Some(own) = self.entries.get_mut(&name) else {
                self.entries.insert(name, columns);
                continue;
            };
            if own.sums.len() != columns.sums.len() {
                let (a, b) = (own.sums.len(), columns.sums.len());
                return Err(Error::request(format!(
                    "importance of {name}: {a} columns in one file, {b} in another"
                )));
            }
            own.sums.iter_mut().zip(&columns.sums).for_each(|(a, b)| *a += b);
            own.calls = own.calls.saturating_add(columns.calls);
        }
        Ok(())
    }

    /// Adds the sums over `rows` rows of the squares in each column of what a weight was multiplied by.
    ///
    /// # Errors
    /// The weight had another number of columns before, or a sum is not finite.
    pub fn add(&mut self, name: &str, sums: &[f32], rows: usize) -> Result<()> {
        let mean = |v: &f32| f64::from(*v) / rows.max(1) as f64;
        let mut one = Importance::default();
        one.insert(name, sums.iter().map(mean).collect(), 1).map_err(Error::non_finite)?;
        self.merge(one)
    }

    /// Whether it is about nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// How many weights it is about.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The mean square of what each column of a weight is multiplied by; `None` for a weight that was never used.
    pub fn columns(&self, name: &str) -> Option<Vec<f32>> {
        let columns = self.entries.get(name).filter(|c| c.calls > 0 && c.sums.iter().any(|v| *v > 0.0))?;
        Some(columns.sums.iter().map(|v| (v / f64::from(columns.calls)) as f32).collect())
    }

    /// Writes a file. It appears under its name when it is complete.
    ///
    /// # Errors
    /// Nothing was collected; the disk.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        if self.entries.is_empty() {
            return Err(Error::request("nothing was collected: no weight was used that could be quantised"));
        }
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
        let mut out = number(self.entries.len()).to_vec();
        for (name, columns) in &self.entries {
            out.extend(number(name.len()));
            out.extend(name.as_bytes());
            out.extend(columns.calls.to_le_bytes());
            out.extend(number(columns.sums.len()));
            out.extend(columns.sums.iter().flat_map(|v| (*v as f32).to_le_bytes()));
        }
        let last = self.entries.values().map(|c| c.calls).max().unwrap_or(0);
        out.extend(last.to_le_bytes());
        write_file(path.as_ref(), &out)
    }
}
