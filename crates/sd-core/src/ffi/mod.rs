//! Safe wrappers over ggml: the only `unsafe` code that touches it.
//!
//! ggml ends the process when an operand does not fit, so every wrapper checks what ggml asserts and returns
//! [`Error::internal`](crate::Error::internal) instead. Shapes here are in ggml's order: innermost axis first.

pub(crate) mod buffer;
pub(crate) mod context;
mod custom;
pub(crate) mod device;
mod ops;
mod relay;
pub(crate) mod rpc;
mod twin;
pub(crate) mod types;

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, Once};

use ggml_sys as sys;

pub(crate) use buffer::{Buffer, Held, held_on, next_serial, reset_peak};
pub(crate) use context::{Context, Graph, Id, PIECE};
pub(crate) use custom::{HostOp, Operand};
pub(crate) use device::{Backend, Dev, DevKind};
pub(crate) use ops::{Binary, Conv, Interpolation, Unary};

/// The most elements a tensor may have: a hundred times what the largest machines hold.
pub(crate) const MAX_ELEMENTS: usize = 1 << 46;

/// Prepares ggml once per process: its log goes to `tracing`.
pub(crate) fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both callbacks have the signatures ggml declares, never unwind and live as long as the process.
        unsafe {
            sys::ggml_log_set(Some(log), std::ptr::null_mut());
            sys::ggml_set_abort_callback(Some(aborting));
        }
        #[cfg(feature = "dynamic-backends")]
        load_drivers();
    });
}

/// Loads what of ggml's drivers lies beside the program: for the processor the best that it can run.
#[cfg(feature = "dynamic-backends")]
fn load_drivers() {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(e) => return tracing::error!("ggml's drivers are beside the program, and that cannot be found: {e}"),
    };
    let folder = program.parent().unwrap_or(&program).to_string_lossy().into_owned();
    match std::ffi::CString::new(folder) {
        // SAFETY: the path is NUL-terminated.
        Ok(folder) => unsafe { sys::ggml_backend_load_all_from_path(folder.as_ptr()) },
        Err(e) => tracing::error!("the program's folder: {e}"),
    }
}

/// The last text of each level that had no line end yet: ggml prints lines in pieces.
static PARTIAL: Mutex<(u32, String)> = Mutex::new((0, String::new()));

unsafe extern "C" fn log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml passes a NUL-terminated string that outlives the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let Ok(mut partial) = PARTIAL.lock() else { return };
    if level != sys::GGML_LOG_LEVEL_CONT {
        partial.0 = level;
    }
    partial.1.push_str(&text);
    if !partial.1.ends_with('\n') {
        return;
    }
    let (level, line) = (partial.0, std::mem::take(&mut partial.1));
    drop(partial);
    let line = line.trim_end();
    // What fails in ggml is an error here too, which says more; its own words are for developers.
    match level {
        sys::GGML_LOG_LEVEL_ERROR | sys::GGML_LOG_LEVEL_WARN | sys::GGML_LOG_LEVEL_INFO => {
            tracing::debug!(target: "ggml", "{line}");
        }
        _ => tracing::trace!(target: "ggml", "{line}"),
    }
}

unsafe extern "C" fn aborting(message: *const c_char) {
    if message.is_null() {
        return;
    }
    // SAFETY: ggml passes a NUL-terminated string that outlives the call.
    let message = unsafe { CStr::from_ptr(message) }.to_string_lossy();
    if tracing::dispatcher::has_been_set() {
        tracing::error!(target: "ggml", "ends the process: {message}");
    } else {
        // ggml prints nothing itself once a callback is set.
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "ggml ends the process: {message}");
    }
}

/// Text that ggml owns for the life of the process.
fn text(p: *const c_char) -> String {
    if p.is_null() {
        return String::new();
    }
    // SAFETY: ggml's names are NUL-terminated and live as long as the object named, which the caller holds.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}
