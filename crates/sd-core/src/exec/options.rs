//! Choices for a runner, and the types weights have in memory.

use std::str::FromStr;
use std::sync::Arc;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::can_read;
use crate::plan::Cuts;
use crate::residency::{Home, Manager};
use crate::scope::{Role, Weight};

/// Choices for a runner.
#[derive(Clone, Debug, Default)]
pub struct RunnerOptions {
    /// CPU threads; 0 for one per physical core.
    pub threads: usize,
    /// Which types weights are converted to.
    pub types: TypePolicy,
    /// Which cuts are taken.
    pub cuts: Cuts,
    /// What the factors of products are.
    pub precision: Precision,
    /// What messages and reports call the network.
    pub module: String,
    /// Where its weights are between uses; `None` for the devices that compute, each of which has those of its part.
    pub home: Option<Home>,
    /// Further devices. Each runs a part of a program, one after the other, where the first has too little memory for
    /// all of it.
    pub others: Vec<Arc<Device>>,
    /// Who keeps the accounts of the devices; `None` for one of the runner's own.
    pub manager: Option<Arc<Manager>>,
}

/// What the CPU's kernels make of the factors of products, convolutions and attention; sums are f32. Only machines with
/// instructions for it multiply bf16, and layers that are marked as wide never are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// bf16 where weights take 16 bits or less, and between values if those of all matrices do; else f32.
    #[default]
    Auto,
    /// f32.
    F32,
    /// bf16.
    Bf16,
}

impl Precision {
    /// Every choice with the name that users give it.
    const NAMES: [(&str, Precision); 3] =
        [("auto", Precision::Auto), ("f32", Precision::F32), ("bf16", Precision::Bf16)];

    /// Whether products with `weight` in memory as `types` says are of bf16.
    pub(crate) fn is_narrow(self, weight: &Weight, types: &TypePolicy) -> bool {
        let wanted = match types {
            TypePolicy::Stored => weight.dtype(),
            TypePolicy::Convert(t) => *t,
        };
        match self {
            Precision::Auto => !matches!(wanted, DType::F32 | DType::F64),
            Precision::F32 => false,
            Precision::Bf16 => true,
        }
    }
}

impl FromStr for Precision {
    type Err = Error;

    fn from_str(name: &str) -> Result<Precision> {
        let found = Precision::NAMES.iter().find(|n| n.0.eq_ignore_ascii_case(name));
        found.map(|n| n.1).ok_or_else(|| {
            let names = Precision::NAMES.map(|n| n.0).join(", ");
            Error::request(format!("precision: want one of {names}, not {name:?}"))
        })
    }
}

/// The type that matrices, tables and kernels have in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TypePolicy {
    /// As stored, where ggml can compute with it.
    #[default]
    Stored,
    /// This type, where shape and use allow it.
    Convert(DType),
}

impl TypePolicy {
    /// The type `weight` has in memory.
    ///
    /// Vectors are f32. Kernels are f32 or f16: a quantised choice leaves them f16, and bf16 becomes f32, which
    /// holds its range. Tables and matrices whose rows are not whole blocks of the chosen type keep 16 bits. Types
    /// only files use become the nearest type ggml computes with: fp8 becomes f16, scaled fp8 and int8 become bf16, f64
    /// becomes f32. The CPU's `kernels` read fp8 and int8 matrices and tables as they are.
    pub fn memory_type(&self, weight: &Weight, kernels: bool) -> DType {
        // These hold activations. ggml cannot read them back, so that the conversion says what is wrong.
        if matches!(weight.dtype(), DType::Q8_1 | DType::Q8K) {
            return DType::F32;
        }
        let as_it_is = kernels && matches!(weight.role(), Role::Matrix | Role::Table) && can_read(weight.dtype());
        let stored = if as_it_is { weight.dtype() } else { computable(weight.dtype()) };
        let want = match self {
            TypePolicy::Stored => stored,
            TypePolicy::Convert(t) if t.is_quantised() && weight.is_fine() => DType::F16,
            TypePolicy::Convert(t) => computable(*t),
        };
        let row = weight.shape().last();
        let sixteen = if computable(weight.dtype()) == DType::BF16 { DType::BF16 } else { DType::F16 };
        match weight.role() {
            Role::Vector => DType::F32,
            Role::Kernel if matches!(want, DType::F32 | DType::BF16) => DType::F32,
            Role::Kernel => DType::F16,
            Role::Matrix | Role::Table if want.bytes(row, row).is_some() => want,
            Role::Matrix | Role::Table => sixteen,
        }
    }
}

/// The type ggml computes with that holds every value of `stored`.
fn computable(stored: DType) -> DType {
    match stored {
        DType::F8E4M3 | DType::F8E5M2 => DType::F16,
        DType::F8E4M3S | DType::F8E5M2S | DType::I8S | DType::F4S => DType::BF16,
        t if t.is_float() && t != DType::F64 => t,
        _ => DType::F32,
    }
}
