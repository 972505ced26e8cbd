//! Tensors in host memory: values that go into and come out of graphs, and the stored bytes of weights.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::shape::Shape;

/// Values in host memory, row-major. Graph inputs and outputs are f32 or, for token ids, i32.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Shape,
    data: Data,
}

/// The elements of a [`Tensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Real values.
    F32(Vec<f32>),
    /// Indices.
    I32(Vec<i32>),
}

impl Tensor {
    /// A tensor of reals.
    ///
    /// # Errors
    /// The shape is not valid or does not hold `data.len()` elements.
    pub fn f32(dims: &[usize], data: Vec<f32>) -> Result<Tensor> {
        Tensor::new(dims, Data::F32(data))
    }

    /// A tensor of indices.
    ///
    /// # Errors
    /// The shape is not valid or does not hold `data.len()` elements.
    pub fn i32(dims: &[usize], data: Vec<i32>) -> Result<Tensor> {
        Tensor::new(dims, Data::I32(data))
    }

    pub(crate) fn new(dims: &[usize], data: Data) -> Result<Tensor> {
        let shape = Shape::new(dims)?;
        let len = match &data {
            Data::F32(v) => v.len(),
            Data::I32(v) => v.len(),
        };
        if shape.elements() != len {
            return Err(Error::shape(format!("{shape} has {} elements, got {len}", shape.elements())));
        }
        Ok(Tensor { shape, data })
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// The shape is not valid.
    pub fn zeros(dims: &[usize]) -> Result<Tensor> {
        let shape = Shape::new(dims)?;
        Ok(Tensor { shape, data: Data::F32(vec![0.0; shape.elements()]) })
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The sizes of the axes.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// F32 or I32.
    pub fn dtype(&self) -> DType {
        match self.data {
            Data::F32(_) => DType::F32,
            Data::I32(_) => DType::I32,
        }
    }

    /// The elements.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The reals; empty for a tensor of indices.
    pub fn values(&self) -> &[f32] {
        match &self.data {
            Data::F32(v) => v,
            Data::I32(_) => &[],
        }
    }

    /// The reals, to change in place; empty for a tensor of indices.
    pub fn values_mut(&mut self) -> &mut [f32] {
        match &mut self.data {
            Data::F32(v) => v,
            Data::I32(_) => &mut [],
        }
    }

    /// The reals, taken out; empty for a tensor of indices.
    pub fn into_values(self) -> Vec<f32> {
        match self.data {
            Data::F32(v) => v,
            Data::I32(_) => Vec::new(),
        }
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// The number of elements differs.
    pub fn reshape(self, dims: &[usize]) -> Result<Tensor> {
        Tensor::new(dims, self.data)
    }

    /// Tensors of one shape stacked along a new or the existing first axis: `n` of `[b, ..]` give `[n * b, ..]`.
    ///
    /// # Errors
    /// No tensors, or shapes that differ after the first axis.
    pub fn concat_batch(parts: &[&Tensor]) -> Result<Tensor> {
        let first = parts.first().ok_or_else(|| Error::internal("concat of nothing"))?;
        let mut dims = first.dims().to_vec();
        let mut values = Vec::new();
        let mut batch = 0;
        for p in parts {
            if p.dims().len() != dims.len() || p.dims().get(1..) != first.dims().get(1..) {
                return Err(Error::shape(format!("cannot stack {} on {}", p.shape, first.shape)));
            }
            batch += p.shape.dim(0);
            values.extend_from_slice(p.values());
        }
        match dims.first_mut() {
            Some(d) => *d = batch,
            None => return Err(Error::shape("cannot stack scalars")),
        }
        Tensor::f32(&dims, values)
    }

    /// Whether every element is finite.
    pub fn is_finite(&self) -> bool {
        self.values().iter().all(|v| v.is_finite())
    }
}

/// What is going to happen to mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// It is wanted soon: the system may begin to read it.
    WillNeed,
    /// It is not wanted for a while: the system may take its pages for something else first.
    Cold,
}

/// A mapped file.
pub trait Mapped: AsRef<[u8]> + Send + Sync {
    /// Tells the system about `range`. Changes no bytes.
    ///
    /// # Errors
    /// The bytes are wanted soon, and the file has become shorter. That the system takes no advice is none.
    fn advise(&self, range: Range<usize>, advice: Advice) -> Result<()>;

    /// To be asked after looking at bytes.
    ///
    /// # Errors
    /// Some of those that anybody looked at so far were not in the file any more, and zeros instead.
    fn check(&self) -> Result<()>;

    /// The bytes of `range`, read rather than looked at, so that what is not there is an error.
    ///
    /// # Errors
    /// The file cannot be read, or has become shorter.
    fn read(&self, range: Range<usize>) -> Result<Vec<u8>>;
}

/// A shared, immutable run of bytes: part of a mapped file or of an owned buffer.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    range: Range<usize>,
}

#[derive(Clone)]
enum Owner {
    Memory(Arc<dyn AsRef<[u8]> + Send + Sync>),
    File(Arc<dyn Mapped>),
}

impl Owner {
    fn all(&self) -> &[u8] {
        match self {
            Owner::Memory(m) => (**m).as_ref(),
            Owner::File(f) => (**f).as_ref(),
        }
    }
}

impl Bytes {
    /// All of `owner`, which must give the same memory whenever it is asked.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Bytes {
        Bytes::of(Owner::Memory(owner))
    }

