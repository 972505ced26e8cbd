//! Matrices in low-precision storage beside the tensors that scale them, as they are in files, and their values.
//!
//! | companions of `m.weight` | its type | value |
//! |---|---|---|
//! | `m.scale_weight` or `m.weight_scale` | FP8 | weight × scale: one, one per row, or one per block |
//! | `m.weight_scale_inv` | FP8 | weight × scale per block (the name of DeepSeek's files) |
//! | `m.weight_scale`, `m.comfy_quant` | I8 | weight × scale per row, rotated back if the note says `convrot` |
//! | `m.weight_scale`, `m.weight_scale_2`, `m.comfy_quant` | U8 | `nvfp4`: E2M1 × E4M3 per 16 × one scale |
//! | `m.weight_scale`, `m.comfy_quant` | FP8 | `mxfp8`: weight × a power of two per 32 |
//!
//! `m.scale_input` and `m.input_scale` scale activations of programs that multiply in FP8; products here are exact
//! without them. `scaled_fp8` marks a file. Sources: the layouts of ComfyUI and its kernels (comfy-kitchen); golden
//! values: `oracle/scaled.py`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use sd_core::convert::{from_f32, to_f32};
use sd_core::{Bytes, DType, Error, Origin, Result, TensorMeta, WeightSource};
use serde_json::Value as Json;

/// Endings of the tensors that scale a weight.
const SCALES: &[&str] = &[".scale_weight", ".weight_scale", ".weight_scale_inv"];

/// Endings of the tensors that scale activations.
const INPUT_SCALES: &[&str] = &[".scale_input", ".input_scale"];

const SCALE_2: &str = ".weight_scale_2";
const NOTE: &str = ".comfy_quant";
const MARKER: &str = "scaled_fp8";

/// The longest note that is read.
const MAX_NOTE: usize = 64 << 10;

/// Endings of quantisations that are recognised and cannot be read.
const FOREIGN: &[(&str, &str)] = &[
    (".weight.absmax", "bitsandbytes"),
    (".weight.quant_map", "bitsandbytes"),
    (".weight.SCB", "bitsandbytes"),
    (".weight.quant_state.bitsandbytes__nf4", "bitsandbytes NF4"),
    (".weight.quant_state.bitsandbytes__fp4", "bitsandbytes FP4"),
    (".wscales", "SVDQuant (nunchaku)"),
    (".qzeros", "AWQ or GPTQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight_zero_point", "an asymmetric quantisation"),
];

/// The type of values, that of ComfyUI: products keep eight bits of mantissa, and FP8 has four at most.
const VALUES: DType = DType::BF16;

/// How scaled weights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaledAs {
    /// Values of this type, F32 or BF16: products are f32 and then rounded once.
    Values(DType),
    /// In blocks that begin with their scale and take as many bits as in the file otherwise, where rows divide into such
    /// blocks and nothing is rotated; else as values.
    Blocks,
}

/// What is read of the tensors of `file`, and nothing of what scales them. Where this cannot be done, [`check`] says why.
pub(crate) fn read(file: &Arc<dyn WeightSource>, form: ScaledAs) -> Arc<dyn WeightSource> {
    ScaledSource::wrap(file.clone(), form).unwrap_or_else(|_| file.clone())
}

/// An error on scaled weights that cannot be read.
pub(crate) fn check(file: &Arc<dyn WeightSource>) -> Result<()> {
    ScaledSource::wrap(file.clone(), ScaledAs::Blocks).map(drop)
}

/// How the values of a weight follow from what is stored.
#[derive(Debug, Clone, PartialEq)]
enum Recipe {
    /// Elements times scales, each for a block of so many rows and columns.
    Scaled { scale: String, block: [usize; 2] },
    /// Elements times scales, in groups that were rotated by a Hadamard matrix of so many rows.
    Rotated { scale: String, block: [usize; 2], group: usize },
    /// Two elements to a byte, times a scale per 16, times one scale.
    Nvfp4 { scale: String, whole: String },
    /// Elements times powers of two per 32.
    Mxfp8 { scale: String },
}

