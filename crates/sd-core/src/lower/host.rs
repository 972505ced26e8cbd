//! One segment of a program as calls of the project's own kernels, where there is one for every node.
//!
//! Elementwise nodes join the call that made their operand, unless somebody else reads that or a cut lies between.

use std::collections::{HashMap, HashSet};

use super::bands::{self, Sizes, Unit};
use super::view::{Root, View};
use super::workspace::{Life, arrange};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ffi::{self, HostOp};
use crate::graph::{self, Node, Op, Program, Var};
use crate::kernels::{
    Attention, Chain, Code, Conv, Conv2d, Geometry, Isa, Join, Linear, Lookup, Norm, OPERANDS, Pad, Place,
    Products, Rope, Scatter, Softmax, Step, Sums, Timesteps, Transpose, Upsample, Winograd, WinogradKernel,
    can_read,
};
use crate::plan::Segment;

/// What offsets of values are multiples of, in bytes.
const ALIGNMENT: usize = 64;

/// Products whose factors are bf16, on machines that multiply them.
pub(crate) struct Narrow {
    /// Those with these weights.
    pub(crate) weights: HashSet<Var>,
    /// Those of values with each other.
    pub(crate) values: bool,
}

/// A segment as steps over memories: the first is the workspace, the others are those of `vars`.
pub(crate) struct Host {
    pub(crate) steps: Vec<Step>,
    /// Leaves, values of earlier segments, and those that are written.
    pub(crate) vars: Vec<Var>,
    /// Bytes of workspace.
    pub(crate) workspace: usize,
}

/// Lowers `segment` for `isa`; `None` where a node needs ggml. `memory_type` says which type a weight has in memory.
pub(crate) fn lower(
    program: &Program,
    segment: &Segment,
    isa: &'static Isa,
    narrow: &Narrow,
    memory_type: impl Fn(Var) -> Result<DType>,
) -> Result<Option<Host>> {
    lower_in_bands(program, segment, isa, narrow, Sizes::default(), memory_type)
}

pub(super) fn lower_in_bands(
    program: &Program,
    segment: &Segment,
    isa: &'static Isa,
    narrow: &Narrow,
    sizes: Sizes,
    memory_type: impl Fn(Var) -> Result<DType>,
) -> Result<Option<Host>> {
    let mut uses = vec![0; program.nodes().len()];
    for v in program.nodes().iter().flat_map(|n| &n.inputs).chain(program.outputs()) {
        uses[v.index()] += 1;
    }
    let (values, temps, calls, makers) = (HashMap::new(), Vec::new(), Vec::new(), Vec::new());
    let writes = segment.writes.iter().copied().collect();
    let mut l = Lowering { isa, narrow, uses, writes, values, temps, makers, calls, region: 0, sizes };
    for &v in segment.leaves.iter().chain(&segment.reads) {
        let node = program.node(v);
        let dtype = if matches!(node.op, Op::Weight(_)) { memory_type(v)? } else { node.dtype };
        let view = View::whole(Root::Outside(v), dtype, node.shape.dims());
        l.values.insert(v, Value { view, sole: false });
    }
    for i in segment.nodes.clone() {
        let v = Var(i as u32);
        let node = program.node(v);
        if node.op.is_leaf() {
            continue;
        }
        if node.shape.elements() > ffi::MAX_ELEMENTS {
            return Err(Error::device(format!("{} is more than any device holds", program.describe(v))));
        }
        l.region = program.cuts().iter().filter(|c| c.at <= i).count();
        let Some(value) = l.node(node).map_err(|e| e.context(program.describe(v)))? else { return Ok(None) };
        if value.view.dims != node.shape.dims() {
            return Err(Error::internal(format!("{} was lowered to {:?}", program.describe(v), value.view.dims)));
        }
        l.values.insert(v, value);
    }
    l.finish(segment)
}

