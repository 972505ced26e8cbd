//! Devices that ggml registers, and execution streams on them.

use std::ffi::{c_char, c_void};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ggml_sys as sys;

use super::{rpc, text};
use crate::cancel::CancelToken;
use crate::error::{Error, Result};

/// One of ggml's devices. They live as long as the process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Dev(NonNull<sys::ggml_backend_device>);

// SAFETY: devices are static descriptions; ggml lets any thread query them.
unsafe impl Send for Dev {}
// SAFETY: as above.
unsafe impl Sync for Dev {}

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DevKind {
    Cpu,
    Gpu,
    IntegratedGpu,
    Other,
}

impl Dev {
    /// All devices, in ggml's order.
    pub(crate) fn all() -> Vec<Dev> {
        super::init();
        // SAFETY: indices are below the count; nothing unregisters a device.
        unsafe {
            (0..sys::ggml_backend_dev_count())
                .filter_map(|i| NonNull::new(sys::ggml_backend_dev_get(i)).map(Dev))
                .collect()
        }
    }

    /// The CPU.
    pub(crate) fn cpu() -> Result<Dev> {
        Dev::all().into_iter().find(|d| d.kind() == DevKind::Cpu).ok_or_else(|| {
            Error::device("no CPU device: no library of ggml beside the program is for this machine")
        })
    }

    /// Such as `CPU`, `CUDA0`, `RPC0`.
    pub(crate) fn name(self) -> String {
        // SAFETY: the device is alive.
        text(unsafe { sys::ggml_backend_dev_name(self.0.as_ptr()) })
    }

    /// The hardware's name; of a remote device, its worker's endpoint.
    pub(crate) fn description(self) -> String {
        rpc::endpoint(self).unwrap_or_else(|| {
            // SAFETY: the device is alive.
            text(unsafe { sys::ggml_backend_dev_description(self.0.as_ptr()) })
        })
    }

    /// An error if it is lost for good, which only remote devices can be.
    pub(crate) fn check(self) -> Result<()> {
        rpc::check(self)
    }

    /// The name of the driver that registered it, such as `CUDA`.
    pub(crate) fn driver(self) -> String {
        self.registry().map_or_else(String::new, |reg| {
            // SAFETY: registries live as long as the process.
            text(unsafe { sys::ggml_backend_reg_name(reg.as_ptr()) })
        })
    }

    /// CPU, GPU, …
    pub(crate) fn kind(self) -> DevKind {
        // SAFETY: the device is alive.
        match unsafe { sys::ggml_backend_dev_type(self.0.as_ptr()) } {
            sys::GGML_BACKEND_DEVICE_TYPE_CPU => DevKind::Cpu,
            sys::GGML_BACKEND_DEVICE_TYPE_GPU => DevKind::Gpu,
            sys::GGML_BACKEND_DEVICE_TYPE_IGPU => DevKind::IntegratedGpu,
            _ => DevKind::Other,
        }
    }

    /// Free and total memory in bytes; zeros when the device does not say.
    pub(crate) fn memory(self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device is alive and both pointers are valid.
        unsafe { sys::ggml_backend_dev_memory(self.0.as_ptr(), &mut free, &mut total) };
        (free, total)
    }

    /// The largest single buffer, in bytes; 0 where the device has no memory.
    pub(crate) fn max_buffer(self) -> usize {
        // SAFETY: buffer types live as long as the process.
        self.buffer_type().map_or(0, |kind| unsafe { sys::ggml_backend_buft_get_max_size(kind.as_ptr()) })
    }

    /// Bytes that tensors' offsets must be multiples of.
    pub(crate) fn alignment(self) -> usize {
        // SAFETY: buffer types live as long as the process.
        self.buffer_type().map_or(1, |kind| unsafe { sys::ggml_backend_buft_get_alignment(kind.as_ptr()) }.max(1))
    }

    pub(super) fn buffer_type(self) -> Result<NonNull<sys::ggml_backend_buffer_type>> {
        // SAFETY: the device is alive.
        let kind = unsafe { sys::ggml_backend_dev_buffer_type(self.0.as_ptr()) };
        NonNull::new(kind).ok_or_else(|| Error::device(format!("{} has no memory of its own", self.name())))
    }

    pub(super) fn raw(self) -> *mut sys::ggml_backend_device {
        self.0.as_ptr()
    }