/// A checkpoint whose scaled weights are read as values; their companions are not seen.
pub struct ScaledSource {
    inner: Arc<dyn WeightSource>,
    recipes: HashMap<String, Recipe>,
    hidden: BTreeSet<String>,
    form: ScaledAs,
}

impl ScaledSource {
    /// `inner`, its scaled weights in this form. A checkpoint without scaled weights is returned as it is.
    ///
    /// # Errors
    /// A companion without a weight, of a shape that does not fit or of an unknown format, and quantisations that are
    /// not read; the message names the tensor. Reads the notes, which are short, and no weights.
    pub fn wrap(inner: Arc<dyn WeightSource>, form: ScaledAs) -> Result<Arc<dyn WeightSource>> {
        let found = ScaledSource::survey(inner.clone(), form)?;
        Ok(if found.hidden.is_empty() { inner } else { Arc::new(found) })
    }

    fn survey(inner: Arc<dyn WeightSource>, form: ScaledAs) -> Result<ScaledSource> {
        let mut modules: BTreeMap<String, Companions> = BTreeMap::new();
        let mut hidden = BTreeSet::new();
        for name in inner.names() {
            if let Some((_, what)) = FOREIGN.iter().find(|(end, _)| name.ends_with(end)) {
                return Err(bad(&*inner, name, &format!("belongs to {what}, which is not read"))
                    .hint("get the model as FP8, GGUF or in 16 bits"));
            }
            if name == MARKER || name.ends_with(&format!(".{MARKER}")) {
                hidden.insert(name.to_owned());
                continue;
            }
            let stem = |ends: &[&str]| ends.iter().find_map(|e| name.strip_suffix(e)).map(str::to_owned);
            if let Some(module) = stem(SCALES) {
                let scale = &mut modules.entry(module).or_default().scale;
                if let Some(other) = scale {
                    return Err(bad(&*inner, name, &format!("scales the same weight as {other}")));
                }
                *scale = Some(name.to_owned());
            } else if let Some(module) = stem(&[SCALE_2]) {
                modules.entry(module).or_default().whole = Some(name.to_owned());
            } else if let Some(module) = stem(&[NOTE]) {
                modules.entry(module).or_default().note = Some(name.to_owned());
            } else if let Some(module) = stem(INPUT_SCALES) {
                modules.entry(module).or_default().input.push(name.to_owned());
            }
        }

        let mut recipes = HashMap::new();
        for (module, companions) in modules {
            let weight = format!("{module}.weight");
            if let Some(recipe) = companions.recipe(&*inner, &weight)? {
                recipes.insert(weight, recipe);
            }
            hidden.extend(companions.names());
        }
        for name in inner.names() {
            let is_int8 = name.ends_with(".weight") && inner.meta(name).is_some_and(|m| m.dtype == DType::I8);
            if is_int8 && !recipes.contains_key(name) {
                return Err(bad(&*inner, name, "is stored as int8 without the scales that belong to it"));
            }
        }
        Ok(ScaledSource { inner, recipes, hidden, form })
    }

