//! Operations of the host's own inside ggml's graphs, for the CPU device.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use ggml_sys as sys;

use super::context::{Context, Id, sized};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Type, rows and elements of a row.
pub(crate) type Operand = (DType, [usize; 2]);

/// A computation that ggml calls from each of its threads.
pub(crate) trait HostOp: Send + Sync {
    /// What it reads; all contiguous.
    fn operands(&self) -> Vec<Operand>;
    /// Elements of the f32 result.
    fn elements(&self) -> usize;
    /// Elements from the first of the result to behind its last, which may have gaps.
    fn reach(&self) -> usize {
        self.elements()
    }
    /// Bytes that it reads and writes.
    fn bytes(&self) -> usize {
        let bytes = |&(dtype, [rows, row]): &Operand| dtype.bytes(rows * row, row).unwrap_or(0);
        self.operands().iter().map(bytes).sum::<usize>() + 4 * self.elements()
    }
    /// About how many arithmetic operations it takes.
    fn work(&self) -> usize {
        self.elements()
    }
    /// Multiplications and additions of a product, as if it were computed directly; 0 for what is none.
    fn operations(&self) -> usize {
        0
    }
    /// The kernel's name.
    fn name(&self) -> &'static str {
        std::any::type_name::<Self>().rsplit("::").next().unwrap_or_default()
    }
    /// Computes part `part` of `parts`. It must not unwind.
    ///
    /// # Safety
    /// `operands` are valid for what [`HostOp::operands`] says and `out` for [`HostOp::elements`]; each part is
    /// computed by one thread.
    unsafe fn compute(&self, out: *mut f32, operands: &[*const u8], part: usize, parts: usize);
}

/// What a node's address leads to.
pub(super) struct Custom {
    op: Box<dyn HostOp>,
    operands: usize,
}

/// The most operands.
const OPERANDS: usize = 4;

impl Context {
    /// The result of `op` on `operands`, in sizes `ne`. Only the CPU device can compute it.
    pub(crate) fn custom(&mut self, op: Box<dyn HostOp>, operands: &[Id], ne: [usize; 4]) -> Result<Id> {
        sized(ne)?;
        let wanted = op.operands();
        let mut fits = wanted.len() == operands.len()
            && wanted.len() <= OPERANDS
            && ne.iter().product::<usize>() == op.elements()
            && !ne.contains(&0);
        let mut raw = [std::ptr::null_mut(); OPERANDS];
        for ((&id, (dtype, [rows, row])), raw) in operands.iter().zip(wanted).zip(&mut raw) {
            let bytes = rows.checked_mul(row).and_then(|n| dtype.bytes(n, row));
            fits &= self.dtype(id)? == dtype && self.is_contiguous(id)? && bytes == Some(self.bytes(id)?);
            *raw = self.raw(id)?;
        }
        if !fits {
            return Err(Error::internal("a kernel's operands do not fit"));
        }
        let custom = Arc::new(Custom { op, operands: operands.len() });
        let user = Arc::as_ptr(&custom).cast_mut().cast::<c_void>();
        self.keep(custom);
        let pool = self.pool()?;
        let [n0, n1, n2, n3] = ne.map(|n| n as i64);
        // SAFETY: the pool has room for one tensor; the operands are alive; `user` lives as long as this context, which
        // a graph's nodes are only computed with.
        let t = unsafe {
            sys::ggml_custom_4d(
                pool,
                sys::GGML_TYPE_F32,
                n0,
                n1,
                n2,
                n3,
                raw.as_mut_ptr(),
                operands.len() as c_int,
                Some(call),
                ALL_THREADS,
                user,
            )
        };
        self.adopt(t)
    }
}

/// `GGML_N_TASKS_MAX`.
const ALL_THREADS: c_int = -1;

unsafe extern "C" fn call(out: *mut sys::ggml_tensor, part: c_int, parts: c_int, user: *mut c_void) {
    // SAFETY: `user` is the `Custom` that `Context::custom` made for this node, and ggml calls with the node it made.
    let (custom, node) = unsafe { (&*user.cast::<Custom>(), &*out) };
    let mut operands = [std::ptr::null::<u8>(); OPERANDS];
    for (data, &source) in operands.iter_mut().zip(&node.src).take(custom.operands) {
        // SAFETY: `Context::custom` gave as many operands, which are alive and placed.
        *data = unsafe { (*source).data as *const u8 };
    }
    let operands = operands.get(..custom.operands).unwrap_or_default();
    // SAFETY: types, sizes and layout were checked when the node was made; ggml gives each thread a part of its own.
    unsafe { custom.op.compute(node.data.cast(), operands, part.max(0) as usize, parts.max(1) as usize) }
}
