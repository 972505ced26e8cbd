//! The weights of a network with adapters: those of the network, and what adapters add under names of its own.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::change::{self, Kind, Rows};
use super::{Adapter, Change};
use crate::convert::{from_f32, to_f32};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::exec::TypePolicy;
use crate::scope::{Role, Weight};
use crate::shape::Shape;
use crate::tensor::{Bytes, Origin, TensorMeta, WeightSource};

/// Where changes are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Beside weights that are quantised or 8-bit floats in memory, in all others.
    #[default]
    Auto,
    /// In the weights when they are loaded. Quantised ones become f16, so that weak changes are not rounded away.
    Immediately,
    /// Beside the weights in every run. Biases, norms and tables are changed when loaded.
    AtRuntime,
}

/// A network's weights with adapters.
pub struct Adapted {
    base: Arc<dyn WeightSource>,
    adapters: Vec<(Arc<Adapter>, f32)>,
    mode: Mode,
    types: TypePolicy,
    targets: BTreeMap<String, Target>,
    entries: BTreeMap<String, Entry>,
    tables: BTreeMap<String, Longer>,
}

/// A table with rows after its own.
struct Longer {
    /// What the longer table is called.
    name: String,
    meta: TensorMeta,
    rows: Vec<f32>,
}

/// A weight that is changed.
struct Target {
    meta: TensorMeta,
    /// Adapter and change, by number.
    changes: Vec<(usize, usize)>,
}

/// A tensor that is added.
struct Entry {
    target: String,
    piece: Option<(usize, usize, Piece)>,
    meta: TensorMeta,
}

/// What a change adds beside a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Piece {
    /// `down` of a low rank.
    Down,
    /// `mid` of a low rank.
    Mid,
    /// `up` of a low rank, its rows where they belong in the weight.
    Up,
    /// The left factor of a Kronecker product.
    Left,
    /// The right one.
    Right,
    /// The whole change at strength 1.
    Delta,
}

impl Piece {
    fn suffix(self) -> &'static str {
        match self {
            Piece::Down => "down",
            Piece::Mid => "mid",
            Piece::Up => "up",
            Piece::Left => "left",
            Piece::Right => "right",
            Piece::Delta => "delta",
        }
    }
}

/// A change of a weight, to be applied in a program.
pub(super) struct Path<'a> {
    pub(super) change: &'a Change,
    pub(super) strength: f32,
    /// What stands before the names of its pieces.
    pub(super) name: String,
    /// Sizes of its parts: rank after `down`, rank before `up`.
    pub(super) ranks: [usize; 2],
    /// Sizes of the factors of a Kronecker product.
    pub(super) factors: [[usize; 2]; 2],
    pub(super) pieces: &'static [Piece],
}

impl Adapted {
    /// `base` with `adapters`, each at its strength; one of strength 0 is left out. `types` are those of the runner.
    ///
    /// # Errors
    /// A change does not fit its weight. Weights that `base` lacks are passed over.
    pub fn new(
        base: Arc<dyn WeightSource>,
        adapters: Vec<(Arc<Adapter>, f32)>,
        mode: Mode,
        types: TypePolicy,
    ) -> Result<Adapted> {
        let adapters: Vec<_> = adapters.into_iter().filter(|(_, strength)| *strength != 0.0).collect();
        let (targets, entries, tables) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut out = Adapted { base, adapters, mode, types, targets, entries, tables };
        for (a, (adapter, _)) in out.adapters.iter().enumerate() {
            for (name, changes) in &adapter.changes {
                let Some(meta) = out.base.meta(name) else { continue };
                let target = out.targets.entry(name.clone()).or_insert(Target { meta, changes: Vec::new() });
                for (c, change) in changes.iter().enumerate() {
                    let named = |e: Error| e.context(out.base.origin(name).name);
                    change.check(&*adapter.source, &meta.shape).map_err(named)?;
                    target.changes.push((a, c));
                }
            }
        }
        for name in out.targets.keys() {
            for (entry, value) in out.added(name)? {
                out.entries.insert(entry, value);
            }
        }
        Ok(out)
    }