    fn values(&self, name: &str, recipe: &Recipe) -> Result<Vec<f32>> {
        let meta = self.stored(name)?;
        let elements = meta.shape.elements();
        let columns = columns(&meta);
        match recipe {
            Recipe::Scaled { scale, block } => {
                let mut values = to_f32(meta.dtype, &self.inner.bytes(name)?.read()?, elements)?;
                scale_blocks(&mut values, columns, &self.scales(scale)?, *block);
                Ok(values)
            }
            Recipe::Rotated { scale, block, group } => {
                let mut values = to_f32(meta.dtype, &self.inner.bytes(name)?.read()?, elements)?;
                scale_blocks(&mut values, columns, &self.scales(scale)?, *block);
                values.chunks_exact_mut(*group).for_each(rotate);
                Ok(values)
            }
            Recipe::Nvfp4 { scale, whole } => {
                let whole = self.scales(whole)?.first().copied().unwrap_or(1.0);
                let packed = self.inner.bytes(name)?.read()?;
                let mut values: Vec<f32> = packed.iter().flat_map(|b| [e2m1(b >> 4), e2m1(b & 15)]).collect();
                let scales: Vec<f32> = self.scales(scale)?.iter().map(|s| whole * s).collect();
                scale_tiles(&mut values, 2 * columns, &scales, 16);
                Ok(values)
            }
            Recipe::Mxfp8 { scale } => {
                let mut values = to_f32(meta.dtype, &self.inner.bytes(name)?.read()?, elements)?;
                let scales: Vec<f32> = self.inner.bytes(scale)?.read()?.iter().map(|b| e8m0(*b)).collect();
                scale_tiles(&mut values, columns, &scales, 32);
                Ok(values)
            }
        }
    }

    /// The type of a weight's blocks, if it has some.
    fn blocks(&self, meta: &TensorMeta, recipe: &Recipe) -> Option<DType> {
        let (dtype, across) = match (recipe, meta.dtype) {
            (Recipe::Scaled { block, .. }, DType::F8E4M3) => (DType::F8E4M3S, block[1]),
            (Recipe::Scaled { block, .. }, DType::F8E5M2) => (DType::F8E5M2S, block[1]),
            (Recipe::Scaled { block, .. }, DType::I8) => (DType::I8S, block[1]),
            (Recipe::Nvfp4 { .. }, _) => (DType::F4S, 16),
            _ => return None,
        };
        let columns = if dtype == DType::F4S { 2 * columns(meta) } else { meta.shape.last() };
        let fits =
            meta.shape.rank() == 2 && columns.is_multiple_of(dtype.block()) && across.is_multiple_of(dtype.block());
        (self.form == ScaledAs::Blocks && fits).then_some(dtype)
    }

    /// A weight as blocks of `dtype`.
    fn packed(&self, name: &str, recipe: &Recipe, dtype: DType) -> Result<Vec<u8>> {
        let meta = self.stored(name)?;
        let bytes = self.inner.bytes(name)?;
        let (rows, columns) = (rows(&meta), columns(&meta));
        let payload = dtype.block_bytes() - 4;
        let groups = columns / payload;
        // The scale of a group of a row.
        let scale: Box<dyn Fn(usize, usize) -> f32> = match recipe {
            Recipe::Nvfp4 { scale, whole } => {
                let whole = self.scales(whole)?.first().copied().unwrap_or(1.0);
                let scales = self.scales(scale)?;
                Box::new(move |r, g| whole * scales.get(tile(r, g, groups)).copied().unwrap_or(f32::NAN))
            }
            Recipe::Scaled { scale, block: [down, across] } => {
                let (down, per_group) = (*down, across / payload);
                let (scales, per_row) = (self.scales(scale)?, columns.div_ceil(*across));
                Box::new(move |r, g| scales.get(r / down * per_row + g / per_group).copied().unwrap_or(f32::NAN))
            }
            _ => return Err(Error::internal("only scaled elements are packed")),
        };
        let mut out = Vec::with_capacity(rows * groups * dtype.block_bytes());
        for (r, row) in bytes.chunks_exact(columns.max(1)).enumerate() {
            for (g, group) in row.chunks_exact(payload).enumerate() {
                out.extend(scale(r, g).to_le_bytes());
                out.extend(group);
            }
        }
        Ok(out)
    }

    fn scales(&self, name: &str) -> Result<Vec<f32>> {
        let meta = self.stored(name)?;
        let scales = to_f32(meta.dtype, &self.inner.bytes(name)?.read()?, meta.shape.elements())?;
        if let Some(wrong) = scales.iter().find(|s| !s.is_finite()) {
            return Err(bad(&*self.inner, name, &format!("holds the scale {wrong}")));
        }
        Ok(scales)
    }