    /// All of a mapped file, which must give the same memory whenever it is asked.
    pub fn mapped(file: Arc<dyn Mapped>) -> Bytes {
        Bytes::of(Owner::File(file))
    }

    fn of(owner: Owner) -> Bytes {
        let len = owner.all().len();
        Bytes { owner, range: 0..len }
    }

    /// Whether they are part of a mapped file.
    pub fn is_mapped(&self) -> bool {
        matches!(self.owner, Owner::File(_))
    }

    /// Whether somebody else keeps this memory anyway.
    pub(crate) fn is_shared(&self) -> bool {
        match &self.owner {
            Owner::Memory(m) => Arc::strong_count(m) > 1,
            Owner::File(_) => true,
        }
    }

    /// Tells the system what is going to happen to them, if they are part of a mapped file.
    ///
    /// # Errors
    /// As [`Mapped::advise`].
    pub fn advise(&self, advice: Advice) -> Result<()> {
        match &self.owner {
            Owner::Memory(_) => Ok(()),
            Owner::File(f) => f.advise(self.range.clone(), advice),
        }
    }

    /// An error if they are part of a mapped file and were not what it held when somebody looked at them.
    ///
    /// # Errors
    /// As [`Mapped::check`].
    pub fn check(&self) -> Result<()> {
        match &self.owner {
            Owner::Memory(_) => Ok(()),
            Owner::File(f) => f.check(),
        }
    }

    /// The same bytes in memory of their own if they are part of a mapped file.
    ///
    /// # Errors
    /// The file cannot be read, or has become shorter.
    pub fn read(&self) -> Result<Bytes> {
        match &self.owner {
            Owner::Memory(_) => Ok(self.clone()),
            Owner::File(f) => f.read(self.range.clone()).map(Bytes::from),
        }
    }

    /// Part of these bytes; `None` when it reaches outside.
    pub fn slice(&self, range: Range<usize>) -> Option<Bytes> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        (start <= end && end <= self.range.end).then(|| Bytes { owner: self.owner.clone(), range: start..end })
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(v: Vec<u8>) -> Bytes {
        Bytes::new(Arc::new(v))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.owner.all().get(self.range.clone()).unwrap_or(&[])
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// Where weights come from: a checkpoint, or several merged and renamed. Only headers are in memory; bytes are
/// read or mapped when asked for.
pub trait WeightSource: Send + Sync {
    /// The names of all tensors, in order.
    fn names(&self) -> Vec<&str>;

    /// Shape and stored type of a tensor.
    fn meta(&self, name: &str) -> Option<TensorMeta>;

    /// The stored bytes of a tensor, `meta(name).dtype.bytes(..)` long.
    ///
    /// # Errors
    /// The tensor does not exist or the file cannot be read.
    fn bytes(&self, name: &str) -> Result<Bytes>;

    /// How a user knows the tensor: its name in the file and the file, for messages. For a tensor that does not
    /// exist, where it was looked for.
    fn origin(&self, name: &str) -> Origin;

    /// Whether the bytes of a tensor are computed whenever they are asked for, so that they take memory of their own even
    /// where files are used in place.
    fn is_made(&self, _name: &str) -> bool {
        false
    }
}

/// Shape and stored type of a tensor in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMeta {
    /// Row-major shape.
    pub shape: Shape,
    /// Stored type.
    pub dtype: DType,
}

/// A tensor as the user's file spells it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Origin {
    /// The name in the file.
    pub name: String,
    /// The file, or the files searched.
    pub file: String,
}
