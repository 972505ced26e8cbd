//! A pretend device. It has a size and a clock, computes nothing, and knows for every place in its memory what a real
//! device would have there.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::registry::{Device, DeviceKind, Memory};
use crate::error::{Error, Result};
use crate::ffi::{Held, next_serial};

/// What a [`Noop`] has, and what takes how long on its clock.
#[derive(Clone, Debug, Default)]
pub struct NoopOptions {
    /// Bytes of memory.
    pub memory: usize,
    /// What a byte takes that is copied to it. Copies go one after the other, beside computations.
    pub per_byte: Duration,
    /// What a node of a program takes that is computed.
    pub per_node: Duration,
}

/// A pretend device. The values of its memory are numbers that say what was computed of what: two runs give the same
/// results if and only if they computed the same of the same weights and inputs. Reading what was never written, or was
/// overwritten, is an error.
#[derive(Debug)]
pub struct Noop {
    options: NoopOptions,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held: Held,
    /// How many allocations succeed before one fails.
    refuse: Option<usize>,
    /// Until when computations go, and who waits for copies.
    now: Duration,
    /// Until when copies go.
    copies: Duration,
}

impl Noop {
    /// A device that nobody else has.
    pub fn new(options: NoopOptions) -> Arc<Noop> {
        Arc::new(Noop { options, state: Mutex::default() })
    }

    /// It as a device.
    pub fn device(self: &Arc<Self>) -> Arc<Device> {
        Device::pretended("noop", "noop", DeviceKind::Noop, self.clone())
    }

    /// What its clock shows: how long the runs so far would have taken.
    pub fn elapsed(&self) -> Duration {
        self.lock().now
    }

    /// Lets one allocation fail, after `more` that succeed.
    pub fn refuse(&self, more: usize) {
        self.lock().refuse = Some(more);
    }

    /// Whether no allocation is still to fail.
    pub fn has_refused(&self) -> bool {
        self.lock().refuse.is_none()
    }

    pub(super) fn memory(&self) -> Memory {
        let total = self.options.memory;
        Memory { free: total.saturating_sub(self.lock().held.now), total }
    }

    pub(super) fn held(&self) -> Held {
        self.lock().held
    }

    pub(super) fn reset_peak(&self) {
        let mut state = self.lock();
        state.held.peak = state.held.now;
    }

    pub(crate) fn alloc(self: &Arc<Self>, size: usize) -> Result<Cells> {
        let mut state = self.lock();
        let refused = state.refuse == Some(0);
        state.refuse = state.refuse.and_then(|more| more.checked_sub(1));
        let now = state.held.now.saturating_add(size);
        if refused || now > self.options.memory {
            return Err(Error::device(format!("noop could not provide {size} bytes")));
        }
        state.held.now = now;
        state.held.peak = state.held.peak.max(now);
        Ok(Cells { noop: self.clone(), serial: next_serial(), size, values: Mutex::default() })
    }

    /// Copies so many bytes, not before `from`; when they are there.
    pub(crate) fn copy(&self, from: Duration, bytes: usize) -> Duration {
        let mut state = self.lock();
        state.copies = state.copies.max(from) + times(self.options.per_byte, bytes);
        state.copies
    }

    /// Waits for what is there at that time.
    pub(crate) fn wait(&self, until: Duration) {
        let mut state = self.lock();
        state.now = state.now.max(until);
    }

    /// Computes so many nodes.
    pub(crate) fn compute(&self, nodes: usize) {
        self.lock().now += times(self.options.per_node, nodes);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn times(each: Duration, n: usize) -> Duration {
    each.saturating_mul(u32::try_from(n).unwrap_or(u32::MAX))
}

/// What stands for a value, made of all that decides it.
pub(crate) fn number(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Memory of a [`Noop`], given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Cells {
    noop: Arc<Noop>,
    serial: u64,
    size: usize,
    /// Length and number of what begins at an offset.
    values: Mutex<BTreeMap<usize, (usize, u64)>>,
}

impl Cells {
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    pub(crate) fn noop(&self) -> &Arc<Noop> {
        &self.noop
    }

    /// Puts a value of `len` bytes at `at`, in place of all that it touches.
    pub(crate) fn write(&self, at: usize, len: usize, value: u64) -> Result<()> {
        let end = at.checked_add(len).filter(|&end| end <= self.size);
        let end = end.ok_or_else(|| Error::internal(format!("{len} bytes at {at} of {}", self.size)))?;
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        values.retain(|&start, (len, _)| start + *len <= at || end <= start);
        values.insert(at, (len, value));
        Ok(())
    }

    /// The value at `at`.
    pub(crate) fn read(&self, at: usize) -> Result<u64> {
        let values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let found = values.get(&at).map(|v| v.1);
        found.ok_or_else(|| Error::internal(format!("there is no value at {at} of {}", self.size)))
    }
}

impl Drop for Cells {
    fn drop(&mut self) {
        let mut state = self.noop.lock();
        state.held.now = state.held.now.saturating_sub(self.size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_and_values_do_not_outlive_what_covers_them() {
        let noop = Noop::new(NoopOptions { memory: 100, ..NoopOptions::default() });
        let a = noop.alloc(60).unwrap();
        assert!(noop.alloc(41).is_err());
        assert_eq!((noop.memory().free, noop.held().peak), (40, 60));
        for (at, value) in [(0, 1), (10, 2), (20, 3)] {
            a.write(at, 10, value).unwrap();
        }
        a.write(15, 10, 4).unwrap();
        let got: Vec<Option<u64>> = [0, 10, 15, 20].into_iter().map(|at| a.read(at).ok()).collect();
        assert_eq!(got, [Some(1), None, Some(4), None]);
        assert!(a.write(55, 6, 0).is_err());
        drop(a);
        assert_eq!((noop.held().now, noop.held().peak), (0, 60));
        noop.refuse(1);
        let b = noop.alloc(1);
        assert!(b.is_ok() && noop.alloc(1).is_err() && noop.has_refused() && noop.alloc(1).is_ok());
    }

    #[test]
    fn copies_go_on_beside_computations() {
        let second = Duration::from_secs(1);
        let noop = Noop::new(NoopOptions { memory: 0, per_byte: second, per_node: second });
        let first = noop.copy(noop.elapsed(), 3);
        noop.wait(first);
        let next = noop.copy(noop.elapsed(), 2);
        noop.compute(4);
        noop.wait(next);
        assert_eq!(noop.elapsed(), 7 * second);
    }
}