    fn stored(&self, name: &str) -> Result<TensorMeta> {
        self.inner.meta(name).ok_or_else(|| Error::missing(name, self.inner.origin(name).file))
    }
}

impl WeightSource for ScaledSource {
    fn names(&self) -> Vec<&str> {
        self.inner.names().into_iter().filter(|n| !self.hidden.contains(*n)).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        let mut meta = self.inner.meta(name).filter(|_| !self.hidden.contains(name))?;
        if let Some(recipe) = self.recipes.get(name) {
            meta.dtype = match (self.blocks(&meta, recipe), self.form) {
                (Some(blocks), _) => blocks,
                (None, ScaledAs::Values(dtype)) => dtype,
                (None, ScaledAs::Blocks) => VALUES,
            };
            if matches!(recipe, Recipe::Nvfp4 { .. }) {
                meta.shape = meta.shape.with_last(2 * columns(&meta)).ok()?;
            }
        }
        Some(meta)
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let Some(recipe) = self.recipes.get(name) else { return self.inner.bytes(name) };
        if let Some(blocks) = self.blocks(&self.stored(name)?, recipe) {
            return Ok(self.packed(name, recipe, blocks).map_err(|e| e.context(name))?.into());
        }
        let values = self.values(name, recipe).map_err(|e| e.context(name))?;
        let dtype = if let ScaledAs::Values(dtype) = self.form { dtype } else { VALUES };
        Ok(from_f32(dtype, &values, values.len())?.into())
    }

    fn origin(&self, name: &str) -> Origin {
        self.inner.origin(name)
    }

    fn is_made(&self, name: &str) -> bool {
        self.recipes.contains_key(name) || self.inner.is_made(name)
    }
}

/// What belongs to one weight.
#[derive(Debug, Default)]
struct Companions {
    scale: Option<String>,
    whole: Option<String>,
    note: Option<String>,
    input: Vec<String>,
}

impl Companions {
    fn names(self) -> impl Iterator<Item = String> {
        self.scale.into_iter().chain(self.whole).chain(self.note).chain(self.input)
    }

