//! Real adapter files, and tables of names and shapes of real ones, fitted to models of real size without their weights.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use sd_core::{Bytes, DType, Error, Origin, Shape, TensorMeta, WeightSource};
use sd_io::Checkpoint;
use sd_models::adapter::Lora;

use crate::synth;

/// Tables, the model each was trained for, and layers in it.
const TABLES: &[(&str, &str, usize)] = &[
    ("flux_lora_aitoolkit_format", "flux", 228),
    ("flux_lora_diffusers_base_model_format", "flux", 381),
    ("flux_lora_diffusers_format", "flux", 494),
    ("flux_lora_kohya_format", "flux", 304),
    ("flux_lora_kohya_with_te1_format", "flux_all_in_one", 376),
    ("flux_control_lora_format", "flux_control", 466),
];

/// Every layer of every table has a place in its model, and nothing is left over.
///
/// # Errors
/// One has none.
pub(crate) fn key_tables(folder: &Path) -> Result<String> {
    let mut layers = 0;
    for (table, model, count) in TABLES {
        let path = folder.join(format!("{table}.json"));
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_str(&text)?;
        let lora = Lora::fit(Arc::new(Zeros::new(shapes)?), &self::model(model)?)?;
        complete(&lora, *count).with_context(|| (*table).to_owned())?;
        layers += count;
    }
    Ok(format!("{layers} layers of {} files have their places", TABLES.len()))
}

/// The real file, whose layers are numbered: 144 of the network, 48 of the text encoder.
///
/// # Errors
/// A layer has no place.
pub(crate) fn numbered(folder: &Path) -> Result<String> {
    let file = Checkpoint::open(folder.join("analog_svd_rank4.safetensors"))?;
    let lora = Lora::fit(Arc::new(file), &model("sd15")?)?;
    complete(&lora, 192)?;
    Ok(lora.report().to_string())
}

/// A LoRA of another family changes nothing, and all of its keys are reported.
///
/// # Errors
/// One is not.
pub(crate) fn stranger(file: Arc<Checkpoint>) -> Result<()> {
    let keys = file.names().len();
    let lora = Lora::fit(file, &model("sd15")?)?;
    let unused: usize = lora.report().unused.iter().map(|(_, count)| count).sum();
    ensure!(lora.check().is_err() && unused == keys, "{} of {keys} keys: {}", unused, lora.report());
    Ok(())
}

fn complete(lora: &Lora, layers: usize) -> Result<()> {
    let report = lora.report();
    let applied: usize = report.applied.values().sum();
    ensure!(report.unused.is_empty() && report.unfit.is_empty(), "{report}");
    ensure!(applied == layers && report.layers == layers, "want {layers} layers: {report}");
    Ok(())
}

fn model(name: &str) -> Result<Arc<dyn WeightSource>> {
    let specs = synth::tensors(name)?;
    Ok(Arc::new(Zeros::new(specs.into_iter().map(|s| (s.name, s.shape)).collect())?))
}

/// Tensors of f32 zeros.
struct Zeros(BTreeMap<String, Shape>);

impl Zeros {
    fn new(shapes: BTreeMap<String, Vec<usize>>) -> Result<Zeros> {
        Ok(Zeros(shapes.into_iter().map(|(n, d)| Ok((n, Shape::new(&d)?))).collect::<Result<_>>()?))
    }
}

impl WeightSource for Zeros {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        Some(TensorMeta { shape: *self.0.get(name)?, dtype: DType::F32 })
    }

    fn bytes(&self, name: &str) -> sd_core::Result<Bytes> {
        let shape = self.0.get(name).ok_or_else(|| Error::missing(name, "the table"))?;
        Ok(Bytes::from(vec![0; shape.elements() * 4]))
    }

    fn origin(&self, name: &str) -> Origin {
        Origin { name: name.into(), file: "the table".into() }
    }
}
