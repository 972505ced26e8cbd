//! Tensors and the graph that computes them.

use std::collections::{HashMap, HashSet};
use std::ptr::NonNull;
use std::sync::Arc;

use ggml_sys as sys;

use super::buffer::Buffer;
use super::custom::Custom;
use super::device::{Backend, Dev};
use super::twin::Twins;
use super::types;
use crate::cancel::CancelToken;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::Data;

/// A tensor of one [`Context`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Id(u32);

impl Id {
    /// Its position in its context.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Tensor descriptions, without memory of their own: each is placed into a [`Buffer`] before it is used.
pub(crate) struct Context {
    pools: Vec<NonNull<sys::ggml_context>>,
    /// Tensors that still fit into the last pool.
    room: usize,
    tensors: Vec<NonNull<sys::ggml_tensor>>,
    ids: HashMap<NonNull<sys::ggml_tensor>, Id>,
    /// For each tensor that is not a view, the serial of its buffer and its offset; serial 0 is none.
    places: Vec<(u64, usize)>,
    /// What nodes computed by the host itself lead to.
    customs: Vec<Arc<Custom>>,
    /// Views whose addresses no longer follow from where their roots are.
    stale: bool,
}

/// An order in which tensors are computed, within one [`Context`].
pub(crate) struct Graph {
    pool: NonNull<sys::ggml_context>,
    /// Room for runs made later.
    extra: Option<NonNull<sys::ggml_context>>,
    raw: NonNull<sys::ggml_cgraph>,
    /// The same nodes in short runs, for devices that cannot be stopped inside a graph or cannot compute all of it.
    runs: Vec<Run>,
    /// Nodes that the CPU computes for the device.
    twins: Option<Twins>,
    nodes: Vec<Id>,
    /// Every tensor the nodes read or write, reduced to roots.
    roots: Vec<Id>,
}

enum Run {
    /// Nodes in order.
    Device(NonNull<sys::ggml_cgraph>),
    /// The node that is this twin's.
    Host(usize),
}

// SAFETY: descriptions have no thread affinity and are owned exclusively.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Send for Graph {}

/// Tensors per pool.
const POOL: usize = 512;
/// Bytes copied to a device at once: remote workers hold a copy of what they are sent.
pub(crate) const PIECE: usize = 4 << 20;
/// Nodes between two looks at the cancel flag on devices that cannot be stopped inside a graph.
const RUN: usize = 48;

/// Refuses tensors whose size in bytes would not fit a machine word many times over; ggml multiplies unchecked.
pub(super) fn sized(ne: [usize; 4]) -> Result<()> {
    let elements = ne.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    match elements {
        Some(n) if n <= super::MAX_ELEMENTS => Ok(()),
        _ => Err(Error::device(format!("{ne:?} elements are more than any device holds"))),
    }
}

fn pool(bytes: usize) -> Result<NonNull<sys::ggml_context>> {
    let params = sys::ggml_init_params { mem_size: bytes, mem_buffer: std::ptr::null_mut(), no_alloc: true };
    // SAFETY: ggml allocates the pool itself.
    NonNull::new(unsafe { sys::ggml_init(params) })
        .ok_or_else(|| Error::device("out of memory for graph descriptions"))
}

impl Context {
    /// An empty context.
    pub(crate) fn new() -> Context {
        super::init();
        Context {
            pools: Vec::new(),
            room: 0,
            tensors: Vec::new(),
            ids: HashMap::new(),
            places: Vec::new(),
            customs: Vec::new(),
            stale: false,
        }
    }

    /// How many tensors there are.
    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// A pool with room for one more tensor.
    pub(super) fn pool(&mut self) -> Result<*mut sys::ggml_context> {
        if self.room == 0 {
            // SAFETY: a constant of the library.
            let each = unsafe { sys::ggml_tensor_overhead() };
            self.pools.push(pool(each * POOL)?);
            self.room = POOL;
        }
        match self.pools.last() {
            Some(p) => Ok(p.as_ptr()),
            None => Err(Error::internal("no pool")),
        }
    }

