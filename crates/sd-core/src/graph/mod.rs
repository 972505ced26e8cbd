//! The graph: a list of checked nodes, built by model code and executed elsewhere.
//!
//! Every op checks its operands and infers its shape when it is called, so that a wrong file, adapter or size is
//! an [`Error`] here, before any device object exists. [`Graph::finish`] turns the list into an
//! immutable [`Program`]: dead nodes are dropped and what crosses each cut is verified.

mod op;
mod ops;
mod program;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scope::{Role, Scope, Weight};
use crate::shape::Shape;
use crate::tensor::Tensor;

pub use op::{Binary, Norm, Op, RopeLayout, Unary};
pub use ops::{AttentionOptions, Conv2dOptions};
pub use program::{Cut, Program};

/// A value of a graph: the index of the node that makes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Var(pub(crate) u32);

impl Var {
    /// The position of the node in its graph or program.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One operation with its operands and what it makes.
#[derive(Clone, Debug)]
pub struct Node {
    /// What is computed.
    pub op: Op,
    /// The operands, in the order the op documents.
    pub inputs: Vec<Var>,
    /// The shape of the result.
    pub shape: Shape,
    /// The element type of the result: f32 or i32; for a matrix, kernel or table, the type it is
    /// stored as.
    pub dtype: DType,
    /// A name for messages and taps.
    pub label: Option<Arc<str>>,
}

/// A graph under construction. Calls nest because it is mutated through a shared reference; it stays on one thread.
#[derive(Default)]
pub struct Graph {
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    nodes: Vec<Node>,
    names: HashMap<Arc<str>, Var>,
    weights: HashMap<(Arc<str>, Role), Var>,
    cuts: Vec<Cut>,
    kept: Vec<Var>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// A value given anew at each run, `dtype` f32 or i32.
    ///
    /// # Errors
    /// The shape is not valid, the name is taken, or the type is neither f32 nor i32.
    pub fn input(&self, name: &str, dims: &[usize], dtype: DType) -> Result<Var> {
        let shape = Shape::new(dims)?;
        if !matches!(dtype, DType::F32 | DType::I32) {
            return Err(Error::internal(format!("input {name} cannot be {dtype}")));
        }
        let name: Arc<str> = name.into();
        if self.inner.borrow().names.contains_key(&name) {
            return Err(Error::internal(format!("two values are named {name}")));
        }
        let x = self.push_node(Op::Input(name.clone()), &[], shape, dtype);
        self.label(x, &name);
        Ok(x)
    }

    /// A value fixed when the graph is built.
    pub fn constant(&self, tensor: Tensor) -> Var {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        self.push_node(Op::Constant(Arc::new(tensor)), &[], shape, dtype)
    }

    /// The value of a weight. Asking twice for one name and role gives one node.
    pub fn weight(&self, w: &Weight) -> Var {
        let key = (Arc::from(w.name()), w.role());
        if let Some(&v) = self.inner.borrow().weights.get(&key) {
            return v;
        }
        // Vectors are f32 in memory whatever the file has, so they can be operands of any op.
        let dtype = if w.role() == Role::Vector { DType::F32 } else { w.dtype() };
        let v = self.push_node(Op::Weight(w.clone()), &[], w.shape(), dtype);
        let mut inner = self.inner.borrow_mut();
        inner.nodes[v.index()].label = Some(w.name().into());
        inner.weights.insert(key, v);
        v
    }

    /// Names a value for taps and messages, usually by the path of the module that made it.
    pub fn label(&self, x: Var, name: &str) {
        let mut inner = self.inner.borrow_mut();
        let name: Arc<str> = name.into();
        inner.nodes[x.index()].label.get_or_insert_with(|| name.clone());
        inner.names.insert(name, x);
    }

    /// The value last given this name.
    pub fn find(&self, name: &str) -> Option<Var> {
        self.inner.borrow().names.get(name).copied()
    }

