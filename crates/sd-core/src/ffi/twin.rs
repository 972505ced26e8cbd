//! Nodes that a device cannot compute, computed by the CPU on copies of their operands.

use std::collections::HashMap;
use std::ptr::NonNull;

use ggml_sys as sys;

use super::buffer::Buffer;
use super::context::{Context, Graph, Id};
use super::device::{Backend, Dev};
use crate::cancel::CancelToken;
use crate::error::{Error, Result};

/// One node with the memory it touches, on the host.
pub(super) struct Twin {
    ctx: Context,
    graph: Graph,
    /// Tensors that own memory: here, and on the host.
    roots: Vec<(Id, Id)>,
    /// The one among them that the node writes.
    result: (Id, Id),
    /// Offsets on the host, in the order of `roots`.
    offsets: Vec<usize>,
    size: usize,
}

/// The nodes of one graph that the CPU takes over.
pub(super) struct Twins {
    list: Vec<Twin>,
    buffer: std::sync::Arc<Buffer>,
    backend: Backend,
    cpu: Dev,
}

impl Twins {
    /// Twins of `nodes` of `ctx`.
    pub(super) fn new(ctx: &Context, nodes: &[Id], threads: usize) -> Result<Twins> {
        let cpu = Dev::cpu()?;
        let list = nodes.iter().map(|&n| Twin::new(ctx, n, cpu)).collect::<Result<Vec<_>>>()?;
        let size = list.iter().map(|t| t.size).max().unwrap_or(0);
        let buffer = std::sync::Arc::new(Buffer::alloc(cpu, size)?);
        Ok(Twins { list, buffer, backend: Backend::new(cpu, threads)?, cpu })
    }

    /// Computes the node of twin `i`, whose operands and result lie in device memory.
    pub(super) fn compute(&mut self, ctx: &Context, i: usize, cancel: &CancelToken) -> Result<()> {
        let Some(t) = self.list.get_mut(i) else { return Err(Error::internal("no such twin")) };
        for (&(_, here), &offset) in t.roots.iter().zip(&t.offsets) {
            t.ctx.place(here, &self.buffer, offset, self.cpu)?;
        }
        for &(there, here) in &t.roots {
            let (src, dst) = (ctx.raw(there)?, t.ctx.raw(here)?);
            // SAFETY: both lie in live buffers, the caller's and `self.buffer`, and have the same layout.
            unsafe { sys::ggml_backend_tensor_copy(src, dst) };
        }
        t.ctx.compute(&mut t.graph, &mut self.backend, std::slice::from_ref(&self.buffer), cancel)?;
        let (dst, src) = (ctx.raw(t.result.0)?, t.ctx.raw(t.result.1)?);
        // SAFETY: as above.
        unsafe { sys::ggml_backend_tensor_copy(src, dst) };
        Ok(())
    }
}

impl Twin {
    fn new(from: &Context, node: Id, cpu: Dev) -> Result<Twin> {
        let mut ctx = Context::new();
        let mut roots: Vec<(Id, Id)> = Vec::new();
        let mut copies: HashMap<Id, Id> = HashMap::new();
        for id in from.sources(node)?.into_iter().chain([node]) {
            if copies.contains_key(&id) {
                continue;
            }
            let root = from.root(id)?;
            let here = match roots.iter().find(|r| r.0 == root) {
                Some(r) => r.1,
                None => {
                    let leaf = ctx.leaf(from.dtype(root)?, from.ne(root)?)?;
                    roots.push((root, leaf));
                    leaf
                }
            };
            let copy = if root == id { here } else { ctx.shown_as(here, from, id)? };
            copies.insert(id, copy);
        }
        let of = |id: Id| copies.get(&id).copied().ok_or_else(|| Error::internal("an operand has no copy"));
        let sources = from.get(node)?.src.iter().map(|&s| match from.known(s) {
            Some(id) => of(id).map(Some),
            None => Ok(None),
        });
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let copy = of(node)?;
        ctx.compute_as(copy, from, node, &sources)?;
        if !ctx.is_supported(copy, cpu)? {
            return Err(Error::unsupported(format!("no device computes {}", from.op_name(node)?)));
        }
        let graph = ctx.graph(&[copy])?;
        let (mut offsets, mut size) = (Vec::new(), 0);
        for &(_, here) in &roots {
            offsets.push(size);
            size += ctx.alloc_size(here, cpu)?.next_multiple_of(cpu.alignment());
        }
        let root = from.root(node)?;
        let result = *roots.iter().find(|r| r.0 == root).ok_or_else(|| Error::internal("a node has no memory"))?;
        Ok(Twin { ctx, graph, roots, result, offsets, size })
    }
}

impl Context {
    /// The tensor behind an operand's address.
    fn known(&self, raw: *mut sys::ggml_tensor) -> Option<Id> {
        self.find(NonNull::new(raw)?)
    }

    /// A view of `root` as `like`, of another context, is a view of its own.
    fn shown_as(&mut self, root: Id, from: &Context, like: Id) -> Result<Id> {
        let model = from.get(like)?;
        let (ne, nb, offset) = (model.ne, model.nb, model.view_offs);
        let pool = self.pool()?;
        let raw = self.raw(root)?;
        // SAFETY: the pool has room for one tensor; `root` has the layout of the tensor that `like` shows, inside of
        // which the view's sizes, strides and offset stay.
        let view = unsafe {
            let view = sys::ggml_view_tensor(pool, raw);
            if let Some(v) = view.as_mut() {
                v.ne = ne;
                v.nb = nb;
                v.view_offs = offset;
            }
            view
        };
        self.adopt(view)
    }

    /// Makes `id` the result of the operation of `like`, of another context, on `sources`.
    fn compute_as(&mut self, id: Id, from: &Context, like: Id, sources: &[Option<Id>]) -> Result<()> {
        let model = from.get(like)?;
        let mut src = [std::ptr::null_mut(); 10];
        for (slot, s) in src.iter_mut().zip(sources) {
            if let Some(s) = s {
                *slot = self.raw(*s)?;
            }
        }
        let raw = self.raw(id)?;
        // SAFETY: the tensor is alive and owned by this context; operation, parameters, sizes and strides of result
        // and operands are those of a node that was checked when it was built.
        unsafe {
            (*raw).op = model.op;
            (*raw).op_params = model.op_params;
            (*raw).flags = model.flags;
            (*raw).src = src;
        }
        Ok(())
    }
}