    /// Takes a tensor that ggml just made in [`Context::pool`].
    pub(super) fn adopt(&mut self, raw: *mut sys::ggml_tensor) -> Result<Id> {
        let raw = NonNull::new(raw).ok_or_else(|| Error::internal("ggml made no tensor"))?;
        self.room = self.room.saturating_sub(1);
        let id = Id(self.tensors.len() as u32);
        self.tensors.push(raw);
        self.ids.insert(raw, id);
        self.places.push((0, 0));
        Ok(id)
    }

    /// Keeps what a node leads to for as long as the tensors.
    pub(super) fn keep(&mut self, custom: Arc<Custom>) {
        self.customs.push(custom);
    }

    pub(super) fn raw(&self, id: Id) -> Result<*mut sys::ggml_tensor> {
        match self.tensors.get(id.index()) {
            Some(t) => Ok(t.as_ptr()),
            None => Err(Error::internal("a tensor of another graph")),
        }
    }

    pub(super) fn get(&self, id: Id) -> Result<&sys::ggml_tensor> {
        // SAFETY: tensors live as long as the context and are changed only through `&mut self`.
        self.raw(id).map(|t| unsafe { &*t })
    }

    /// A tensor to be placed and filled: a weight, an input, or memory that later operations write.
    pub(crate) fn leaf(&mut self, dtype: DType, ne: [usize; 4]) -> Result<Id> {
        let type_id = types::id(dtype)?;
        sized(ne)?;
        if ne.contains(&0) || !ne[0].is_multiple_of(dtype.block()) {
            return Err(Error::internal(format!("no tensor {dtype} can be {ne:?}")));
        }
        let pool = self.pool()?;
        // SAFETY: the pool has room for one tensor; type and sizes were checked.
        let raw = unsafe { sys::ggml_new_tensor(pool, type_id, 4, ne.map(|d| d as i64).as_ptr()) };
        self.adopt(raw)
    }

    /// A tensor that holds stored elements for kernels to read: of types that ggml lacks, their bytes.
    pub(crate) fn held(&mut self, dtype: DType, ne: [usize; 4]) -> Result<Id> {
        if dtype.ggml_id().is_some() {
            return self.leaf(dtype, ne);
        }
        let row = dtype.bytes(ne[0], ne[0]);
        let row = row.ok_or_else(|| Error::internal(format!("no rows of {dtype} have {} elements", ne[0])))?;
        self.leaf(DType::I8, [row, ne[1], ne[2], ne[3]])
    }

    /// Sizes of the axes, innermost first.
    pub(crate) fn ne(&self, id: Id) -> Result<[usize; 4]> {
        Ok(self.get(id)?.ne.map(|d| d.max(0) as usize))
    }

    /// Bytes from one element, row, plane and volume to the next.
    pub(crate) fn nb(&self, id: Id) -> Result<[usize; 4]> {
        Ok(self.get(id)?.nb)
    }

    /// The element type.
    pub(crate) fn dtype(&self, id: Id) -> Result<DType> {
        DType::from_ggml_id(self.get(id)?.type_).ok_or_else(|| Error::internal("unknown element type"))
    }

    /// Whether elements lie in order without gaps.
    pub(crate) fn is_contiguous(&self, id: Id) -> Result<bool> {
        // SAFETY: the tensor is alive.
        Ok(unsafe { sys::ggml_is_contiguous(self.raw(id)?) })
    }

    /// Bytes from the first to the last element.
    pub(crate) fn bytes(&self, id: Id) -> Result<usize> {
        // SAFETY: the tensor is alive.
        Ok(unsafe { sys::ggml_nbytes(self.raw(id)?) })
    }

    /// Bytes that `dev` wants for it.
    pub(crate) fn alloc_size(&self, id: Id, dev: Dev) -> Result<usize> {
        // SAFETY: buffer types are static, the tensor is alive.
        Ok(unsafe { sys::ggml_backend_buft_get_alloc_size(dev.buffer_type()?.as_ptr(), self.raw(id)?) })
    }