    /// How the weight is read; `None` if nothing about it is scaled.
    fn recipe(&self, source: &dyn WeightSource, weight: &str) -> Result<Option<Recipe>> {
        let any = [&self.scale, &self.whole, &self.note].into_iter().flatten().chain(&self.input).next();
        let Some(any) = any else { return Ok(None) };
        let meta =
            source.meta(weight).ok_or_else(|| bad(source, any, &format!("scales {weight}, which is missing")))?;
        let note = self.note.as_deref().map(|name| Note::read(source, name)).transpose()?;
        let format = note.as_ref().map_or("", |n| n.format.as_str());
        let Some(scale) = self.scale.as_deref() else {
            return match format {
                "" if self.whole.is_none() => Ok(None), // an input scale alone
                _ => Err(bad(source, weight, &format!("is {format} without its weight_scale"))),
            };
        };
        let scale_meta = source.meta(scale).ok_or_else(|| Error::missing(scale, source.origin(scale).file))?;
        let misfit = |want: &str| {
            let (s, w) = (scale_meta.shape, meta.shape);
            bad(source, scale, &format!("is {s} {}, {weight} is {w} {}; want {want}", scale_meta.dtype, meta.dtype))
        };
        let tiles = |columns: usize| {
            let rows = rows(&meta).checked_next_multiple_of(128);
            let want = rows.and_then(|r| r.checked_mul(columns.checked_next_multiple_of(4)?));
            let fits = meta.shape.rank() == 2 && want == Some(scale_meta.shape.elements());
            if fits { Ok(()) } else { Err(misfit("a scale for each group of columns in tiles of 128 rows")) }
        };
        let fp8 = matches!(meta.dtype, DType::F8E4M3 | DType::F8E5M2);
        let plain = || block(&meta, &scale_meta).ok_or_else(|| misfit("one scale, one per row or one per block"));
        let named = || scale.to_owned();
        Ok(Some(match (format, meta.dtype) {
            ("nvfp4", DType::U8) if scale_meta.dtype == DType::F8E4M3 => {
                let whole = self.whole.clone();
                let whole = whole.ok_or_else(|| bad(source, weight, "is nvfp4 without its weight_scale_2"))?;
                if source.meta(&whole).is_none_or(|m| m.shape.elements() != 1) {
                    return Err(bad(source, &whole, "is not one scale"));
                }
                if !(2 * columns(&meta)).is_multiple_of(16) {
                    return Err(misfit("columns in groups of 16"));
                }
                tiles(2 * columns(&meta) / 16)?;
                meta.shape.with_last(2 * columns(&meta))?;
                Recipe::Nvfp4 { scale: named(), whole }
            }
            _ if self.whole.is_some() => {
                return Err(bad(source, weight, "has a weight_scale_2, which only nvfp4 has"));
            }
            ("mxfp8", _) if fp8 && scale_meta.dtype == DType::U8 => {
                if !columns(&meta).is_multiple_of(32) {
                    return Err(misfit("columns in groups of 32"));
                }
                tiles(columns(&meta) / 32)?;
                Recipe::Mxfp8 { scale: named() }
            }
            ("" | "float8_e4m3fn" | "float8_e5m2", _) if fp8 => Recipe::Scaled { scale: named(), block: plain()? },
            ("int8_tensorwise", DType::I8) => match note.and_then(|n| n.group) {
                None => Recipe::Scaled { scale: named(), block: plain()? },
                Some(group) => {
                    let power_of_4 =
                        group.is_power_of_two() && group.trailing_zeros().is_multiple_of(2) && group >= 4;
                    if !power_of_4 || !columns(&meta).is_multiple_of(group) {
                        let what = format!("is {} and rotated in groups of {group}, want a power of 4", meta.shape);
                        return Err(bad(source, weight, &what));
                    }
                    Recipe::Rotated { scale: named(), block: plain()?, group }
                }
            },
            ("", DType::I8) => Recipe::Scaled { scale: named(), block: plain()? },
            ("", _) => return Err(misfit("an FP8 or int8 weight")),
            (format, dtype) => {
                let what = format!("is stored as {dtype} in the format {format}, which is not read");
                return Err(bad(source, weight, &what).hint("get the model as FP8, GGUF or in 16 bits"));
            }
        }))
    }
}

/// What ComfyUI notes about a quantised weight.
struct Note {
    format: String,
    /// Columns that were rotated together.
    group: Option<usize>,
}

impl Note {
    fn read(source: &dyn WeightSource, name: &str) -> Result<Note> {
        let short = source.meta(name).is_some_and(|m| m.dtype == DType::U8 && m.shape.elements() <= MAX_NOTE);
        if !short {
            return Err(bad(source, name, "is no short text"));
        }
        let json: Json = serde_json::from_slice(&source.bytes(name)?.read()?)
            .map_err(|e| bad(source, name, &format!("is not JSON: {e}")))?;
        let format = json.get("format").and_then(Json::as_str).filter(|f| f.len() <= 40);
        let format = format.ok_or_else(|| bad(source, name, "names no format"))?.to_owned();
        let rotated = json.get("convrot").and_then(Json::as_bool).unwrap_or(false);
        let group = match json.get("convrot_groupsize").map(Json::as_u64) {
            None => 256,
            Some(size) => size
                .and_then(|n| usize::try_from(n).ok())
                .ok_or_else(|| bad(source, name, "has a convrot_groupsize that is no number"))?,
        };
        Ok(Note { format, group: rotated.then_some(group) })
    }
}

fn bad(source: &dyn WeightSource, name: &str, what: &str) -> Error {
    let origin = source.origin(name);
    Error::bad_file(origin.file, format!("tensor {} {what}", origin.name))
}

fn rows(meta: &TensorMeta) -> usize {
    if meta.shape.rank() == 0 { 1 } else { meta.shape.dim(0) }
}

/// All axes but the first as one.
fn columns(meta: &TensorMeta) -> usize {
    meta.shape.elements() / rows(meta).max(1)
}

