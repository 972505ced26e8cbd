//! What the log says of a model that was opened: what its files are and by what, and the types of its weights.

use std::collections::BTreeMap;

use sd_core::device::DeviceKind;
use sd_core::{DType, Device, Result, TypePolicy};
use sd_models::{FileKind, Files, Model, Part, Survey};
use tracing::{Level, debug, enabled};

use crate::placement::Place;

/// Logs it, where somebody reads that.
///
/// # Errors
/// A part has no place or its graphs cannot be built.
pub(super) fn tell<'a>(
    files: &Files,
    model: &Model,
    types: TypePolicy,
    place: impl Fn(Part) -> Result<&'a Place>,
) -> Result<()> {
    if !enabled!(Level::DEBUG) {
        return Ok(());
    }
    for file in Survey::new(files).files {
        let format = format!("{:?}", file.format).to_lowercase();
        let what = match file.kind {
            FileKind::Model(_) => format!("{} by {}", file.what(), file.evidence.join(", ")),
            _ => file.what(),
        };
        debug!("{}: {format}, {} tensors, {what}", file.path.display(), file.tensors);
    }
    for part in model.components().map(|component| component.part()) {
        debug!("{}: {}", part.name(), weights(model, part, types, place(part)?.main()?)?);
    }
    Ok(())
}

/// The weights that programs of a part read, by their types in the file and in memory.
fn weights(model: &Model, part: Part, types: TypePolicy, device: &Device) -> Result<String> {
    let mut by_type: BTreeMap<(DType, DType), (usize, usize)> = BTreeMap::new();
    for weight in model.weights(part)? {
        let here = types.memory_type(&weight, device.kind() == DeviceKind::Cpu);
        let bytes = here.bytes(weight.shape().elements(), weight.shape().last()).unwrap_or(0);
        let (count, sum) = by_type.entry((weight.dtype(), here)).or_default();
        (*count, *sum) = (*count + 1, *sum + bytes);
    }
    let line = |((stored, here), (count, bytes)): (&(DType, DType), &(usize, usize))| {
        let kept = if stored == here { String::new() } else { format!(" as {here}") };
        format!("{count} {stored}{kept}, {:.1} MB", *bytes as f64 / 1e6)
    };
    let lines: Vec<String> = by_type.iter().map(line).collect();
    Ok(format!("weights in memory: {}", lines.join("; ")))
}