    /// Whether `dev` can compute it.
    pub(crate) fn is_supported(&self, id: Id, dev: Dev) -> Result<bool> {
        // SAFETY: the device is static, the tensor is alive.
        Ok(unsafe { sys::ggml_backend_dev_supports_op(dev.raw(), self.raw(id)?) })
    }

    /// What ggml calls the operation.
    pub(crate) fn op_name(&self, id: Id) -> Result<String> {
        // SAFETY: the tensor is alive.
        Ok(super::text(unsafe { sys::ggml_op_desc(self.raw(id)?) }))
    }

    /// The tensor whose memory it shows: itself unless it is a view.
    pub(crate) fn root(&self, id: Id) -> Result<Id> {
        match NonNull::new(self.get(id)?.view_src) {
            None => Ok(id),
            Some(v) => self.ids.get(&v).copied().ok_or_else(|| Error::internal("a view of another graph")),
        }
    }

    pub(super) fn find(&self, raw: NonNull<sys::ggml_tensor>) -> Option<Id> {
        self.ids.get(&raw).copied()
    }

    /// The operands.
    pub(crate) fn sources(&self, id: Id) -> Result<Vec<Id>> {
        let raw = self.get(id)?;
        Ok(raw.src.iter().filter_map(|&s| self.ids.get(&NonNull::new(s)?).copied()).collect())
    }

    /// Whether it is the result of a computation, not a leaf or a mere view.
    pub(crate) fn is_computed(&self, id: Id) -> Result<bool> {
        Ok(!matches!(
            self.get(id)?.op,
            sys::GGML_OP_NONE
                | sys::GGML_OP_RESHAPE
                | sys::GGML_OP_VIEW
                | sys::GGML_OP_PERMUTE
                | sys::GGML_OP_TRANSPOSE
        ))
    }

    /// Whether every device may write the result over an operand of the same layout: elementwise operations, and
    /// those that read a row before they write it (as `ggml_op_can_inplace` lists them).
    pub(crate) fn may_overwrite_operand(&self, id: Id) -> Result<bool> {
        Ok(matches!(
            self.get(id)?.op,
            sys::GGML_OP_SCALE
                | sys::GGML_OP_DIAG_MASK_INF
                | sys::GGML_OP_ADD
                | sys::GGML_OP_SUB
                | sys::GGML_OP_MUL
                | sys::GGML_OP_DIV
                | sys::GGML_OP_UNARY
                | sys::GGML_OP_RMS_NORM
                | sys::GGML_OP_SOFT_MAX
        ))
    }

    /// Whether two tensors have the same type, sizes and strides.
    pub(crate) fn same_layout(&self, a: Id, b: Id) -> Result<bool> {
        let (a, b) = (self.get(a)?, self.get(b)?);
        Ok(a.type_ == b.type_ && a.ne == b.ne && a.nb == b.nb)
    }

    /// Puts a tensor at `offset` of `buffer`. Whoever computes with it holds the buffer then.
    pub(crate) fn place(&mut self, id: Id, buffer: &Buffer, offset: usize, dev: Dev) -> Result<()> {
        if self.places.get(id.index()) == Some(&(buffer.serial(), offset)) {
            return Ok(());
        }
        let need = if buffer.is_read_only() { self.bytes(id)? } else { self.alloc_size(id, dev)? };
        let fits = offset.checked_add(need).is_some_and(|end| end <= buffer.size())
            && offset.is_multiple_of(buffer.alignment())
            && self.root(id)? == id
            && !(buffer.is_read_only() && self.is_computed(id)?);
        if !fits {
            return Err(Error::internal(format!("{need} bytes do not fit at {offset} of {}", buffer.size())));
        }
        let raw = self.raw(id)?;
        // SAFETY: the tensor is alive and not a view, and ends inside the buffer; former placement is forgotten first,
        // as ggml demands.
        let status = unsafe {
            (*raw).buffer = std::ptr::null_mut();
            (*raw).data = std::ptr::null_mut();
            (*raw).extra = std::ptr::null_mut();
            sys::ggml_backend_tensor_alloc(buffer.raw(), raw, (buffer.start() + offset) as *mut _)
        };
        self.stale = true;
        let place = self.places.get_mut(id.index()).ok_or_else(|| Error::internal("a tensor of another graph"))?;
        *place = (buffer.serial(), offset);
        if status == sys::GGML_STATUS_SUCCESS {
            Ok(())
        } else {
            *place = (0, 0);
            Err(Error::device(format!("{} could not prepare a tensor", dev.name())))
        }
    }

