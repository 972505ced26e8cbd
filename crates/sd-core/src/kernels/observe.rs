//! What each computation of a program takes, for reports on speed.

use std::cell::RefCell;

use crate::ffi::HostOp;

/// One computation by the project's own kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Computed {
    /// Which kernel.
    pub kernel: &'static str,
    /// Multiplications and additions of a product, as if it were computed directly; 0 for what is none.
    pub operations: f64,
    /// Bytes of operands and result.
    pub bytes: f64,
    /// Seconds of all processors together.
    pub seconds: f64,
}

thread_local! {
    static SEEN: RefCell<Option<Vec<Computed>>> = const { RefCell::new(None) };
}

/// What `f` returns, with the computations that programs make while this thread runs them in it, in order.
pub fn observe<T>(f: impl FnOnce() -> T) -> (T, Vec<Computed>) {
    let before = SEEN.replace(Some(Vec::new()));
    let out = f();
    (out, SEEN.replace(before).unwrap_or_default())
}

/// Calls `f`, which computes `op`, and notes what it took if somebody wants to know.
pub(super) fn noting<T>(op: &dyn HostOp, f: impl FnOnce() -> T) -> T {
    if SEEN.with_borrow(Option::is_none) {
        return f();
    }
    let start = processor_seconds();
    let out = f();
    let seconds = processor_seconds() - start;
    SEEN.with_borrow_mut(|seen| {
        seen.iter_mut().for_each(|all| {
            all.push(Computed {
                kernel: op.name(),
                operations: op.operations() as f64,
                bytes: op.bytes() as f64,
                seconds,
            });
        });
    });
    out
}

/// Seconds that the threads of this process have computed; those that have passed where the system does not say.
pub fn processor_seconds() -> f64 {
    #[cfg(target_os = "linux")]
    {
        #[repr(C)]
        struct Time {
            seconds: i64,
            nanoseconds: std::ffi::c_long,
        }
        unsafe extern "C" {
            fn clock_gettime(clock: std::ffi::c_int, to: *mut Time) -> std::ffi::c_int;
        }
        /// `CLOCK_PROCESS_CPUTIME_ID`.
        const PROCESS: std::ffi::c_int = 2;
        let mut time = Time { seconds: 0, nanoseconds: 0 };
        // SAFETY: `time` is a `timespec` of 64-bit Linux.
        if cfg!(target_pointer_width = "64") && unsafe { clock_gettime(PROCESS, &mut time) } == 0 {
            return time.seconds as f64 + time.nanoseconds as f64 / 1e9;
        }
    }
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |t| t.as_secs_f64())
}
