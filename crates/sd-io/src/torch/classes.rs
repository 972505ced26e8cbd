//! The classes and functions that a pickle may name, and what is made of them. None is ever run.

use sd_core::DType;
use sd_core::shape::MAX_RANK;

use super::pickle::{Id, StorageRef, TensorRef, Value, value};
use crate::text::shown;

/// A class or function that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// A dictionary, empty or from pairs.
    Dict,
    /// A storage of elements of a type, or of bytes.
    Storage(Option<DType>),
    /// An element type.
    Type(DType),
    /// A function that makes a tensor of a storage, offset, shape and strides; the last one has the type, too.
    Rebuild { typed: bool },
    /// A function that makes a parameter of a tensor.
    Parameter,
    /// A function that calls another one, given first.
    FromType,
    /// A shape.
    Size,
    /// One whose objects are not looked into.
    Opaque(&'static str),
}

/// The longest key of a storage, which is a number.
const MAX_KEY: usize = 256;

/// Storage classes of `torch`.
const STORAGES: &[(&str, DType)] = &[
    ("FloatStorage", DType::F32),
    ("HalfStorage", DType::F16),
    ("BFloat16Storage", DType::BF16),
    ("DoubleStorage", DType::F64),
    ("LongStorage", DType::I64),
    ("IntStorage", DType::I32),
    ("ShortStorage", DType::I16),
    ("CharStorage", DType::I8),
    ("ByteStorage", DType::U8),
    ("BoolStorage", DType::Bool),
];

/// Element types of `torch`.
const TYPES: &[(&str, DType)] = &[
    ("float32", DType::F32),
    ("float16", DType::F16),
    ("bfloat16", DType::BF16),
    ("float64", DType::F64),
    ("float8_e4m3fn", DType::F8E4M3),
    ("float8_e5m2", DType::F8E5M2),
    ("int64", DType::I64),
    ("int32", DType::I32),
    ("int16", DType::I16),
    ("int8", DType::I8),
    ("uint8", DType::U8),
    ("bool", DType::Bool),
];

/// Packages whose objects training programs leave beside the tensors.
const PACKAGES: &[(&str, &str)] = &[
    ("pytorch_lightning", "an object of PyTorch Lightning"),
    ("lightning", "an object of PyTorch Lightning"),
    ("lightning_fabric", "an object of PyTorch Lightning"),
    ("omegaconf", "a configuration"),
    ("numpy", "an object of NumPy"),
    ("datetime", "a date"),
    ("pathlib", "a path"),
];

/// Single classes whose objects are not looked into.
const OPAQUE: &[(&str, &str, &str)] = &[
    ("argparse", "Namespace", "options"),
    ("collections", "Counter", "counts"),
    ("torch", "device", "a device"),
    ("torch.serialization", "_get_layout", "a layout"),
    ("_codecs", "encode", "bytes"),
    ("typing", "Any", "a type"),
    ("copyreg", "_reconstructor", "an object"),
    ("copy_reg", "_reconstructor", "an object"),
];

/// What Python's own module of built-in names may give: plain data.
const BUILT_IN: &[&str] = &[
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "object",
    "set",
    "slice",
    "str",
    "tuple",
];

/// The class called so.
///
/// # Errors
/// It is not known; the message names it.
pub(crate) fn known(module: &str, name: &str) -> Result<Class, String> {
    let package = module.split('.').next().unwrap_or_default();
    let found = match (module, name) {
        ("collections", "OrderedDict" | "defaultdict") => Some(Class::Dict),
        ("torch.nn.modules.container", "ParameterDict") => Some(Class::Dict),
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => Some(Class::Rebuild { typed: false }),
        ("torch._utils", "_rebuild_tensor_v3") => Some(Class::Rebuild { typed: true }),
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Some(Class::Parameter),
        ("torch._tensor", "_rebuild_from_type_v2") => Some(Class::FromType),
        ("torch.nn.parameter", "Parameter" | "Buffer") | ("torch", "Tensor") => Some(Class::Parameter),
        ("torch", "Size") => Some(Class::Size),
        ("torch" | "torch.storage", "UntypedStorage") => Some(Class::Storage(None)),
        ("torch" | "torch.cuda", _) => {
            let storage = STORAGES.iter().find(|s| s.0 == name).map(|s| Class::Storage(Some(s.1)));
            // The layout before 0.4 names tensor classes, which its storages make superfluous.
            let tensor = name.strip_suffix("Tensor").and_then(|kind| {
                let known = STORAGES.iter().any(|s| s.0.strip_suffix("Storage") == Some(kind));
                known.then_some(Class::Opaque("a class of tensors"))
            });
            let dtype = TYPES.iter().find(|t| t.0 == name).map(|t| Class::Type(t.1));
            storage.or(tensor).or(dtype)
        }
        ("builtins" | "__builtin__", _) => BUILT_IN.contains(&name).then_some(Class::Opaque("an object")),
        _ => PACKAGES.iter().find(|p| p.0 == package).map(|p| Class::Opaque(p.1)),
    };
    let found = found.or_else(|| {
        OPAQUE.iter().find(|(m, n, _)| (*m, *n) == (module, name)).map(|(_, _, what)| Class::Opaque(what))
    });
    found.ok_or_else(|| {
        format!(
            "names {}.{}, which is neither a tensor nor plain data; nothing in the file is run. If you trust it, save \
             its state_dict() alone with PyTorch",
            shown(module),
            shown(name)
        )
    })
}

