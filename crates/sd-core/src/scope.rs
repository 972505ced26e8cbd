//! Weights by name: a path into a checkpoint, and the weights that model code names there.
//!
//! A [`Weight`] is a name, a shape and a stored type; bytes are read only when a device needs them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::shape::Shape;
use crate::tensor::{Origin, WeightSource};

/// A place in a tree of weights. Cheap to copy.
#[derive(Clone)]
pub struct Scope {
    root: Arc<Root>,
    path: String,
}

struct Root {
    source: Arc<dyn WeightSource>,
    names: BTreeSet<String>,
    used: Mutex<BTreeSet<String>>,
}

/// What a weight is for. It decides which types the weight may have in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A matrix `[n, k]` of a linear layer: any type whose blocks fit `k`.
    Matrix,
    /// A convolution kernel: f32 or f16.
    Kernel,
    /// A table `[n, c]` whose rows are looked up.
    Table,
    /// A bias, a norm, a position table, a factor of an adapter: f32.
    Vector,
}

/// A stored weight: no bytes.
#[derive(Clone, Debug)]
pub struct Weight(Arc<WeightData>);

#[derive(Debug, Clone)]
struct WeightData {
    name: String,
    shape: Shape,
    dtype: DType,
    role: Role,
    /// Whether it is never quantised in memory.
    fine: bool,
    origin: Origin,
}

impl Weight {
    /// The full name within the scope's root.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The shape the network sees: for [`Role::Matrix`] always `[n, k]`.
    pub fn shape(&self) -> Shape {
        self.0.shape
    }

    /// The type in the file.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// What it is for.
    pub fn role(&self) -> Role {
        self.0.role
    }

    /// Its name in the user's file, and that file.
    pub fn origin(&self) -> &Origin {
        &self.0.origin
    }

    /// The same, but never quantised in memory.
    pub(crate) fn fine(&self) -> Weight {
        Weight(Arc::new(WeightData { fine: true, ..(*self.0).clone() }))
    }

    /// Whether it is never quantised in memory.
    pub(crate) fn is_fine(&self) -> bool {
        self.0.fine
    }

    /// The error of a weight whose shape does not fit its input.
    pub(crate) fn mismatch(&self, input: &str, want: &str) -> Error {
        let Origin { name, file } = self.origin();
        Error::shape(format!(
            "{name}: input {input}, so want {want}; file has {} {} ({file})",
            self.shape(),
            self.dtype()
        ))
    }
}

/// A linear layer: `[n, k]` and, where the network has one, a bias `[n]`.
#[derive(Clone, Debug)]
pub struct Linear {
    path: String,
    weight: Weight,
    bias: Option<Weight>,
    dims: [usize; 2],
    wide: bool,
}

/// A 2-D convolution: kernel `[n, c, kh, kw]` and, where the network has one, a bias `[n]`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    path: String,
    weight: Weight,
    bias: Option<Weight>,
    dims: [usize; 4],
    wide: bool,
}

/// The affine part of a normalisation: `[c]` each, or nothing.
#[derive(Clone, Debug)]
pub struct Norm {
    path: String,
    weight: Option<Weight>,
    bias: Option<Weight>,
}

macro_rules! layer {
    ($type:ty, $rank:literal) => {
        impl $type {
            /// The module path.
            pub fn path(&self) -> &str {
                &self.path
            }

            /// The weight.
            pub fn weight(&self) -> &Weight {
                &self.weight
            }

            /// The bias.
            pub fn bias(&self) -> Option<&Weight> {
                self.bias.as_ref()
            }

            /// The axes of the weight.
            pub fn dims(&self) -> [usize; $rank] {
                self.dims
            }

            /// The same layer, marked as one whose products overflow f16.
            #[must_use]
            pub fn wide(mut self) -> Self {
                self.wide = true;
                self
            }

            pub(crate) fn is_wide(&self) -> bool {
                self.wide
            }
        }
    };
}

