//! A published tiny autoencoder on a part of a photo, against what the reference makes of it (`oracle/tiny_vae.py`).

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use sd_core::exec::Runner;
use sd_core::{CancelToken, DType, Device, Program, RunnerOptions, Tensor, WeightSource};
use sd_io::Checkpoint;
use sd_models::TinyVae;

/// Between values of about 1: weights are f16, and so are factors where the processor has it.
const BOUND: f32 = 2e-2;

/// Compares encoder and decoder in the folder `weights` with the reference.
pub(crate) fn photo(weights: &Path) -> Result<String> {
    let encoded =
        check(weights, "encoder", ["image", "latent"], |tiny| Ok(tiny.encode_program(64, 64, [false; 2])?))?;
    let decoded =
        check(weights, "decoder", ["latent", "image"], |tiny| Ok(tiny.decode_program(8, 8, [false; 2])?))?;
    Ok(format!("the latent is {encoded:.1e} from the reference on average, the picture {decoded:.1e}"))
}

fn check(
    weights: &Path,
    side: &str,
    [input, output]: [&str; 2],
    program: impl Fn(&TinyVae) -> Result<Program>,
) -> Result<f32> {
    let fixtures = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../oracle/fixtures"));
    let fixture = Checkpoint::open(fixtures.join(format!("taef2_photo_{side}.safetensors")))?;
    let tiny = TinyVae::open(&Arc::new(Checkpoint::open(weights.join(format!("taef2_{side}.pth")))?))?;
    let mut runner = Runner::new(Device::find("cpu")?, tiny.source(), RunnerOptions::default())?;
    let given = tensor(&fixture, &format!("input.{input}"))?;
    let got = runner.run(&program(&tiny)?, &[(input, &given)], &CancelToken::new())?;
    let [got] = got.as_slice() else { anyhow::bail!("{} results", got.len()) };
    let want = tensor(&fixture, &format!("output.{output}"))?;
    ensure!(got.shape() == want.shape(), "{output} is {}, want {}", got.shape(), want.shape());
    let (got, want) = (got.values(), want.values());
    let off = got.iter().zip(want).map(|(a, b)| (a - b).abs()).sum::<f32>() / want.len() as f32;
    ensure!(off < BOUND, "{output} is {off} from the reference on average");
    Ok(off)
}

fn tensor(file: &Checkpoint, name: &str) -> Result<Tensor> {
    let meta = file.meta(name).with_context(|| format!("no {name}"))?;
    ensure!(meta.dtype == DType::F32, "{name} is {}", meta.dtype);
    let bytes = file.bytes(name)?;
    let values = bytes.as_ref().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    Ok(Tensor::f32(meta.shape.dims(), values)?)
}