/// A value with whether nobody but its only reader sees the memory it lies in.
#[derive(Clone)]
struct Value {
    view: View,
    sole: bool,
}

pub(super) enum Kernel {
    /// Steps on every element of a result of these sizes.
    Chain {
        dims: Vec<usize>,
        code: Vec<Code>,
    },
    Norm(Norm),
    Conv(Conv),
    Upsample(Upsample),
    Other(Box<dyn HostOp>),
}

pub(super) struct Call {
    pub(super) kernel: Kernel,
    pub(super) operands: Vec<View>,
    /// The result: a temporary.
    pub(super) out: usize,
    /// Cuts before it.
    pub(super) region: usize,
}

struct Lowering<'a> {
    isa: &'static Isa,
    narrow: &'a Narrow,
    /// How often each value is read.
    uses: Vec<usize>,
    writes: HashSet<Var>,
    values: HashMap<Var, Value>,
    /// Elements of each temporary.
    temps: Vec<usize>,
    /// The call that makes each temporary.
    makers: Vec<usize>,
    calls: Vec<Option<Call>>,
    /// Cuts before the node that is being lowered.
    region: usize,
    sizes: Sizes,
}

impl Lowering<'_> {
    fn value(&self, node: &Node, i: usize) -> Result<&Value> {
        let v = node.inputs.get(i).and_then(|v| self.values.get(v));
        v.ok_or_else(|| Error::internal(format!("{} lacks operand {i}", node.op.name())))
    }

    /// Operand `i` without gaps.
    fn operand(&mut self, node: &Node, i: usize) -> Result<View> {
        let view = self.value(node, i)?.view.clone();
        Ok(if view.is_dense() { view } else { self.copy(view) })
    }

    fn operands(&mut self, node: &Node) -> Result<Vec<View>> {
        (0..node.inputs.len()).map(|i| self.operand(node, i)).collect()
    }

    /// Appends a call and gives its result, of sizes `dims`.
    fn call(&mut self, kernel: Kernel, operands: Vec<View>, dims: &[usize]) -> View {
        let out = self.temps.len();
        self.temps.push(dims.iter().product());
        self.makers.push(self.calls.len());
        self.calls.push(Some(Call { kernel, operands, out, region: self.region }));
        View::whole(Root::Temp(out), DType::F32, dims)
    }

    fn other(&mut self, op: impl HostOp + 'static, operands: Vec<View>, dims: &[usize]) -> View {
        self.call(Kernel::Other(Box::new(op)), operands, dims)
    }

    /// The elements of `view` without gaps.
    fn copy(&mut self, view: View) -> View {
        let (dims, strides) = (view.dims.clone(), view.strides.clone());
        if view.has_rows() {
            return self.call(Kernel::Chain { dims: dims.clone(), code: vec![Code::Load] }, vec![view], &dims);
        }
        match Transpose::new(self.isa, &dims, &strides) {
            Some(op) => self.other(op, vec![view], &dims),
            None => {
                let axes = dims.iter().copied().zip(strides).collect();
                self.other(Scatter { axes }, vec![view], &dims)
            }
        }
    }

    /// The instruction set for `node`, a product.
    fn product_isa(&self, node: &Node) -> &'static Isa {
        if self.is_narrow(node) { self.isa } else { self.isa.wide() }
    }

    /// Whether factors of `node`, a product, may be less than f32.
    fn is_narrow(&self, node: &Node) -> bool {
        match (&node.op, node.inputs.get(1)) {
            (Op::Linear { .. } | Op::Conv2d { .. }, Some(weight)) => self.narrow.weights.contains(weight),
            _ => self.narrow.values,
        }
    }

    fn node(&mut self, node: &Node) -> Result<Option<Value>> {
        let isa = self.product_isa(node);
        let dims = node.shape.dims();
        let view = match &node.op {
            Op::Input(_) | Op::Constant(_) | Op::Weight(_) => {
                return Err(Error::internal("a leaf is not computed"));
            }
            Op::Reshape => {
                let only =
                    node.inputs.first().is_some_and(|v| self.uses[v.index()] == 1 && !self.writes.contains(v));
                let Value { view, sole } = self.value(node, 0)?.clone();
                let (view, sole) = match view.reshaped(dims) {
                    Some(v) => (v, sole && only),
                    None => (View::whole(self.copy(view).root, DType::F32, dims), true),
                };
                return Ok(Some(Value { view, sole }));
            }
            Op::Slice { axis, start } => {
                let mut view = self.value(node, 0)?.view.clone();
                view.offset += start * view.strides[*axis];
                view.dims = dims.to_vec();
                return Ok(Some(Value { view, sole: false }));
            }
            Op::Permute { axes } => {
                let x = self.value(node, 0)?.view.clone();
                let of = |from: &[usize]| axes.iter().take(dims.len()).map(|&a| from[usize::from(a)]).collect();
                let moved = View { dims: of(&x.dims), strides: of(&x.strides), ..x };
                if moved.is_dense() {
                    return Ok(Some(Value { view: moved, sole: false }));
                }
                self.copy(moved)
            }
            Op::Unary(f) => self.elementwise(node, 0, Code::Unary(*f), None)?,
            Op::Affine { mul, add } => self.elementwise(node, 0, Code::Affine { mul: *mul, add: *add }, None)?,
            Op::Binary(f) => {
                let swap = !self.joins(node, 0) && self.joins(node, 1);
                let (first, code, second) = if swap { (1, Code::Under(*f), 0) } else { (0, Code::With(*f), 1) };
                self.elementwise(node, first, code, Some(second))?
            }
            Op::Norm { kind, eps } => {
                let operands = self.operands(node)?;
                let (centred, rows, channels, positions, all_channels) = match kind {
                    graph::Norm::Group { groups } => {
                        let (b, c) = (node.shape.dim(0), node.shape.dim(1));
                        (true, b * groups, c / groups, node.shape.elements() / (b * c), c)
                    }
                    kind => {
                        let c = node.shape.last();
                        (*kind == graph::Norm::Layer, node.shape.elements() / c, c, 1, c)
                    }
                };
                let (eps, vectors) = (*eps, operands.len() - 1);
                let norm =
                    Norm { isa, rows, channels, positions, all_channels, centred, eps, vectors, then: Vec::new() };
                self.call(Kernel::Norm(norm), operands, dims)
            }
            Op::Softmax => {
                let x = self.operands(node)?;
                let width = node.shape.last();
                self.other(Softmax { isa, rows: node.shape.elements() / width, width }, x, dims)
            }
            Op::Linear { .. } => {
                let all = self.operands(node)?;
                let (&[n, k], dtype) = (all[1].dims.as_slice(), all[1].dtype) else { return Ok(None) };
                if !can_read(dtype) {
                    return Ok(None);
                }
                let m = all[0].elements() / k;
                let (bias, sums) = (all.len() > 2, Sums::of(&all[0].dims, dtype, self.is_narrow(node)));
                self.other(Linear { isa, m, n, k, dtype, bias, sums }, all, dims)
            }
            Op::MatMulT => {
                let all = self.operands(node)?;
                let (r, dtype) = (dims.len(), all[1].dtype);
                if !can_read(dtype) {
                    return Ok(None);
                }
                let (m, n, k) = (dims[r - 2], dims[r - 1], all[0].dims[r - 1]);
                let lead = |v: &View| v.dims[..r - 2].to_vec();
                let factors = View::whole(Root::Temp(0), dtype, &lead(&all[1]));
                let strides = factors.broadcast(&lead(&all[0])).strides;
                let many: usize = all[0].dims[..r - 2].iter().product();
                let which = |i: usize| {
                    let (mut rest, mut at) = (i, 0);
                    for (&n, &step) in all[0].dims[..r - 2].iter().zip(&strides).rev() {
                        at += rest % n * step;
                        rest /= n;
                    }
                    at
                };
                let op = if factors.elements() == 1 {
                    let each = Linear { isa, m: many * m, n, k, dtype, bias: false, sums: Sums::Tiles };
                    Products { each, which: vec![0], factors: 1 }
                } else {
                    let each = Linear { isa, m, n, k, dtype, bias: false, sums: Sums::Tiles };
                    Products { each, which: (0..many).map(which).collect(), factors: factors.elements() }
                };
                self.other(op, all, dims)
            }
            Op::Conv2d { stride, padding, dilation, .. } => {
                let all = self.operands(node)?;
                let (&[batch, channels, h, w], &[n, _, kh, kw]) = (all[0].dims.as_slice(), all[1].dims.as_slice())
                else {
                    return Ok(None);
                };
                let (stride, padding, dilation) = (*stride, [*padding; 2], *dilation);
                let (image, out, kernel) = ([h, w], [dims[2], dims[3]], [kh, kw]);
                let geometry = Geometry { batch, channels, image, out, n, kernel, stride, padding, dilation };
                let (dtype, bias) = (all[1].dtype, all.len() > 2);
                let Some(conv) = Conv2d::new(isa, geometry, dtype, bias) else { return Ok(None) };
                match Winograd::new(isa, geometry, bias) {
                    Some(conv) => {
                        let mut all = all;
                        let transform = WinogradKernel { isa, n, channels, dtype };
                        let sizes = transform.dims();
                        all[1] = self.other(transform, vec![all[1].clone()], &sizes);
                        self.call(Kernel::Conv(Conv::Tiles(conv)), all, dims)
                    }
                    None => self.call(Kernel::Conv(Conv::Direct(conv)), all, dims),
                }
            }
            Op::Attention { scale, causal } => {
                let all = self.operands(node)?;
                let (&[batch, queries, heads, width], &[_, keys, _, value_width]) =
                    (all[0].dims.as_slice(), all[2].dims.as_slice())
                else {
                    return Ok(None);
                };
                let mask = all.get(3).map(|m| {
                    let mut sizes = [1; 4];
                    sizes.iter_mut().rev().zip(m.dims.iter().rev()).for_each(|(s, &d)| *s = d);
                    sizes
                });
                let (scale, causal) = (*scale, *causal);
                let op = Attention { isa, batch, heads, queries, keys, width, value_width, scale, causal, mask };
                self.other(op, all, dims)
            }
            Op::Embedding => {
                let all = self.operands(node)?;
                let (&[rows, width], dtype) = (all[0].dims.as_slice(), all[0].dtype) else { return Ok(None) };
                if !can_read(dtype) {
                    return Ok(None);
                }
                let count = all[1].elements();
                self.other(Lookup { isa, dtype, rows, width, count }, all, dims)
            }
            Op::Rope { layout } => {
                let all = self.operands(node)?;
                let sizes = node.shape.array().ok_or_else(|| Error::internal("rope of other than four axes"))?;
                let rows = all[1].dims[..all[1].dims.len() - 1].iter().product();
                self.other(Rope { sizes, rows, layout: *layout }, all, dims)
            }
            Op::Concat { axis } => {
                let all = self.operands(node)?;
                let rows = dims[..*axis].iter().product();
                let widths = all.iter().map(|v| v.dims[*axis..].iter().product()).collect();
                self.other(Join { rows, widths }, all, dims)
            }
            Op::Pad2d { rows, columns } => {
                let x = self.operands(node)?;
                let r = dims.len();
                let image = [x[0].dims[r - 2], x[0].dims[r - 1]];
                let planes = dims[..r - 2].iter().product();
                self.other(Pad { planes, image, around: [*rows, *columns] }, x, dims)
            }
            Op::UpsampleNearest { factor } => {
                let x = self.operands(node)?;
                let image = [x[0].dims[2], x[0].dims[3]];
                let op = Upsample { planes: dims[0] * dims[1], image, factor: *factor };
                self.call(Kernel::Upsample(op), x, dims)
            }
            Op::TimestepEmbedding { dim, max_period } => {
                let t = self.operands(node)?;
                self.other(Timesteps { count: dims[0], dim: *dim, max_period: *max_period }, t, dims)
            }
        };
        Ok(Some(Value { view, sole: true }))
    }

    /// The call that makes operand `i` of `node`, if the node may become part of it.
    fn maker(&self, node: &Node, i: usize) -> Option<usize> {
        let v = *node.inputs.get(i)?;
        let Value { view, sole } = self.values.get(&v)?;
        let Root::Temp(temp) = view.root else { return None };
        let only = *sole && self.uses[v.index()] == 1 && !self.writes.contains(&v);
        let whole = view.offset == 0 && view.is_dense() && view.elements() == self.temps[temp];
        let maker = self.makers[temp];
        let here = self.calls[maker].as_ref().is_some_and(|c| c.region == self.region);
        (only && whole && here && view.elements() == node.shape.elements()).then_some(maker)
    }

    /// Whether `node`, of two operands, may become part of the call that makes operand `i`.
    fn joins(&self, node: &Node, i: usize) -> bool {
        let call = self.maker(node, i).and_then(|at| self.calls[at].as_ref());
        match call {
            Some(Call { kernel: Kernel::Chain { dims, .. }, operands, .. }) => {
                let other = node.inputs.get(1 - i).and_then(|v| self.values.get(v));
                let other = other.and_then(|v| v.view.broadcast(node.shape.dims()).reshaped(dims));
                operands.len() < OPERANDS && other.is_some_and(|o| o.has_rows())
            }
            _ => false,
        }
    }

    /// `code` on operand `first`, with operand `second` if it reads one.
    fn elementwise(&mut self, node: &Node, first: usize, code: Code, second: Option<usize>) -> Result<View> {
        let dims = node.shape.dims();
        let joins = match second {
            Some(_) => self.joins(node, first),
            None => matches!(
                self.maker(node, first).and_then(|at| self.calls[at].as_ref()),
                Some(Call { kernel: Kernel::Chain { .. } | Kernel::Norm(_), .. })
            ),
        };
        let second = second.map(|i| Ok::<_, Error>(self.value(node, i)?.view.broadcast(dims))).transpose()?;
        if joins
            && let Some(at) = self.maker(node, first)
            && let Some(mut call) = self.calls[at].take()
        {
            match &mut call.kernel {
                Kernel::Chain { dims, code: all } => {
                    all.push(code);
                    call.operands.extend(second.and_then(|v| v.reshaped(dims)));
                }
                Kernel::Norm(norm) => norm.then.push(code),
                _ => return Err(Error::internal("only chains are joined")),
            }
            // Its new operand may have been made after it.
            self.makers[call.out] = self.calls.len();
            let out = View::whole(Root::Temp(call.out), DType::F32, dims);
            self.calls.push(Some(call));
            return Ok(out);
        }
        let mut operands = vec![self.value(node, first)?.view.broadcast(dims)];
        operands.extend(second);
        for view in &mut operands {
            if !view.has_rows() {
                *view = self.copy(view.clone());
            }
        }
        Ok(self.call(Kernel::Chain { dims: dims.to_vec(), code: vec![Code::Load, code] }, operands, dims))
    }

    /// Gives everything a place.
    fn finish(mut self, segment: &Segment) -> Result<Option<Host>> {
        // Temporaries that are written as they are.
        let mut bound: HashMap<usize, Var> = HashMap::new();
        for &v in &segment.writes {
            let view = self.values.get(&v).map(|v| v.view.clone());
            let view = view.ok_or_else(|| Error::internal("a result was not lowered"))?;
            let free = |t: usize| !bound.contains_key(&t) && view.offset == 0 && view.elements() == self.temps[t];
            match view.root {
                Root::Temp(t) if free(t) && view.is_dense() => bound.insert(t, v),
                _ => match self.copy(view).root {
                    Root::Temp(t) => bound.insert(t, v),
                    Root::Outside(_) => return Err(Error::internal("a copy is not outside")),
                },
            };
        }
        let vars: Vec<Var> = segment.leaves.iter().chain(&segment.reads).chain(&segment.writes).copied().collect();
        let memory_of: HashMap<Var, usize> = vars.iter().enumerate().map(|(i, &v)| (v, i + 1)).collect();
        let mut calls: Vec<Call> = self.calls.drain(..).flatten().collect();
        self.read_before_norms(&mut calls, &bound);
        let units = bands::units(calls, &mut self.temps, &bound, self.sizes);
        self.place(units, &bound, vars, &memory_of)
    }

    /// Gives everything a place, where temporaries in `bound` are outside.
    fn place(
        mut self,
        mut units: Vec<Unit>,
        bound: &HashMap<usize, Var>,
        vars: Vec<Var>,
        memory_of: &HashMap<Var, usize>,
    ) -> Result<Option<Host>> {
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (i, unit) in units.iter().enumerate() {
            let made = unit.calls.iter().map(|c| c.out);
            last.extend(unit.operands().filter_map(|v| temp(v.root)).chain(made).map(|t| (t, i)));
        }
        let mut lives: Vec<Vec<Life>> = Vec::new();
        // Which life each temporary of the workspace is part of, and of which group.
        let mut life_of: HashMap<usize, [usize; 2]> = HashMap::new();
        for (i, unit) in units.iter_mut().enumerate() {
            let dies = |t: &usize| last.get(t) == Some(&i) && !bound.contains_key(t);
            let over = unit.replaces(&self.temps).filter(dies).and_then(|t| life_of.get(&t)).copied();
            // Bytes of the place that are taken.
            let mut taken = 0usize;
            for call in unit.calls.iter().filter(|c| !bound.contains_key(&c.out)) {
                let bytes = self.temps[call.out].saturating_mul(4);
                let (size, until) = (bytes.next_multiple_of(ALIGNMENT), last.get(&call.out).copied().unwrap_or(i));
                let old = over.map(|[group, life]| lives[group][life]);
                let fits = old.filter(|l| taken.is_multiple_of(ALIGNMENT) && taken + size <= l.size);
                let at = match (over, fits) {
                    (Some([group, life]), Some(_)) if !unit.in_bands() => {
                        lives[group][life].until = until;
                        [group, life]
                    }
                    (Some([group, _]), Some(old)) => {
                        lives[group].push(Life { offset: old.offset + taken, size, from: i, until });
                        taken += bytes;
                        [group, lives[group].len() - 1]
                    }
                    _ => {
                        lives.push(vec![Life { offset: 0, size, from: i, until }]);
                        [lives.len() - 1, 0]
                    }
                };
                life_of.insert(call.out, at);
            }
            unit.replace(taken > 0, &mut self.temps);
            for t in unit.scratch() {
                let size = self.temps[t].saturating_mul(4).next_multiple_of(ALIGNMENT);
                life_of.insert(t, [lives.len(), 0]);
                lives.push(vec![Life { offset: 0, size, from: i, until: i }]);
            }
        }
        let (offsets, workspace) = arrange(&lives);
        let place = |root: Root, offset: usize, bytes: usize| -> Result<Place> {
            let outside = |v: &Var| memory_of.get(v).copied();
            let found = match root {
                Root::Outside(v) => outside(&v).map(|memory| (memory, 0)),
                Root::Temp(t) => match bound.get(&t) {
                    Some(v) => outside(v).map(|memory| (memory, 0)),
                    None => life_of.get(&t).map(|&[group, life]| (0, offsets[group] + lives[group][life].offset)),
                },
            };
            let (memory, start) = found.ok_or_else(|| Error::internal("a value has no place"))?;
            Ok(Place { memory, offset: start + offset, bytes })
        };
        let mut steps = Vec::with_capacity(units.len());
        for unit in units {
            // Offsets count elements of four bytes.
            if unit.operands().any(|v| v.offset > 0 && !matches!(v.dtype, DType::F32 | DType::I32)) {
                return Ok(None);
            }
            let planned = if unit.in_bands() {
                unit.plan()
            } else {
                let mut planned = Vec::new();
                for call in unit.calls {
                    let Some(op) = self.kernel(call.kernel, &call.operands)? else { return Ok(None) };
                    planned.push((op, call.operands, call.out, 0));
                }
                planned
            };
            for (op, operands, out, offset) in planned {
                let operands = op.operands().into_iter().zip(&operands).map(|((dtype, [rows, row]), view)| {
                    let bytes = rows.checked_mul(row).and_then(|n| dtype.bytes(n, row));
                    let bytes = bytes.filter(|_| dtype == view.dtype);
                    let bytes = bytes.ok_or_else(|| Error::internal("a kernel's operands do not fit"))?;
                    place(view.root, view.offset * 4, bytes)
                });
                let operands = operands.collect::<Result<Vec<_>>>()?;
                let out = place(Root::Temp(out), offset, op.reach().saturating_mul(4))?;
                steps.push(Step { op, out, operands });
            }
        }
        Ok(Some(Host { steps, vars, workspace }))
    }

    /// Moves what else reads the operand of a norm before the norm where it can be and its results are no larger than the
    /// operand, so that the norm may take the operand's place.
    fn read_before_norms(&self, calls: &mut [Call], bound: &HashMap<usize, Var>) {
        let mut made: HashSet<usize> = HashSet::new();
        let mut i = 0;
        while let Some(call) = calls.get(i) {
            let x = match (&call.kernel, call.operands.first()) {
                (Kernel::Norm(_), Some(x)) => temp(x.root).filter(|t| !bound.contains_key(t)),
                _ => None,
            };
            if let Some(x) = x {
                let (region, later) = (call.region, calls.iter().enumerate().skip(i + 1));
                let reads = |c: &Call| c.operands.iter().any(|v| v.root == Root::Temp(x));
                let readers: Vec<usize> = later.filter(|(_, c)| reads(c)).map(|(j, _)| j).collect();
                let ready = |c: &Call| c.operands.iter().filter_map(|v| temp(v.root)).all(|t| made.contains(&t));
                let can = readers.iter().all(|&j| calls[j].region == region && ready(&calls[j]));
                let results: usize = readers.iter().map(|&j| self.temps[calls[j].out]).sum();
                if can && results <= self.temps[x] {
                    for j in readers {
                        made.insert(calls[j].out);
                        calls[i..=j].rotate_right(1);
                        i += 1;
                    }
                }
            }
            made.insert(calls[i].out);
            i += 1;
        }
    }

    /// The operation of a call. A chain walks through all operands, with as many axes as it has.
    fn kernel(&self, kernel: Kernel, operands: &[View]) -> Result<Option<Box<dyn HostOp>>> {
        Ok(match kernel {
            Kernel::Other(op) => Some(op),
            Kernel::Norm(norm) => Some(Box::new(norm)),
            Kernel::Conv(conv) => Some(conv.whole()),
            Kernel::Upsample(op) => Some(Box::new(op)),
            Kernel::Chain { dims, code } => {
                let strides: Vec<&[usize]> = operands.iter().map(|v| v.strides.as_slice()).collect();
                Chain::new(self.isa, &dims, &code, &strides).map(|c| Box::new(c) as Box<dyn HostOp>)
            }
        })
    }
}

pub(super) fn temp(root: Root) -> Option<usize> {
    match root {
        Root::Temp(t) => Some(t),
        Root::Outside(_) => None,
    }
}