layer!(Linear, 2);
layer!(Conv2d, 4);

impl Norm {
    /// A normalisation without weights.
    pub fn plain(path: &str) -> Norm {
        Norm { path: path.into(), weight: None, bias: None }
    }

    /// The module path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The factor.
    pub fn weight(&self) -> Option<&Weight> {
        self.weight.as_ref()
    }

    /// The offset.
    pub fn bias(&self) -> Option<&Weight> {
        self.bias.as_ref()
    }
}

impl Scope {
    /// The top of `source`.
    pub fn root(source: Arc<dyn WeightSource>) -> Scope {
        let names = source.names().into_iter().map(String::from).collect();
        Scope { root: Arc::new(Root { source, names, used: Mutex::default() }), path: String::new() }
    }

    /// Where this scope is: names joined by dots, empty at the top.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Where the weights come from.
    pub fn source(&self) -> &Arc<dyn WeightSource> {
        &self.root.source
    }

    /// The scope `name` below this one; `name` may hold dots.
    #[must_use]
    pub fn sub(&self, name: &str) -> Scope {
        Scope { root: self.root.clone(), path: self.join(name) }
    }

    /// The scope of element `i` of a list.
    #[must_use]
    pub fn at(&self, name: &str, i: usize) -> Scope {
        self.sub(&format!("{name}.{i}"))
    }

    fn join(&self, name: &str) -> String {
        match (self.path.as_str(), name) {
            ("", n) => n.into(),
            (p, "") => p.into(),
            (p, n) => format!("{p}.{n}"),
        }
    }