    /// Gives views the addresses that follow from where their roots are.
    fn refresh_views(&mut self) -> Result<()> {
        if !self.stale {
            return Ok(());
        }
        for t in &self.tensors {
            let t = t.as_ptr();
            // SAFETY: all tensors of the context are alive; a view's root is in the same context (`adopt` is the only
            // way in). `ggml_backend_view_init` wants a view that was not placed before and a root that was.
            unsafe {
                let root = (*t).view_src;
                if root.is_null() {
                    continue;
                }
                (*t).buffer = std::ptr::null_mut();
                (*t).data = std::ptr::null_mut();
                if (*root).buffer.is_null() {
                    continue;
                }
                if sys::ggml_backend_view_init(t) != sys::GGML_STATUS_SUCCESS {
                    return Err(Error::device("could not prepare a view"));
                }
            }
        }
        self.stale = false;
        Ok(())
    }

    fn check_in(&self, id: Id, buffer: &Buffer, len: usize) -> Result<*mut sys::ggml_tensor> {
        let placed = self.places.get(id.index()).is_some_and(|p| p.0 == buffer.serial());
        if !placed || self.bytes(id)? != len || !self.is_contiguous(id)? {
            return Err(Error::internal(format!("a transfer of {len} bytes does not fit")));
        }
        self.raw(id)
    }

    /// Fills a leaf placed in `buffer`.
    pub(crate) fn write(&mut self, id: Id, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        self.check_in(id, buffer, bytes.len())?;
        self.write_part(id, buffer, 0, bytes)
    }

    /// Fills part of a leaf placed in `buffer`, from byte `at` on.
    pub(crate) fn write_part(&mut self, id: Id, buffer: &Buffer, at: usize, bytes: &[u8]) -> Result<()> {
        let whole = self.bytes(id)?;
        let raw = self.check_in(id, buffer, whole)?;
        if buffer.is_read_only() {
            return Err(Error::internal("lent memory is not written"));
        }
        if at.checked_add(bytes.len()).is_none_or(|end| end > whole) {
            return Err(Error::internal(format!("{} bytes do not fit at {at} of {whole}", bytes.len())));
        }
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            // SAFETY: the tensor lies in the live `buffer`, and the piece ends inside it.
            unsafe { sys::ggml_backend_tensor_set(raw, piece.as_ptr().cast(), at + i * PIECE, piece.len()) };
        }
        Ok(())
    }

    /// Fills a leaf placed in `buffer` with elements as the host stores them.
    pub(crate) fn write_elements(&mut self, id: Id, buffer: &Buffer, data: &Data) -> Result<()> {
        // SAFETY: every byte of a slice of numbers is initialised, and bytes have no alignment.
        let bytes = unsafe {
            match data {
                Data::F32(v) => std::slice::from_raw_parts(v.as_ptr().cast::<u8>(), size_of_val(v.as_slice())),
                Data::I32(v) => std::slice::from_raw_parts(v.as_ptr().cast::<u8>(), size_of_val(v.as_slice())),
            }
        };
        self.write(id, buffer, bytes)
    }

    /// Copies out an f32 tensor placed in `buffer`.
    pub(crate) fn read(&self, id: Id, buffer: &Buffer, out: &mut [f32]) -> Result<()> {
        let raw = self.check_in(id, buffer, size_of_val(out))?;
        // SAFETY: the tensor lies in the live `buffer` and is as long as `out`; any bytes are floats.
        unsafe { sys::ggml_backend_tensor_get(raw, out.as_mut_ptr().cast(), 0, size_of_val(out)) };
        buffer.dev().check()
    }