    /// Marks a point after the module `w` where execution may stop: of what is computed so far, only `live`, kept
    /// values and graph inputs may be read later. [`Graph::finish`] checks it.
    pub fn cut(&self, w: &Scope, live: &[Var]) {
        let mut inner = self.inner.borrow_mut();
        let at = inner.nodes.len();
        inner.cuts.push(Cut { label: w.path().into(), at, live: live.to_vec() });
    }

    /// Declares values that every later segment may read.
    pub fn keep(&self, values: &[Var]) {
        self.inner.borrow_mut().kept.extend_from_slice(values);
    }

    /// The shape of a value.
    pub fn shape(&self, x: Var) -> Shape {
        self.inner.borrow().nodes[x.index()].shape
    }

    /// The element type of a value.
    pub fn dtype(&self, x: Var) -> DType {
        self.inner.borrow().nodes[x.index()].dtype
    }

    /// The axes of a value as an array.
    ///
    /// # Errors
    /// It does not have `N` axes.
    pub fn dims<const N: usize>(&self, x: Var) -> Result<[usize; N]> {
        self.shape(x).array().ok_or_else(|| Error::shape(format!("{} should have {N} axes", self.describe(x))))
    }

    /// A value as messages show it: its name, or the nearest named value it is made from, with shape and type.
    pub fn describe(&self, x: Var) -> String {
        let inner = self.inner.borrow();
        let node = &inner.nodes[x.index()];
        let mut at = x;
        let mut steps = 0;
        let name = loop {
            let n = &inner.nodes[at.index()];
            match (&n.label, n.inputs.first()) {
                (Some(l), _) if steps == 0 => break l.to_string(),
                (Some(l), _) => break format!("{} after {l}", node.op.name()),
                (None, Some(&next)) => at = next,
                (None, None) => break node.op.name().to_string(),
            }
            steps += 1;
        };
        format!("{name} {} {}", node.shape, node.dtype)
    }

    /// The program that computes `outputs`.
    ///
    /// # Errors
    /// A value crosses a cut without being listed or kept.
    pub fn finish(&self, outputs: &[Var]) -> Result<Program> {
        let inner = self.inner.borrow();
        Program::new(&inner.nodes, &inner.cuts, &inner.kept, outputs)
    }

    /// Appends a node whose operands have been checked.
    fn push(&self, op: Op, inputs: &[Var], shape: Shape) -> Var {
        self.push_node(op, inputs, shape, DType::F32)
    }

    /// Appends a node as it stands: for passes, whose operands were checked before.
    pub(crate) fn copy(&self, node: Node) -> Var {
        let (label, v) = (node.label.clone(), self.push_node(node.op, &node.inputs, node.shape, node.dtype));
        if let Some(label) = label {
            self.label(v, &label);
        }
        v
    }

    /// [`Graph::cut`] for passes, which know modules by label only.
    pub(crate) fn cut_here(&self, label: Arc<str>, live: Vec<Var>) {
        let mut inner = self.inner.borrow_mut();
        let at = inner.nodes.len();
        inner.cuts.push(Cut { label, at, live });
    }

    fn push_node(&self, op: Op, inputs: &[Var], shape: Shape, dtype: DType) -> Var {
        let mut inner = self.inner.borrow_mut();
        let v = Var(inner.nodes.len() as u32);
        inner.nodes.push(Node { op, inputs: inputs.to_vec(), shape, dtype, label: None });
        v
    }

    /// The error of an op whose operands do not fit, naming each of them.
    fn bad_op(&self, op: &str, inputs: &[Var], why: impl fmt::Display) -> Error {
        let shown: Vec<String> = inputs.iter().map(|&x| self.describe(x)).collect();
        Error::shape(format!("{op} of {}: {why}", shown.join(" and ")))
    }

    /// Checks that operands are real-valued.
    fn want_f32(&self, op: &str, inputs: &[Var]) -> Result<()> {
        match inputs.iter().find(|&&x| self.dtype(x) != DType::F32) {
            Some(&x) => Err(self.bad_op(op, &[x], "operand is not f32")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
