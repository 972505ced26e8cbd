//! A list of computations over memory of this machine, each shared among threads.

use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::observe::noting;
use crate::cancel::CancelToken;
use crate::error::{Error, Result};
use crate::ffi::{Buffer, HostOp};

/// Operations below which waking a thread costs more than it saves.
const SMALL: usize = 1 << 17;

/// Operations of a part after which somebody may have cancelled.
const LONG: usize = 1 << 32;

/// A run of bytes in one of the memories that steps are run over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) memory: usize,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// One computation. Its result shares no memory with its operands, unless it is computed element by element and the
/// operand's elements are the result's.
pub(crate) struct Step {
    pub(crate) op: Box<dyn HostOp>,
    pub(crate) out: Place,
    pub(crate) operands: Vec<Place>,
}

/// Threads that sleep when there is nothing to do.
pub(crate) struct Pool {
    threads: usize,
    pool: Option<rayon::ThreadPool>,
}

impl Pool {
    /// A pool of that many threads.
    pub(crate) fn new(threads: usize) -> Result<Pool> {
        let named = |i: usize| format!("compute {i}");
        let pool = match threads {
            0 | 1 => None,
            n => {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(named).build();
                Some(pool.map_err(|e| Error::device(format!("cannot start {n} threads: {e}")))?)
            }
        };
        Ok(Pool { threads: threads.max(1), pool })
    }

    fn each(&self, parts: usize, f: impl Fn(usize) + Send + Sync) {
        match &self.pool {
            Some(pool) if parts > 1 => pool.install(|| (0..parts).into_par_iter().with_max_len(1).for_each(f)),
            _ => (0..parts).for_each(f),
        }
    }
}

/// Memory of this machine with what the steps may do to it.
pub(crate) struct Memory<'a> {
    buffer: &'a Buffer,
    /// Where its offsets count from.
    offset: usize,
}

impl<'a> Memory<'a> {
    /// The part of `buffer` from `offset` on, which must be memory of this machine.
    pub(crate) fn new(buffer: &'a Buffer, offset: usize) -> Memory<'a> {
        Memory { buffer, offset }
    }

    /// The address of a place, if it lies inside, and may be written if `write`.
    fn address(&self, place: &Place, write: bool) -> Option<usize> {
        let (start, size) = self.buffer.host()?;
        let from = self.offset.checked_add(place.offset)?;
        let inside = from.checked_add(place.bytes)? <= size;
        (inside && !(write && self.buffer.is_read_only())).then_some(start + from)
    }
}

/// Runs `steps` one after another. The result does not depend on the number of threads.
///
/// # Errors
/// A place is outside its memory or too small, or `cancel` was cancelled.
pub(crate) fn run(steps: &[Step], memories: &[Memory], pool: &Pool, cancel: &CancelToken) -> Result<()> {
    let outside = || Error::internal("a step reaches outside its memory");
    let address = |p: &Place, write: bool| memories.get(p.memory).and_then(|m| m.address(p, write));
    for step in steps {
        cancel.check()?;
        let wanted = step.op.operands();
        let large_enough = wanted.len() == step.operands.len()
            && step.op.reach().checked_mul(4).is_some_and(|n| n <= step.out.bytes)
            && wanted.iter().zip(&step.operands).all(|(&(dtype, [rows, row]), p)| {
                rows.checked_mul(row).and_then(|n| dtype.bytes(n, row)).is_some_and(|n| n <= p.bytes)
            });
        if !large_enough {
            return Err(outside());
        }
        let out = address(&step.out, true).ok_or_else(outside)?;
        let operands: Vec<usize> =
            step.operands.iter().map(|p| address(p, false)).collect::<Option<_>>().ok_or_else(outside)?;
        let work = step.op.work();
        let parts = if work < SMALL { 1 } else { pool.threads * (work / LONG).clamp(1, 8) };
        let stopped = AtomicBool::new(false);
        let each = |part| {
            if cancel.is_cancelled() {
                stopped.store(true, Ordering::Relaxed);
                return;
            }
            let operands: Vec<*const u8> = operands.iter().map(|&o| o as *const u8).collect();
            // SAFETY: the memories are alive and every place is as large as the operation says; nobody else uses the
            // memories that are written, and each part has a place of its own in the result.
            unsafe { step.op.compute(out as *mut f32, &operands, part, parts) };
        };
        noting(&*step.op, || pool.each(parts, each));
        if stopped.into_inner() {
            return Err(Error::cancelled());
        }
    }
    Ok(())
}
