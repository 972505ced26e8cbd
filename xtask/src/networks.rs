//! Runs the networks of a checkpoint one by one, and compares them with a reference.

use anyhow::{Context, Result, bail, ensure};
use sd_core::{
    CancelToken, DType, Device, Precision, Program, Runner, RunnerOptions, Tensor, TypePolicy, WeightSource,
};
use sd_io::Checkpoint;
use sd_models::{Component, Evaluation, Files, Model, Part};
use std::path::Path;
use std::sync::Arc;

/// Tokens of one window of a prompt.
const TOKENS: usize = 77;
/// The largest relative L2 distance from the reference that counts as the same, with f32 products.
const TOLERANCE: f64 = 1e-3;

/// How to run.
#[derive(Debug, Clone)]
pub struct Setup {
    /// A device's name; empty for the default.
    pub device: String,
    /// CPU threads; 0 for one per core.
    pub threads: usize,
    /// Weights in memory; as stored without it.
    pub weight_type: Option<DType>,
    /// Factors of products on the processor.
    pub precision: Precision,
}

impl Setup {
    pub(crate) fn runner(&self, component: &Component) -> Result<Runner> {
        let types = self.weight_type.map_or(TypePolicy::Stored, TypePolicy::Convert);
        let options =
            RunnerOptions { threads: self.threads, types, precision: self.precision, ..RunnerOptions::default() };
        Ok(Runner::new(Device::find(&self.device)?, component.source(), options)?)
    }
}

pub(crate) fn open(path: &Path) -> Result<Model> {
    let file = Arc::new(Checkpoint::open(path)?);
    Ok(Model::open(&Files { model: Some(file), ..Files::default() })?)
}

pub(crate) fn run(runner: &mut Runner, program: &Program, inputs: &[(&str, &Tensor)]) -> Result<Tensor> {
    let outputs = runner.run(program, inputs, &CancelToken::new())?;
    outputs.into_iter().next().context("the program has no output")
}

fn evaluation(batch: usize, size: [usize; 2]) -> Evaluation {
    Evaluation { batch, size, tokens: TOKENS, ..Evaluation::default() }
}

/// Runs text encoder, diffusion network and decoder of `path` on the inputs that `oracle/fullsize_sd15.py` wrote to
/// `reference` and returns a line for each with its relative L2 distance from the reference's output.
///
/// # Errors
/// When something cannot be read or run, or a distance is above 1e-3 or, with bf16 products, above that of torch in bf16.
pub fn compare(path: &Path, reference: &Path, setup: &Setup) -> Result<Vec<String>> {
    let model = open(path)?;
    let reference = Checkpoint::open(reference)?;
    let dims = |t: &Tensor| -> Result<[usize; 4]> { t.shape().array().context("want four axes") };

    let ids = ints(&reference, "input.ids")?;
    let text = run(
        &mut setup.runner(model.component(Part::ClipL)?)?,
        &model.text_program(Part::ClipL, 1, 1)?,
        &[("ids", &ids)],
    )?;

    let (x, context) = (floats(&reference, "input.sample")?, floats(&reference, "input.context")?);
    let timesteps = floats(&reference, "input.timestep")?;
    let [batch, _, h, w] = dims(&x)?;
    let unet = model.diffusion_program(&evaluation(batch, [h, w]))?;
    let inputs = [("x", &x), ("timesteps", &timesteps), ("context", &context)];
    let sample = run(&mut setup.runner(model.component(Part::Diffusion)?)?, &unet, &inputs)?;

    let latent = floats(&reference, "input.latent")?;
    let [batch, _, h, w] = dims(&latent)?;
    let decoder = model.decode_program(batch, h, w, [false; 2])?;
    let image = run(&mut setup.runner(model.component(Part::Autoencoder)?)?, &decoder, &[("latent", &latent)])?;

    let mut lines = Vec::new();
    let mut far = false;
    for (name, got) in [("text", &text), ("sample", &sample), ("image", &image)] {
        let want = floats(&reference, &format!("output.{name}"))?;
        ensure!(want.dims() == got.dims(), "{name}: got {:?}, the reference has {:?}", got.dims(), want.dims());
        let distance = relative_l2(got.values(), want.values());
        let most = match setup.precision {
            Precision::F32 => TOLERANCE,
            // Factors in bf16 lose less than all values in bf16.
            _ => relative_l2(floats(&reference, &format!("output.bf16.{name}"))?.values(), want.values()),
        };
        far |= distance.is_nan() || distance > most;
        lines.push(format!("{name:6} {:?}: relative L2 distance {distance:.2e}, at most {most:.2e}", got.dims()));
    }
    if far {
        bail!("further from the reference than they may be:\n{}", lines.join("\n"));
    }
    Ok(lines)
}

fn relative_l2(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(g, w)| square(f64::from(*g) - f64::from(*w))).sum();
    let size: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
    (error / size).sqrt()
}

fn raw(file: &Checkpoint, name: &str, dtype: DType) -> Result<(Vec<usize>, Vec<[u8; 4]>)> {
    let meta = file.meta(name).with_context(|| format!("{} has no {name}", file.path().display()))?;
    ensure!(meta.dtype == dtype, "{name} is {}, want {dtype}", meta.dtype);
    let bytes = file.bytes(name)?;
    let words = bytes.as_ref().chunks_exact(4).map(|b| b.try_into().map_err(anyhow::Error::from));
    Ok((meta.shape.dims().to_vec(), words.collect::<Result<_>>()?))
}

fn floats(file: &Checkpoint, name: &str) -> Result<Tensor> {
    let (dims, words) = raw(file, name, DType::F32)?;
    Ok(Tensor::f32(&dims, words.into_iter().map(f32::from_le_bytes).collect())?)
}

fn ints(file: &Checkpoint, name: &str) -> Result<Tensor> {
    let (dims, words) = raw(file, name, DType::I32)?;
    Ok(Tensor::i32(&dims, words.into_iter().map(i32::from_le_bytes).collect())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(relative_l2(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert!((relative_l2(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert!(relative_l2(&[f32::NAN], &[1.0]).is_nan());
    }
}