/// What calling `class` with `args` makes.
pub(crate) fn call(values: &[Value], class: &Value, args: &Value) -> Result<Value, String> {
    let Value::Class(class) = class else {
        return match class {
            Value::Opaque(what) => Ok(Value::Opaque(what)),
            _ => Err("calls what is no class".into()),
        };
    };
    let Value::Tuple(args) = args else { return Err("calls a class without arguments".into()) };
    let arg = |i: usize| args.get(i).map_or(&Value::None, |&id| value(values, id));
    match class {
        Class::Opaque(what) => Ok(Value::Opaque(what)),
        Class::Dict => match arg(0) {
            // A class is what makes the default of a key.
            Value::None | Value::Class(_) => Ok(Value::Dict(Vec::new())),
            Value::List(pairs) => {
                let pairs: Result<_, String> = pairs.iter().map(|&id| pair(values, id)).collect();
                pairs.map(Value::Dict)
            }
            _ => Err("a dictionary from what is no list of pairs".into()),
        },
        // No tensor has that many axes; the list is not kept further.
        Class::Size => match arg(0).items() {
            Some(items) => Ok(Value::Tuple(items.iter().take(MAX_RANK + 1).copied().collect())),
            None => Err("a shape that is no list of numbers".into()),
        },
        Class::Rebuild { typed } => rebuild(values, args, *typed).map(|t| Value::Tensor(Box::new(t))),
        Class::Parameter => match arg(0) {
            Value::Tensor(t) => Ok(Value::Tensor(t.clone())),
            _ => Err("a parameter that is no tensor".into()),
        },
        Class::FromType => match (arg(0), arg(2)) {
            (Value::Class(Class::FromType), _) => Err("a tensor that rebuilds itself".into()),
            (function @ Value::Class(_), inner @ Value::Tuple(_)) => call(values, function, inner),
            _ => Err("a tensor without a function that makes it".into()),
        },
        Class::Storage(_) | Class::Type(_) => Err("makes a storage out of nothing".into()),
    }
}

fn pair(values: &[Value], id: Id) -> Result<(Id, Id), String> {
    match value(values, id).items() {
        Some(&[k, v]) => Ok((k, v)),
        _ => Err("a dictionary from what are no pairs".into()),
    }
}

/// The tensor that the arguments of a rebuild function describe: storage, offset, shape, strides, whether a gradient
/// is kept, hooks, and with `typed` the element type.
fn rebuild(values: &[Value], args: &[Id], typed: bool) -> Result<TensorRef, String> {
    let arg = |i: usize| args.get(i).map_or(&Value::None, |&id| value(values, id));
    let Value::Storage(storage) = arg(0) else { return Err("a tensor without a storage".into()) };
    let dtype = match (typed, arg(6), storage.dtype) {
        (true, Value::Class(Class::Type(dtype)), _) => *dtype,
        (false, _, Some(dtype)) => dtype,
        _ => return Err(format!("a tensor of storage {} has no known element type", shown(&storage.key))),
    };
    let dims = numbers(values, arg(2)).ok_or("a tensor whose shape is no list of sizes")?;
    let strides = numbers(values, arg(3)).ok_or("a tensor whose strides are no list of numbers")?;
    if dims.len() > MAX_RANK {
        return Err(format!("a tensor with {} axes, at most {MAX_RANK} are supported", dims.len()));
    }
    let offset = unsigned(arg(1)).ok_or("a tensor whose offset is no number")?;
    Ok(TensorRef { storage: (**storage).clone(), dtype, offset, dims, strides })
}

/// The storage that a persistent id names: `("storage", class, key, location, elements, view)`, where a view is
/// `(key, offset, elements)`.
pub(crate) fn storage(values: &[Value], parts: &[Id]) -> Result<StorageRef, String> {
    let part = |i: usize| parts.get(i).map_or(&Value::None, |&id| value(values, id));
    match part(0) {
        Value::Text(kind) if **kind == *"storage" => {}
        _ => return Err("refers to an object outside of the pickle that is no storage".into()),
    }
    let Value::Class(Class::Storage(dtype)) = part(1) else { return Err("a storage of an unknown type".into()) };
    let key = match part(2) {
        // Every tensor keeps the key of its storage.
        Value::Text(key) if key.len() > MAX_KEY => {
            return Err(format!("a storage whose key has {} bytes, at most {MAX_KEY} are read", key.len()));
        }
        Value::Text(key) => key.to_string(),
        Value::Int(key) => key.to_string(),
        _ => return Err("a storage without a key".into()),
    };
    let numel = unsigned(part(4)).ok_or_else(|| format!("storage {} has no size", shown(&key)))?;
    let view = match part(5) {
        Value::Tuple(view) => {
            let of = |i: usize| view.get(i).and_then(|&id| unsigned(value(values, id)));
            let (Some(start), Some(len)) = (of(1), of(2)) else { return Err("a view that is not one".into()) };
            let end = start.checked_add(len).filter(|end| *end <= numel);
            let end = end.ok_or_else(|| format!("a view leaves storage {}", shown(&key)))?;
            Some(start..end)
        }
        _ => None,
    };
    Ok(StorageRef { key, dtype: *dtype, numel, view })
}

fn unsigned(v: &Value) -> Option<u64> {
    match v {
        Value::Int(i) => u64::try_from(*i).ok(),
        _ => None,
    }
}

fn numbers(values: &[Value], v: &Value) -> Option<Vec<u64>> {
    // No tensor has that many axes; the list is not read further.
    v.items()?.iter().take(MAX_RANK + 1).map(|&id| unsigned(value(values, id))).collect()
}