    /// Whether there is a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.root.names.contains(&self.join(name))
    }

    /// Whether there is any tensor below this name.
    pub fn contains(&self, name: &str) -> bool {
        !self.children(name).is_empty() || self.has(name)
    }

    /// The names directly below `name`, sorted as text.
    pub fn children(&self, name: &str) -> BTreeSet<String> {
        let mut prefix = self.join(name);
        if !prefix.is_empty() {
            prefix.push('.');
        }
        let below = self.root.names.range(prefix.clone()..).take_while(|n| n.starts_with(&prefix));
        below.filter_map(|n| n[prefix.len()..].split('.').next()).map(String::from).collect()
    }

    /// How many elements the list `name` has.
    ///
    /// # Errors
    /// There are none, or a number is missing.
    pub fn count(&self, name: &str) -> Result<usize> {
        let children = self.children(name);
        let n = children.iter().filter(|c| c.bytes().all(|b| b.is_ascii_digit())).count();
        match (0..n).find(|i| !children.contains(&i.to_string())) {
            Some(i) => Err(self.missing(&format!("{name}.{i}"))),
            None if n == 0 => Err(self.missing(&format!("{name}.0"))),
            None => Ok(n),
        }
    }

    /// The axes of the tensor `name`.
    ///
    /// # Errors
    /// It is missing, or does not have `N` axes.
    pub fn dims<const N: usize>(&self, name: &str) -> Result<[usize; N]> {
        let full = self.join(name);
        let meta = self.root.source.meta(&full).ok_or_else(|| self.missing(name))?;
        meta.shape.array().ok_or_else(|| {
            let Origin { name, file } = self.root.source.origin(&full);
            Error::shape(format!("{name} is {} ({file}), want {N} axes", meta.shape))
        })
    }

    fn missing(&self, name: &str) -> Error {
        let Origin { name, file } = self.root.source.origin(&self.join(name));
        Error::missing(name, file)
    }

    /// The tensor `name`, used as `role`, with the shape it has in the file.
    ///
    /// # Errors
    /// It is missing.
    pub fn weight(&self, name: &str, role: Role) -> Result<Weight> {
        let shape = self.root.source.meta(&self.join(name)).ok_or_else(|| self.missing(name))?.shape;
        self.weight_as(name, role, shape)
    }

    /// The tensor `name`, used as `role`, seen as `shape`.
    pub(crate) fn weight_as(&self, name: &str, role: Role, shape: Shape) -> Result<Weight> {
        let full = self.join(name);
        let meta = self.root.source.meta(&full).ok_or_else(|| self.missing(name))?;
        let origin = self.root.source.origin(&full);
        if !meta.dtype.is_float() && role != Role::Vector {
            let Origin { name, file } = &origin;
            return Err(Error::shape(format!("{name} holds {} ({file}), want real numbers", meta.dtype)));
        }
        self.root.used.lock().unwrap_or_else(PoisonError::into_inner).insert(full.clone());
        Ok(Weight(Arc::new(WeightData { name: full, shape, dtype: meta.dtype, role, fine: false, origin })))
    }

    fn bias(&self, n: usize) -> Result<Weight> {
        let bias = self.weight("bias", Role::Vector)?;
        if bias.shape().dims() != [n] {
            let Origin { name, file } = bias.origin();
            return Err(Error::shape(format!("{name} is {} ({file}), its weight has {n} rows", bias.shape())));
        }
        Ok(bias)
    }

    /// The linear layer `name`: `weight [n, k]`, or a 1×1 kernel `[n, k, 1, 1]`, and `bias [n]`.
    ///
    /// # Errors
    /// A tensor is missing, or the shapes are not those of a linear layer.
    pub fn linear(&self, name: &str) -> Result<Linear> {
        let layer = self.linear_no_bias(name)?;
        let bias = Some(self.sub(name).bias(layer.dims[0])?);
        Ok(Linear { bias, ..layer })
    }

    /// The linear layer `name` of a network that has no bias there.
    ///
    /// # Errors
    /// The weight is missing, or its shape is not that of a linear layer.
    pub fn linear_no_bias(&self, name: &str) -> Result<Linear> {
        let w = self.sub(name);
        let meta = w.root.source.meta(&w.join("weight")).ok_or_else(|| w.missing("weight"))?;
        let (n, k) = match *meta.shape.dims() {
            [n, k] | [n, k, 1] | [n, k, 1, 1] => (n, k),
            _ => {
                let Origin { name, file } = w.root.source.origin(&w.join("weight"));
                return Err(Error::shape(format!("{name} is {} ({file}), want [n, k]", meta.shape)));
            }
        };
        let weight = w.weight_as("weight", Role::Matrix, Shape::new(&[n, k])?)?;
        Ok(Linear { path: w.path, weight, bias: None, dims: [n, k], wide: false })
    }

    /// The convolution `name`: `weight [n, c, kh, kw]` and `bias [n]`.
    ///
    /// # Errors
    /// A tensor is missing, or the shapes are not those of a convolution.
    pub fn conv2d(&self, name: &str) -> Result<Conv2d> {
        let layer = self.conv2d_no_bias(name)?;
        let bias = Some(self.sub(name).bias(layer.dims[0])?);
        Ok(Conv2d { bias, ..layer })
    }

    /// The convolution `name` of a network that has no bias there.
    ///
    /// # Errors
    /// The weight is missing, or its shape is not that of a convolution.
    pub fn conv2d_no_bias(&self, name: &str) -> Result<Conv2d> {
        let w = self.sub(name);
        let dims: [usize; 4] = w.dims("weight")?;
        let weight = w.weight("weight", Role::Kernel)?;
        Ok(Conv2d { path: w.path, weight, bias: None, dims, wide: false })
    }

    /// The affine part of the normalisation `name`: `weight [c]` and `bias [c]`.
    ///
    /// # Errors
    /// A tensor is missing.
    pub fn norm(&self, name: &str) -> Result<Norm> {
        let layer = self.norm_no_bias(name, "weight")?;
        let bias = Some(self.sub(name).weight("bias", Role::Vector)?);
        Ok(Norm { bias, ..layer })
    }

    /// The factor `[c]` of the normalisation `name` in a network that has no bias there, under the name that the
    /// checkpoint gives to the factor.
    ///
    /// # Errors
    /// The factor is missing.
    pub fn norm_no_bias(&self, name: &str, factor: &str) -> Result<Norm> {
        let w = self.sub(name);
        let weight = Some(w.weight(factor, Role::Vector)?);
        Ok(Norm { path: w.path, weight, bias: None })
    }

    /// The names no weight was taken from yet, below this scope.
    pub fn unused(&self) -> Vec<String> {
        let used = self.root.used.lock().unwrap_or_else(PoisonError::into_inner);
        let here = |n: &&String| {
            self.path.is_empty() || n.strip_prefix(&self.path).is_some_and(|rest| rest.starts_with('.'))
        };
        self.root.names.iter().filter(here).filter(|n| !used.contains(*n)).cloned().collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tensor::{Bytes, TensorMeta};

    /// A source of named shapes, f32, whose every byte is zero.
    pub(crate) struct Shapes(pub(crate) Vec<(&'static str, Vec<usize>)>);

    impl Shapes {
        pub(crate) fn scope(list: &[(&'static str, &[usize])]) -> Scope {
            Scope::root(Arc::new(Shapes(list.iter().map(|(n, d)| (*n, d.to_vec())).collect())))
        }
    }

    impl WeightSource for Shapes {
        fn names(&self) -> Vec<&str> {
            self.0.iter().map(|(n, _)| *n).collect()
        }

        fn meta(&self, name: &str) -> Option<TensorMeta> {
            let (_, dims) = self.0.iter().find(|(n, _)| *n == name)?;
            Some(TensorMeta { shape: Shape::new(dims).unwrap(), dtype: DType::F32 })
        }

        fn bytes(&self, name: &str) -> Result<Bytes> {
            let n = self.meta(name).unwrap().shape.elements();
            Ok(Bytes::from(vec![0; n * 4]))
        }

        fn origin(&self, name: &str) -> Origin {
            Origin { name: name.into(), file: "heron.gguf".into() }
        }
    }

    #[test]
    fn layers_are_found_by_path() {
        let w = Shapes::scope(&[
            ("blocks.0.up.weight", &[8, 4]),
            ("blocks.0.up.bias", &[8]),
            ("blocks.1.up.weight", &[8, 4, 1, 1]),
            ("head.weight", &[3, 8, 3, 3]),
        ]);
        assert_eq!(w.count("blocks").unwrap(), 2);
        let up = w.at("blocks", 1).linear_no_bias("up").unwrap();
        assert_eq!((up.dims(), up.path(), up.bias().is_none()), ([8, 4], "blocks.1.up", true));
        assert!(w.contains("blocks.1") && !w.contains("blocks.2") && !w.contains("block"));
        assert_eq!(w.unused(), ["blocks.0.up.bias", "blocks.0.up.weight", "head.weight"]);
        assert_eq!(w.sub("blocks").unused().len(), 2);
    }

    #[test]
    fn errors_name_tensor_shapes_and_file() {
        let w = Shapes::scope(&[
            ("a.weight", &[8, 4]),
            ("a.bias", &[7]),
            ("c.weight", &[8, 4]),
            ("l.0.w", &[1]),
            ("l.2.w", &[1]),
        ]);
        let e = |r: Result<Linear>| r.unwrap_err().to_string();
        assert_eq!(e(w.linear("a")), "a.bias is [7] (heron.gguf), its weight has 8 rows");
        assert_eq!(e(w.linear("b")), "b.weight: missing from heron.gguf");
        assert_eq!(e(w.linear("c")), "c.bias: missing from heron.gguf");
        assert_eq!(w.count("l").unwrap_err().to_string(), "l.1: missing from heron.gguf");
        assert_eq!(
            w.dims::<3>("a.weight").unwrap_err().to_string(),
            "a.weight is [8, 4] (heron.gguf), want 3 axes"
        );
    }
}
