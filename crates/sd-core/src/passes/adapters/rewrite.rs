//! Programs with what adapters add beside weights.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use super::adapted::{Adapted, Path, Piece};
use super::change::Kind;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::graph::{Graph, Node, Op, Program, Var};
use crate::scope::{Role, Scope, Weight};
use crate::shape::Shape;
use crate::tensor::WeightSource;

impl Adapted {
    /// Whether any weight of `program` is changed.
    pub(crate) fn changes_any(&self, program: &Program) -> bool {
        let changed = |name: &str| self.is_target(name) || self.longer(name).is_some();
        program.nodes().iter().any(|n| matches!(&n.op, Op::Weight(w) if changed(w.name())))
    }

    /// `program` with the changes: weights that are changed when they are loaded take the place of the originals, and
    /// beside others products are added, `y + s up(down(x))`. Cuts stay where they are.
    ///
    /// # Errors
    /// A change does not fit where the program uses its weight.
    pub fn apply(self: &Arc<Self>, program: &Program) -> Result<Program> {
        if !self.changes_any(program) {
            return Ok(program.clone());
        }
        let source: Arc<dyn WeightSource> = self.clone();
        let scope = Scope::root(source);
        let mut rewrite = Rewrite { g: Graph::new(), adapted: self, scope, program, map: Vec::new() };
        rewrite.run()
    }
}

struct Rewrite<'a> {
    g: Graph,
    adapted: &'a Adapted,
    scope: Scope,
    program: &'a Program,
    /// The new variable of each old one.
    map: Vec<Var>,
}