    /// Copies out part of a tensor placed in `buffer`, from byte `at` on, as it is stored.
    pub(crate) fn read_part(&self, id: Id, buffer: &Buffer, at: usize, out: &mut [u8]) -> Result<()> {
        let whole = self.bytes(id)?;
        let raw = self.check_in(id, buffer, whole)?;
        if at.checked_add(out.len()).is_none_or(|end| end > whole) {
            return Err(Error::internal(format!("{at} and {} bytes of {whole}", out.len())));
        }
        // SAFETY: the tensor lies in the live `buffer` and has that many bytes from `at` on.
        unsafe { sys::ggml_backend_tensor_get(raw, out.as_mut_ptr().cast(), at, out.len()) };
        buffer.dev().check()
    }

    /// The graph that computes `wanted`, in that order, each after what it needs.
    pub(crate) fn graph(&self, wanted: &[Id]) -> Result<Graph> {
        let size = self.len().max(1);
        // SAFETY: constants of the library. Runs are at most as many as nodes.
        let bytes = unsafe {
            sys::ggml_graph_overhead_custom(size, false)
                + (size.div_ceil(RUN) + 1) * sys::ggml_graph_overhead_custom(RUN, false)
        };
        let pool = pool(bytes)?;
        // SAFETY: the pool was sized for this graph; it holds at most as many nodes and leaves as there are tensors.
        let raw = unsafe { sys::ggml_new_graph_custom(pool.as_ptr(), size, false) };
        let Some(raw) = NonNull::new(raw) else {
            // SAFETY: the pool is not used any more.
            unsafe { sys::ggml_free(pool.as_ptr()) };
            return Err(Error::internal("no room for a graph"));
        };
        let mut graph =
            Graph { pool, extra: None, raw, runs: Vec::new(), twins: None, nodes: Vec::new(), roots: Vec::new() };
        // ggml visits operands by recursion: given one by one, operands first, no chain is too deep for the stack.
        for id in self.in_order(wanted)? {
            let t = self.raw(id)?;
            // SAFETY: graph and tensors are alive and there is room for every tensor of the context.
            unsafe { sys::ggml_build_forward_expand(graph.raw.as_ptr(), t) };
        }
        let mut seen = HashSet::new();
        // SAFETY: the graph is alive.
        for i in 0..unsafe { sys::ggml_graph_n_nodes(graph.raw.as_ptr()) } {
            // SAFETY: the index is below the count of nodes.
            let t = NonNull::new(unsafe { sys::ggml_graph_node(graph.raw.as_ptr(), i) });
            let id = t.and_then(|t| self.find(t)).ok_or_else(|| Error::internal("a node of another graph"))?;
            graph.nodes.push(id);
            for used in self.sources(id)?.into_iter().chain([id]) {
                let root = self.root(used)?;
                if seen.insert(root) {
                    graph.roots.push(root);
                }
            }
        }
        for run in graph.nodes.chunks(RUN) {
            graph.runs.push(self.run(graph.pool, run)?);
        }
        Ok(graph)
    }

    /// All that `wanted` need, and they themselves: operands before their users, the first operand first.
    fn in_order(&self, wanted: &[Id]) -> Result<Vec<Id>> {
        let mut order = Vec::new();
        let mut seen = HashSet::new();
        for &id in wanted {
            if !seen.insert(id) {
                continue;
            }
            let mut path = vec![(id, self.sources(id)?.into_iter())];
            while let Some((user, operands)) = path.last_mut() {
                match operands.next() {
                    Some(operand) if seen.insert(operand) => {
                        path.push((operand, self.sources(operand)?.into_iter()));
                    }
                    Some(_) => {}
                    None => {
                        order.push(*user);
                        path.pop();
                    }
                }
            }
        }
        Ok(order)
    }

    fn run(&self, pool: NonNull<sys::ggml_context>, nodes: &[Id]) -> Result<Run> {
        // SAFETY: callers size the pool for the runs they make.
        let raw = unsafe { sys::ggml_new_graph_custom(pool.as_ptr(), RUN, false) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::internal("no room for a graph"))?;
        for &id in nodes.iter().take(RUN) {
            let t = self.raw(id)?;
            // SAFETY: a new graph has room for `RUN` nodes.
            unsafe { sys::ggml_graph_add_node(raw.as_ptr(), t) };
        }
        Ok(Run::Device(raw))
    }

