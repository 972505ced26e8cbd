//! From the tensors of a module to the changes they make.

use sd_core::passes::adapters::{Change, Factor, Kind, Magnitude, Rows};
use sd_core::{Result, WeightSource, convert};

use super::keys::{Group, Slot};

/// Alpha and rank where the file's metadata says them: `lora_alpha`, `r`, and whether alpha is divided by the root of
/// the rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Alpha {
    pub(super) alpha: f64,
    pub(super) root: bool,
}

/// A change of the tensor `tensor` of the module, `weight` or `bias`.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) tensor: &'static str,
    pub(super) change: Change,
}

/// The changes that a module's tensors make; `Err` with what is wrong with them.
pub(super) fn changes(
    group: &Group,
    source: &dyn WeightSource,
    alpha: Option<Alpha>,
) -> Result<Result<Vec<Made>, String>> {
    if let Some(Slot::Unsupported(kind)) = group.slots.keys().find(|s| matches!(s, Slot::Unsupported(_))) {
        return Ok(Err(format!("{kind} is not supported")));
    }
    let mut out = Vec::new();
    let made = |tensor, kind, scale| {
        let change = Change { kind, scale, rows: Rows::All, magnitude: None };
        Made { tensor, change }
    };
    let scale = scale(group, source, alpha)?;
    match product(group) {
        Ok(Some(kind)) => out.push(made("weight", kind, scale)),
        Ok(None) => {}
        Err(what) => return Ok(Err(what)),
    }
    for (slot, tensor, scale) in
        [(Slot::Difference, "weight", 1.0), (Slot::UpBias, "bias", scale), (Slot::BiasDifference, "bias", 1.0)]
    {
        if let Some(name) = group.get(slot) {
            out.push(made(tensor, Kind::Difference(name.clone()), scale));
        }
    }
    if let Some(name) = group.get(Slot::Replacement) {
        out.push(made("weight", Kind::Replacement(name.clone()), 1.0));
    }
    if let Some(first) = out.first_mut().filter(|m| m.tensor == "weight") {
        first.change.magnitude = magnitude(group, source);
    }
    Ok(if out.is_empty() { Err("has no tensor that makes a change".to_owned()) } else { Ok(out) })
}

/// The change by products, if there is one.
fn product(group: &Group) -> Result<Option<Kind>, String> {
    let get = |slot| group.get(slot).cloned();
    let apart = |what: &str| Err(format!("{what} is missing"));
    let hadamard = |side| match (get(Slot::HadamardA(side)), get(Slot::HadamardB(side))) {
        (Some(a), Some(b)) => Some(Factor::Product { a, b, core: get(Slot::HadamardCore(side)) }),
        _ => None,
    };
    let kronecker =
        |side| match (get(Slot::Kronecker(side)), get(Slot::KroneckerA(side)), get(Slot::KroneckerB(side))) {
            (Some(whole), ..) => Some(Factor::Whole(whole)),
            (None, Some(a), Some(b)) => Some(Factor::Product { a, b, core: get(Slot::KroneckerCore(side)) }),
            _ => None,
        };
    if group.slots.keys().any(|s| matches!(s, Slot::HadamardA(_) | Slot::HadamardB(_))) {
        return match (hadamard(1), hadamard(2)) {
            (Some(a), Some(b)) => Ok(Some(Kind::Hadamard(a, b))),
            _ => apart("a factor of the Hadamard product (hada_w1_a, _b, hada_w2_a, _b)"),
        };
    }
    if group.slots.keys().any(|s| matches!(s, Slot::Kronecker(_) | Slot::KroneckerA(_) | Slot::KroneckerB(_))) {
        return match (kronecker(1), kronecker(2)) {
            (Some(a), Some(b)) => Ok(Some(Kind::Kronecker(a, b))),
            _ => apart("a factor of the Kronecker product (lokr_w1, lokr_w2)"),
        };
    }
    match (get(Slot::Down), get(Slot::Up)) {
        (Some(down), Some(up)) => Ok(Some(Kind::LowRank { down, mid: get(Slot::Mid), up })),
        (None, None) => Ok(None),
        (Some(_), None) => apart("the factor up (lora_up, lora_B)"),
        (None, Some(_)) => apart("the factor down (lora_down, lora_A)"),
    }
}

/// What the product is multiplied by: alpha over the rank, else 1.
fn scale(group: &Group, source: &dyn WeightSource, meta: Option<Alpha>) -> Result<f32> {
    if let Some(scale) = number(group, Slot::Scale, source)? {
        return Ok(scale as f32);
    }
    let first = |slot| group.get(slot).and_then(|name| source.meta(name)).map(|m| m.shape.dim(0) as f64);
    // Of a product of two whole factors there is no rank, and alpha means nothing (lycoris).
    let rank =
        [Slot::Down, Slot::HadamardB(1), Slot::KroneckerB(2), Slot::KroneckerB(1)].into_iter().find_map(first);
    let Some(rank) = rank.filter(|r| *r > 0.0) else { return Ok(1.0) };
    let scale = match (number(group, Slot::Alpha, source)?, meta) {
        (Some(alpha), _) => alpha / rank,
        (None, Some(Alpha { alpha, root: false })) => alpha / rank,
        (None, Some(Alpha { alpha, root: true })) => alpha / rank.sqrt(),
        (None, None) => 1.0,
    };
    Ok(scale as f32)
}

/// The value of a tensor of one element.
fn number(group: &Group, slot: Slot, source: &dyn WeightSource) -> Result<Option<f64>> {
    let Some(name) = group.get(slot) else { return Ok(None) };
    let Some(meta) = source.meta(name).filter(|m| m.shape.elements() == 1) else { return Ok(None) };
    let values = convert::to_f32(meta.dtype, &source.bytes(name)?.read()?, 1)?;
    Ok(values.first().map(|v| f64::from(*v)).filter(|v| v.is_finite()))
}

fn magnitude(group: &Group, source: &dyn WeightSource) -> Option<Magnitude> {
    if let Some(name) = group.get(Slot::Magnitude) {
        return Some(Magnitude { name: name.clone(), per_input: false });
    }
    let name = group.get(Slot::DoraScale)?;
    let dims = source.meta(name)?.shape;
    let per_input = dims.rank() > 1 && dims.dim(0) == 1 && dims.elements() > 1;
    Some(Magnitude { name: name.clone(), per_input })
}