    fn registry(self) -> Option<NonNull<sys::ggml_backend_reg>> {
        // SAFETY: the device is alive.
        NonNull::new(unsafe { sys::ggml_backend_dev_backend_reg(self.0.as_ptr()) })
    }

    /// A function that a driver offers beyond the common interface.
    fn proc_address(self, name: &'static std::ffi::CStr) -> Option<NonNull<c_void>> {
        let reg = self.registry()?;
        // SAFETY: the registry is alive and the name is NUL-terminated.
        NonNull::new(unsafe {
            sys::ggml_backend_reg_get_proc_address(reg.as_ptr(), name.as_ptr() as *const c_char)
        })
    }
}

impl std::fmt::Debug for Dev {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// `GGML_MAX_N_THREADS`.
const MAX_THREADS: usize = 512;

type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, i32);
type SetAbort = unsafe extern "C" fn(sys::ggml_backend_t, sys::ggml_abort_callback, *mut c_void);

/// A stream of work on a device.
pub(crate) struct Backend {
    raw: NonNull<sys::ggml_backend>,
    dev: Dev,
    set_abort: Option<SetAbort>,
}

// SAFETY: a backend may be used from any one thread at a time; all methods that use it take `&mut self`.
unsafe impl Send for Backend {}

impl Backend {
    /// A stream on `dev`; on the CPU, with that many threads.
    pub(crate) fn new(dev: Dev, threads: usize) -> Result<Backend> {
        super::init();
        // SAFETY: the device is alive; no parameters.
        let raw = unsafe { sys::ggml_backend_dev_init(dev.raw(), std::ptr::null()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::device(format!("{} cannot be opened", dev.name())))?;
        if let Some(f) = dev.proc_address(c"ggml_backend_set_n_threads") {
            // SAFETY: the driver's function of this name has this signature (ggml-backend.h).
            unsafe {
                let f: SetThreads = std::mem::transmute::<*mut c_void, SetThreads>(f.as_ptr());
                f(raw.as_ptr(), threads.clamp(1, MAX_THREADS) as i32);
            }
        }
        let set_abort = dev.proc_address(c"ggml_backend_set_abort_callback").map(|f| {
            // SAFETY: the driver's function of this name has this signature (ggml-backend.h).
            unsafe { std::mem::transmute::<*mut c_void, SetAbort>(f.as_ptr()) }
        });
        Ok(Backend { raw, dev, set_abort })
    }

    /// Whether a running graph can be stopped between two operations.
    pub(crate) fn can_abort(&self) -> bool {
        self.set_abort.is_some()
    }

    /// Runs `work`, which computes on this stream, so that `cancel` stops it between two operations.
    pub(super) fn abortable(
        &mut self,
        cancel: &CancelToken,
        work: impl FnOnce(sys::ggml_backend_t) -> sys::ggml_status,
    ) -> Result<()> {
        let raw = self.raw.as_ptr();
        cancel.check()?;
        self.dev.check()?;
        if let Some(set) = self.set_abort {
            // SAFETY: the flag outlives the computation because `cancel` does, and the callback is removed below.
            unsafe { set(raw, Some(should_stop), Arc::as_ptr(cancel.flag()) as *mut c_void) };
        }
        let status = work(raw);
        if let Some(set) = self.set_abort {
            // SAFETY: the backend is alive.
            unsafe { set(raw, None, std::ptr::null_mut()) };
        }
        match status {
            sys::GGML_STATUS_SUCCESS => Ok(()),
            sys::GGML_STATUS_ABORTED => Err(Error::cancelled()),
            sys::GGML_STATUS_ALLOC_FAILED => {
                Err(Error::device(format!("{} ran out of memory while computing", self.dev.name())))
            }
            _ => Err(Error::device(format!("{} failed to compute", self.dev.name()))),
        }
    }
}

unsafe extern "C" fn should_stop(flag: *mut c_void) -> bool {
    // SAFETY: `flag` is the `AtomicBool` of a live `CancelToken`, set by `Backend::abortable`.
    unsafe { (*(flag as *const AtomicBool)).load(Ordering::Acquire) }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: the stream is owned here and idle: every computation is synchronous.
        unsafe { sys::ggml_backend_free(self.raw.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_cpu() {
        let cpu = Dev::cpu().unwrap();
        assert_eq!(cpu.name(), "CPU");
        assert_eq!(cpu.driver(), "CPU");
        assert!(cpu.memory().1 > 0);
        assert!(Backend::new(cpu, 2).unwrap().can_abort());
    }
}