impl Rewrite<'_> {
    fn run(&mut self) -> Result<Program> {
        let program = self.program;
        let merged = self.merged();
        let mut cuts = program.cuts().iter().peekable();
        for (v, node) in program.iter() {
            while let Some(cut) = cuts.next_if(|c| c.at <= v.index()) {
                self.g.cut_here(cut.label.clone(), self.crossing(cut.at));
            }
            let new = match &node.op {
                Op::Weight(w) if w.role() == Role::Table && self.adapted.longer(w.name()).is_some() => {
                    let (name, shape) = self.adapted.longer(w.name()).unwrap_or((w.name(), w.shape()));
                    self.g.weight(&self.scope.weight_as(name, w.role(), shape)?)
                }
                Op::Weight(w) if merged.contains(&v) => {
                    let name = self.adapted.merged(w.name());
                    self.g.weight(&self.scope.weight_as(&name, w.role(), w.shape())?.fine())
                }
                _ => self.node(node, &merged)?,
            };
            self.map.push(new);
        }
        for cut in cuts {
            self.g.cut_here(cut.label.clone(), self.crossing(cut.at));
        }
        let outputs: Vec<Var> = program.outputs().iter().map(|v| self.moved(*v)).collect::<Result<_>>()?;
        self.g.finish(&outputs)
    }

    fn moved(&self, v: Var) -> Result<Var> {
        self.map.get(v.index()).copied().ok_or_else(|| Error::internal("an operand comes after its user"))
    }

    /// What later nodes read of what stands before node `at`.
    fn crossing(&self, at: usize) -> Vec<Var> {
        let later = self.program.nodes().iter().skip(at).flat_map(|n| n.inputs.iter());
        let before: BTreeSet<Var> = later.copied().filter(|v| v.index() < at).collect();
        before.into_iter().filter_map(|v| self.moved(v).ok()).collect()
    }

    /// Changed weights whose changes are made in them: those that are to be, and those that are used otherwise than in a
    /// product.
    fn merged(&self) -> HashSet<Var> {
        let program = self.program;
        let mut out: HashSet<Var> = HashSet::new();
        for (v, node) in program.iter() {
            if let Op::Weight(w) = &node.op
                && self.adapted.is_target(w.name())
                && self.adapted.merges(w)
            {
                out.insert(v);
            }
            for (i, &input) in node.inputs.iter().enumerate() {
                let Op::Weight(w) = &program.node(input).op else { continue };
                let beside = matches!((&node.op, i), (Op::Linear { .. } | Op::Conv2d { .. }, 1));
                if !beside && self.adapted.is_target(w.name()) {
                    out.insert(input);
                }
            }
        }
        out
    }

    fn node(&mut self, node: &Node, merged: &HashSet<Var>) -> Result<Var> {
        let inputs: Vec<Var> = node.inputs.iter().map(|v| self.moved(*v)).collect::<Result<_>>()?;
        let copy = Node { inputs: inputs.clone(), ..node.clone() };
        let multiplies = matches!(node.op, Op::Linear { .. } | Op::Conv2d { .. });
        let (Some(&x), Some(operand)) = (inputs.first(), node.inputs.get(1).filter(|v| !merged.contains(v))) else {
            return Ok(self.g.copy(copy));
        };
        let w = match &self.program.node(*operand).op {
            Op::Weight(w) if multiplies && self.adapted.is_target(w.name()) => w,
            _ => return Ok(self.g.copy(copy)),
        };
        let paths = self.adapted.paths(w.name())?;
        let mut y = self.g.copy(Node { label: None, ..copy });
        for path in &paths {
            let named = |e: Error| e.context(w.origin().name.clone());
            let added = self.beside(node, w, x, path).map_err(named)?;
            y = self.g.add(y, added)?;
        }
        if let Some(label) = &node.label {
            self.g.label(y, label);
        }
        Ok(y)
    }

    /// What a change adds to the result of `node`, which reads weight `w` and `x`.
    fn beside(&self, node: &Node, w: &Weight, x: Var, path: &Path<'_>) -> Result<Var> {
        if path.pieces == [Piece::Delta] {
            let name = format!("{}delta", path.name);
            let delta = self.g.weight(&self.scope.weight_as(&name, w.role(), w.shape())?.fine());
            let y = self.g.copy(Node { inputs: vec![x, delta], label: None, ..node.clone() });
            return self.g.scale(y, path.strength);
        }
        let factor = path.strength * path.change.scale;
        match (&node.op, &path.change.kind) {
            (Op::Linear { .. }, Kind::LowRank { .. }) => self.low_rank(node, w, x, path, factor),
            (Op::Conv2d { .. }, Kind::LowRank { .. }) => self.low_rank_conv(node, w, x, path, factor),
            (Op::Linear { .. }, Kind::Kronecker(..)) => self.kronecker(node, x, path, factor),
            (op, _) => Err(Error::internal(format!("an adapter beside {}", op.name()))),
        }
    }

    /// A tensor of a change, f32 in memory whatever other weights are.
    fn piece(&self, path: &Path<'_>, suffix: &str, dims: &[usize]) -> Result<Var> {
        let name = format!("{}{suffix}", path.name);
        Ok(self.g.weight(&self.scope.weight_as(&name, Role::Vector, Shape::new(dims)?)?))
    }

    fn product(&self, x: Var, w: Var, n: usize) -> Result<Var> {
        let shape = self.g.shape(x).with_last(n)?;
        let op = Op::Linear { wide: true };
        Ok(self.g.copy(Node { op, inputs: vec![x, w], shape, dtype: DType::F32, label: None }))
    }

    fn low_rank(&self, node: &Node, w: &Weight, x: Var, path: &Path<'_>, factor: f32) -> Result<Var> {
        let [r, last] = path.ranks;
        let mut h = self.product(x, self.piece(path, "down", &[r, w.shape().last()])?, r)?;
        if path.pieces.contains(&Piece::Mid) {
            h = self.product(h, self.piece(path, "mid", &[last, r])?, last)?;
        }
        let n = node.shape.last();
        self.product(self.g.scale(h, factor)?, self.piece(path, "up", &[n, last])?, n)
    }

    fn low_rank_conv(&self, node: &Node, w: &Weight, x: Var, path: &Path<'_>, factor: f32) -> Result<Var> {
        let kernel = w.shape().array::<4>();
        let [n, c, kh, kw] = kernel.ok_or_else(|| Error::internal(format!("a kernel {}", w.shape())))?;
        let [r, last] = path.ranks;
        let conv = |x: Var, w: Var, channels: usize, moves: bool| -> Result<Var> {
            let (op, like) = match moves {
                true => (node.op.clone(), node.shape),
                false => (Op::Conv2d { stride: 1, padding: 0, dilation: 1, wide: true }, self.g.shape(x)),
            };
            let shape = like.with_dim(1, channels)?;
            Ok(self.g.copy(Node { op, inputs: vec![x, w], shape, dtype: DType::F32, label: None }))
        };
        let h = if path.pieces.contains(&Piece::Mid) {
            let h = conv(x, self.piece(path, "down", &[r, c, 1, 1])?, r, false)?;
            conv(h, self.piece(path, "mid", &[last, r, kh, kw])?, last, true)?
        } else {
            conv(x, self.piece(path, "down", &[r, c, kh, kw])?, r, true)?
        };
        conv(self.g.scale(h, factor)?, self.piece(path, "up", &[n, last, 1, 1])?, n, false)
    }

    /// `(A ⊗ B) x`: with `x` as rows of `[b, d]`, `A (x Bᵀ)`.
    fn kronecker(&self, node: &Node, x: Var, path: &Path<'_>, factor: f32) -> Result<Var> {
        let g = &self.g;
        let [[a, b], [c, d]] = path.factors;
        let images = if g.shape(x).dims().len() > 1 { g.shape(x).dim(0) } else { 1 };
        let rows = g.shape(x).elements() / (images * b * d).max(1);
        let h = g.reshape(x, &[images, rows, b, d])?;
        let h = self.product(h, self.piece(path, "right", &[c, d])?, c)?; // [images, rows, b, c]
        let h = g.permute(h, &[0, 1, 3, 2])?;
        let h = self.product(h, self.piece(path, "left", &[a, b])?, a)?; // [images, rows, c, a]
        let h = g.scale(g.permute(h, &[0, 1, 3, 2])?, factor)?;
        g.reshape(h, node.shape.dims())
    }
}