    /// The same with `rows`, each as long as those of the table `[n, c]`, after the table's own: ids from `n` on mean them.
    /// A table whose type would round them away becomes f32, or f16 where that holds it.
    ///
    /// # Errors
    /// There is no such table, or `rows` are not whole rows of it.
    pub fn with_rows(mut self, table: &str, rows: Vec<f32>) -> Result<Adapted> {
        if rows.is_empty() {
            return Ok(self);
        }
        let target = if self.targets.contains_key(table) { self.merged(table) } else { table.to_owned() };
        let missing = || Error::missing(self.base.origin(table).name, self.base.origin(table).file);
        let meta = self.meta(&target).ok_or_else(missing)?;
        let [n, c] =
            meta.shape.array().ok_or_else(|| Error::shape(format!("{table} is {}, want [n, c]", meta.shape)))?;
        if c == 0 || !rows.len().is_multiple_of(c) {
            return Err(Error::shape(format!("{} values are not rows of {table} {}", rows.len(), meta.shape)));
        }
        let dtype = match meta.dtype {
            DType::F32 | DType::F16 | DType::BF16 => meta.dtype,
            DType::F8E4M3 | DType::F8E5M2 => DType::F16,
            _ => DType::F32,
        };
        let meta = TensorMeta { shape: Shape::new(&[n + rows.len() / c, c])?, dtype };
        // Tables of different rows are different tensors.
        let mut hash = DefaultHasher::new();
        rows.iter().for_each(|v| v.to_bits().hash(&mut hash));
        let name = format!("{target}#rows,{:x}", hash.finish());
        self.tables.insert(table.to_owned(), Longer { name, meta, rows });
        Ok(self)
    }

    /// The name and shape of a table with more rows.
    pub(super) fn longer(&self, table: &str) -> Option<(&str, Shape)> {
        self.tables.get(table).map(|t| (t.name.as_str(), t.meta.shape))
    }

    /// The bytes of a table with more rows.
    fn lengthened(&self, table: &str, longer: &Longer) -> Result<Bytes> {
        let target = if self.targets.contains_key(table) { self.merged(table) } else { table.to_owned() };
        let c = longer.meta.shape.last();
        let mut bytes = self.bytes(&target)?.read()?.to_vec();
        let meta = self.meta(&target).ok_or_else(|| Error::internal(format!("{table} is gone")))?;
        if meta.dtype != longer.meta.dtype {
            bytes = from_f32(longer.meta.dtype, &to_f32(meta.dtype, &bytes, meta.shape.elements())?, c)?;
        }
        bytes.extend(from_f32(longer.meta.dtype, &longer.rows, c)?);
        Ok(Bytes::from(bytes))
    }

