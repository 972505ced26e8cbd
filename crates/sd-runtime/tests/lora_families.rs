//! LoRAs on whole pictures of the oracle's tiny SDXL, Flux.1 and SD 3.5 (`oracle/lora_pipeline.py`): kohya's names with
//! joined projections and diffusers' with each alone, on text encoders and network.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sd_core::convert::from_f32;
use sd_core::{DType, Shape, WeightSource};
use sd_io::{Checkpoint, TensorSpec, write_safetensors};
use sd_models::adapter::Lora;
use sd_runtime::{Engine, ImageRequest, LoraChoice, LoraMode, Precision, SamplerKind};
use support::layouts::single_file;
use support::{Fixture, agrees, oracle_request, procedural};

/// A tensor, its shape, and the exponent of the oracle's rule; without axes an alpha.
type Row = (String, Vec<usize>, f32);

/// Writes the files of a family's fixture into a folder.
fn write(family: &str, files: &BTreeMap<String, Vec<Row>>) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("lora-{family}"));
    fs::create_dir_all(&folder).unwrap();
    for (file, rows) in files {
        let spec = |(name, shape, _): &Row| TensorSpec {
            name: name.clone(),
            dtype: DType::F32,
            shape: Shape::new(shape).unwrap(),
        };
        let specs: Vec<TensorSpec> = rows.iter().map(spec).collect();
        write_safetensors(folder.join(format!("{file}.safetensors")), &[], &specs, |spec| {
            let (name, shape, value) = rows.iter().find(|r| r.0 == spec.name).unwrap();
            let values = match &shape[..] {
                [] => vec![*value],
                _ => procedural(&format!("{family}.{file}.{name}"), spec.shape.elements(), *value as i32, 0.0),
            };
            from_f32(DType::F32, &values, values.len())
        })
        .unwrap();
    }
    folder
}

/// Every run of the family's fixture, in both modes on one engine each, gives the reference's picture.
fn check(family: &str, model: &str) {
    let pipeline = format!("{family}_lora_pipeline");
    let config = Fixture::open(&format!("{pipeline}.safetensors")).metadata("config");
    let files: BTreeMap<String, Vec<Row>> = serde_json::from_value(config["files"].clone()).unwrap();
    let runs: BTreeMap<String, Vec<(String, f32)>> = serde_json::from_value(config["runs"].clone()).unwrap();
    assert_eq!((files.len(), runs.len()), (2, 3));
    let folder = write(family, &files);
    let path = single_file(model, &format!("lora-{family}"), &[]);
    let open = |path: &Path| Arc::new(Checkpoint::open(path).unwrap());
    for (file, rows) in &files {
        let model: Arc<dyn WeightSource> = open(&path);
        let lora = Lora::fit(open(&folder.join(format!("{file}.safetensors"))), &model).unwrap();
        let report = lora.report();
        let layers = rows.iter().filter(|r| r.0.ends_with(".weight")).count() / 2;
        assert!(report.unused.is_empty() && report.unfit.is_empty(), "{report}");
        assert_eq!((report.applied.values().sum::<usize>(), report.layers), (layers, layers), "{report}");
    }
    for mode in [LoraMode::Immediately, LoraMode::AtRuntime] {
        let builder = Engine::builder().model(&path).device("cpu").threads(1).lora_folder(&folder).lora_mode(mode);
        let mut engine = builder.weight_type(DType::F32).precision(Precision::F32).build().unwrap();
        for (key, loras) in &runs {
            let choice = |(name, strength): &(String, f32)| LoraChoice {
                name: name.clone(),
                strength: *strength,
                ..LoraChoice::default()
            };
            let request = ImageRequest {
                loras: loras.iter().map(choice).collect(),
                sampler: Some(SamplerKind::Euler),
                guidance: config["guidance"].as_f64().map(|g| g as f32),
                ..oracle_request(&format!("{pipeline}.safetensors"))
            };
            agrees(&mut engine, &pipeline, key, &request);
        }
    }
}

#[test]
fn sdxl_with_both_text_encoders() {
    check("sdxl", "sdxl_pipeline");
}

#[test]
fn flux_with_joined_and_single_projections() {
    check("flux", "flux_dev_pipeline");
}

#[test]
fn sd3_with_joined_and_single_projections() {
    check("sd3", "sd3_medium_pipeline");
}