    /// Lets the CPU compute `refused` nodes of `graph`, in ascending order of position, on copies of their operands.
    pub(crate) fn take_over(&self, graph: &mut Graph, refused: &[Id], threads: usize) -> Result<()> {
        if refused.is_empty() {
            return Ok(());
        }
        // SAFETY: a constant of the library. Each refused node ends one run more.
        let each = unsafe { sys::ggml_graph_overhead_custom(RUN, false) };
        let pool = pool(each * (graph.nodes.len().div_ceil(RUN) + refused.len() + 1))?;
        graph.extra = Some(pool);
        graph.runs.clear();
        let mut twins = Vec::new();
        for part in graph.nodes.split_inclusive(|n| refused.contains(n)) {
            let (device, host) = match part.split_last() {
                Some((last, rest)) if refused.contains(last) => (rest, Some(*last)),
                _ => (part, None),
            };
            for run in device.chunks(RUN) {
                graph.runs.push(self.run(pool, run)?);
            }
            if let Some(node) = host {
                graph.runs.push(Run::Host(twins.len()));
                twins.push(node);
            }
        }
        graph.twins = Some(Twins::new(self, &twins, threads)?);
        Ok(())
    }

    /// Computes `graph`, which this context made. `held` are the buffers its tensors lie in.
    pub(crate) fn compute(
        &mut self,
        graph: &mut Graph,
        backend: &mut Backend,
        held: &[Arc<Buffer>],
        cancel: &CancelToken,
    ) -> Result<()> {
        let alive: HashSet<u64> = held.iter().map(|b| b.serial()).collect();
        for &root in &graph.roots {
            let place = self.places.get(root.index()).map_or(0, |p| p.0);
            if !alive.contains(&place) {
                let what = self.op_name(root)?;
                return Err(Error::internal(format!("tensor {} ({what}) is in no held buffer", root.index())));
            }
        }
        self.refresh_views()?;
        if backend.can_abort() && graph.twins.is_none() {
            let raw = graph.raw.as_ptr();
            // SAFETY: every tensor of the graph lies in a live buffer, checked above; shapes were checked when built.
            return backend.abortable(cancel, |b| unsafe { sys::ggml_backend_graph_compute(b, raw) });
        }
        for run in &graph.runs {
            match (run, &mut graph.twins) {
                (Run::Device(raw), _) => {
                    let raw = raw.as_ptr();
                    // SAFETY: as for the whole graph above.
                    backend.abortable(cancel, |b| unsafe { sys::ggml_backend_graph_compute(b, raw) })?;
                    // Remote devices return before they have computed: reading a result waits for it.
                    // SAFETY: a run is not empty, and its last node lies in a live buffer.
                    unsafe {
                        let last = sys::ggml_graph_node(raw, -1);
                        let mut sink = 0u32;
                        if sys::ggml_nbytes(last) >= 4 {
                            sys::ggml_backend_tensor_get(last, std::ptr::addr_of_mut!(sink).cast(), 0, 4);
                        }
                    }
                }
                (Run::Host(i), Some(twins)) => twins.compute(self, *i, cancel)?,
                (Run::Host(_), None) => return Err(Error::internal("a twin is missing")),
            }
        }
        Ok(())
    }
}

impl Graph {
    /// The tensors in the order they are computed.
    pub(crate) fn nodes(&self) -> &[Id] {
        &self.nodes
    }

    /// How many of them the CPU computes for the device.
    #[cfg(test)]
    pub(crate) fn taken_over(&self) -> usize {
        self.runs.iter().filter(|r| matches!(r, Run::Host(_))).count()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        for pool in [Some(self.pool), self.extra].into_iter().flatten() {
            // SAFETY: the pools are owned here.
            unsafe { sys::ggml_free(pool.as_ptr()) }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        for p in &self.pools {
            // SAFETY: the pools are owned here.
            unsafe { sys::ggml_free(p.as_ptr()) }
        }
    }
}