    /// The names of changed weights.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.targets.keys().map(String::as_str)
    }

    /// Whether programs with these adapters read a tensor: not one that other adapters added, nor a weight in whose place
    /// they read the changed one.
    pub fn keeps(&self, name: &str) -> bool {
        let replaced = self.targets.get(name).is_some_and(|t| match self.mode {
            Mode::Immediately => true,
            Mode::AtRuntime => false,
            Mode::Auto => !is_coarse(t.meta.dtype) && !matches!(self.types, TypePolicy::Convert(t) if is_coarse(t)),
        });
        !replaced && !self.tables.contains_key(name) && self.meta(name).is_some()
    }

    /// Whether the changes of a weight are made in it.
    pub(super) fn merges(&self, weight: &Weight) -> bool {
        match self.mode {
            _ if matches!(weight.role(), Role::Vector | Role::Table) => true,
            Mode::Immediately => true,
            Mode::AtRuntime => false,
            Mode::Auto => !is_coarse(weight.dtype()) && !is_coarse(self.types.memory_type(weight, false)),
        }
    }

    pub(super) fn is_target(&self, name: &str) -> bool {
        self.targets.contains_key(name)
    }

    /// The name of a changed weight.
    pub(super) fn merged(&self, target: &str) -> String {
        let mut name = format!("{target}#merged");
        for (a, c) in self.targets.get(target).map_or(&[][..], |t| &t.changes) {
            if let Some((adapter, strength)) = self.adapters.get(*a) {
                name.push_str(&format!(",{}.{c}*{:x}", adapter.serial, strength.to_bits()));
            }
        }
        name
    }

    /// The changes of a weight.
    pub(super) fn paths(&self, target: &str) -> Result<Vec<Path<'_>>> {
        let Some(t) = self.targets.get(target) else { return Ok(Vec::new()) };
        t.changes.iter().map(|&(a, c)| self.path(target, &t.meta.shape, a, c)).collect()
    }

    fn change(&self, target: &str, a: usize, c: usize) -> Result<(&Adapter, f32, &Change)> {
        let found = self
            .adapters
            .get(a)
            .and_then(|(adapter, strength)| Some((&**adapter, *strength, adapter.changes.get(target)?.get(c)?)));
        found.ok_or_else(|| Error::internal(format!("{target} has no change {c} of adapter {a}")))
    }

    fn path(&self, target: &str, weight: &Shape, a: usize, c: usize) -> Result<Path<'_>> {
        let (adapter, strength, change) = self.change(target, a, c)?;
        let name = format!("{target}#{}.{c}.", adapter.serial);
        let [_, _, spatial] = change::split(weight);
        let (mut ranks, mut factors) = ([0; 2], [[0; 2]; 2]);
        let pieces: &[Piece] = match &change.kind {
            _ if change.magnitude.is_some() => &[Piece::Delta],
            Kind::LowRank { down, mid, up } => {
                ranks = [change::dims(&*adapter.source, down)?[0], change::dims(&*adapter.source, up)?[1]];
                if mid.is_some() { &[Piece::Down, Piece::Mid, Piece::Up] } else { &[Piece::Down, Piece::Up] }
            }
            Kind::Kronecker(left, right) if spatial == 1 && change.rows == Rows::All => {
                factors = [left.dims(&*adapter.source)?, right.dims(&*adapter.source)?];
                &[Piece::Left, Piece::Right]
            }
            _ => &[Piece::Delta],
        };
        Ok(Path { change, strength, name, ranks, factors, pieces })
    }

    /// The tensors that may be added for a weight.
    fn added(&self, target: &str) -> Result<Vec<(String, Entry)>> {
        let Some(Target { meta, changes }) = self.targets.get(target) else { return Ok(Vec::new()) };
        let entry = |piece, meta| Entry { target: target.to_owned(), piece, meta };
        let dtype = merged_type(meta.dtype, self.types);
        let mut out = vec![(self.merged(target), entry(None, TensorMeta { shape: meta.shape, dtype }))];
        let [n, k, s] = change::split(&meta.shape);
        for &(a, c) in changes {
            let path = self.path(target, &meta.shape, a, c)?;
            let [down, up] = path.ranks;
            for &piece in path.pieces {
                let (shape, dtype) = match piece {
                    Piece::Down if path.pieces.contains(&Piece::Mid) => {
                        (Shape::new(&[down, k / s.max(1)])?, DType::F32)
                    }
                    Piece::Down => (Shape::new(&[down, k])?, DType::F32),
                    Piece::Mid => (Shape::new(&[up, down * s])?, DType::F32),
                    Piece::Up => (Shape::new(&[n, up])?, DType::F32),
                    Piece::Left => (Shape::new(&path.factors[0])?, DType::F32),
                    Piece::Right => (Shape::new(&path.factors[1])?, DType::F32),
                    Piece::Delta => (meta.shape, dtype),
                };
                let meta = TensorMeta { shape, dtype };
                out.push((format!("{}{}", path.name, piece.suffix()), entry(Some((a, c, piece)), meta)));
            }
        }
        Ok(out)
    }

    fn base_values(&self, target: &str, meta: TensorMeta) -> Result<Vec<f32>> {
        to_f32(meta.dtype, &self.base.bytes(target)?.read()?, meta.shape.elements())
    }

    /// The elements of an entry.
    fn values(&self, entry: &Entry) -> Result<Vec<f32>> {
        let missing = || Error::internal(format!("{} is not changed", entry.target));
        let target = self.targets.get(&entry.target).ok_or_else(missing)?;
        let shape = &target.meta.shape;
        let base = || self.base_values(&entry.target, target.meta);
        let Some((a, c, piece)) = entry.piece else {
            let mut values = base()?;
            for &(a, c) in &target.changes {
                let (adapter, strength, change) = self.change(&entry.target, a, c)?;
                let delta = change.values(&*adapter.source, shape, &base)?;
                values.iter_mut().zip(&delta).for_each(|(v, d)| *v += strength * d);
            }
            return Ok(values);
        };
        let (adapter, _, change) = self.change(&entry.target, a, c)?;
        let source = &*adapter.source;
        let tensor = |name: &str| change::matrix(source, name).map(|m| m.values);
        match (piece, &change.kind) {
            (Piece::Down, Kind::LowRank { down, .. }) => tensor(down),
            (Piece::Mid, Kind::LowRank { mid: Some(mid), .. }) => tensor(mid),
            (Piece::Up, Kind::LowRank { up, .. }) => {
                let up = change::matrix(source, up)?;
                Ok(change.rows.place(&up, shape.dim(0)))
            }
            (Piece::Left, Kind::Kronecker(left, _)) => left.values(source).map(|m| m.values),
            (Piece::Right, Kind::Kronecker(_, right)) => right.values(source).map(|m| m.values),
            _ => change.values(source, shape, &base),
        }
    }

    /// The tensor of a file that an entry is known by.
    fn tensor_of(&self, entry: &Entry) -> Option<(&Adapter, &str)> {
        let (a, c, _) = entry.piece?;
        let (adapter, _, change) = self.change(&entry.target, a, c).ok()?;
        Some((adapter, change.kind.name()))
    }
}