/// The rows and columns that share a scale; `None` if the shapes do not say.
fn block(weight: &TensorMeta, scale: &TensorMeta) -> Option<[usize; 2]> {
    let (rows, columns) = (rows(weight), columns(weight));
    if !matches!(scale.dtype, DType::F32 | DType::F16 | DType::BF16) || weight.shape.elements() == 0 {
        return None;
    }
    match scale.shape.dims() {
        _ if scale.shape.elements() == 1 => Some([rows, columns]),
        [n, rest @ ..] if *n == rows && rest.iter().all(|d| *d == 1) => Some([1, columns]),
        [r, c] => {
            // Blocks of 128, the only ones that are cut off at edges, come before other even divisions.
            let side = |size: usize, count: usize| match size.div_ceil(128) {
                n if n == count => Some(128),
                _ => (count > 0 && size.is_multiple_of(count)).then(|| size / count),
            };
            Some([side(rows, *r)?, side(columns, *c)?])
        }
        _ => None,
    }
}

/// Multiplies a matrix by scales, each for a block of `[rows, columns]`.
fn scale_blocks(values: &mut [f32], columns: usize, scales: &[f32], [down, across]: [usize; 2]) {
    let per_row = columns.div_ceil(across.max(1)).max(1);
    for (r, row) in values.chunks_exact_mut(columns.max(1)).enumerate() {
        let scales = scales.chunks_exact(per_row).nth(r / down.max(1)).unwrap_or_default();
        for (part, scale) in row.chunks_mut(across.max(1)).zip(scales) {
            part.iter_mut().for_each(|v| *v *= scale);
        }
    }
}

/// Where the scale of group `g` of row `r` lies, as cuBLAS wants it: in tiles of 128 rows by 4 scales, where rows 32 apart
/// lie side by side.
fn tile(r: usize, g: usize, groups: usize) -> usize {
    (r / 128 * groups.div_ceil(4) + g / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + g % 4
}

/// Multiplies a matrix by scales for `group` columns each, at their places by [`tile`].
fn scale_tiles(values: &mut [f32], columns: usize, scales: &[f32], group: usize) {
    let groups = columns / group;
    for (r, row) in values.chunks_exact_mut(columns.max(1)).enumerate() {
        for (g, part) in row.chunks_exact_mut(group).enumerate() {
            let scale = scales.get(tile(r, g, groups)).copied().unwrap_or(f32::NAN);
            part.iter_mut().for_each(|v| *v *= scale);
        }
    }
}

/// Multiplies a group by the normalised regular Hadamard matrix of its size, a power of 4: the Kronecker power of
/// ½[[1,1,1,−1],[1,1,−1,1],[1,−1,1,1],[−1,1,1,1]], which is symmetric and its own inverse.
fn rotate(group: &mut [f32]) {
    let mut step = 1;
    while step < group.len() {
        for start in 0..group.len() / (4 * step) {
            for i in 0..step {
                let at = |k: usize| start * 4 * step + k * step + i;
                let [a, b, c, d] = [0, 1, 2, 3].map(|k| group.get(at(k)).copied().unwrap_or(0.0));
                let turned = [a + b + c - d, a + b - c + d, a - b + c + d, b + c + d - a];
                for (k, v) in turned.into_iter().enumerate() {
                    if let Some(to) = group.get_mut(at(k)) {
                        *to = v / 2.0;
                    }
                }
            }
        }
        step *= 4;
    }
}

/// A 4-bit float: sign, two bits of exponent with bias 1, one of mantissa (OCP Microscaling Formats 1.0, section 5.3.3).
fn e2m1(code: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES.get(usize::from(code & 7)).copied().unwrap_or(0.0);
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// A power of two by its exponent with bias 127; code 0 stands for zero, as ComfyUI's kernels read it.
fn e8m0(code: u8) -> f32 {
    f32::from_bits(u32::from(code) << 23)
}

#[cfg(test)]
mod tests;