/// Whether small changes of values of this type are rounded away.
fn is_coarse(dtype: DType) -> bool {
    dtype.is_quantised() || matches!(dtype, DType::F8E4M3 | DType::F8E5M2)
}

/// The type of a changed weight that is stored as `dtype`. Where another type is chosen for memory, it is rounded to that alone.
fn merged_type(dtype: DType, types: TypePolicy) -> DType {
    match (types, dtype) {
        (TypePolicy::Convert(_), _) => DType::F32,
        (TypePolicy::Stored, DType::F32 | DType::F16 | DType::BF16) => dtype,
        (TypePolicy::Stored, DType::F8E4M3S | DType::F8E5M2S | DType::I8S | DType::F4S) => DType::BF16,
        (TypePolicy::Stored, t) if is_coarse(t) => DType::F16,
        (TypePolicy::Stored, _) => DType::F32,
    }
}

impl WeightSource for Adapted {
    fn names(&self) -> Vec<&str> {
        self.base.names()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        let added = self.entries.get(name).map(|e| e.meta);
        let longer = || self.tables.values().find(|t| t.name == name).map(|t| t.meta);
        added.or_else(longer).or_else(|| self.base.meta(name))
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        if let Some((table, longer)) = self.tables.iter().find(|t| t.1.name == name) {
            return self.lengthened(table, longer);
        }
        let Some(entry) = self.entries.get(name) else { return self.base.bytes(name) };
        let made = self.values(entry).and_then(|v| from_f32(entry.meta.dtype, &v, entry.meta.shape.last().max(1)));
        made.map(Bytes::from).map_err(|e| e.context(self.origin(name).name))
    }

    fn is_made(&self, name: &str) -> bool {
        let own = self.entries.contains_key(name) || self.tables.values().any(|t| t.name == name);
        own || self.base.is_made(name)
    }

    fn origin(&self, name: &str) -> Origin {
        if let Some((table, _)) = self.tables.iter().find(|t| t.1.name == name) {
            return self.base.origin(table);
        }
        let Some(entry) = self.entries.get(name) else { return self.base.origin(name) };
        match self.tensor_of(entry) {
            Some((adapter, tensor)) => adapter.source.origin(tensor),
            None => {
                let base = self.base.origin(&entry.target);
                Origin { name: format!("{} with adapters", base.name), file: base.file }
            }
        }
    }
}
