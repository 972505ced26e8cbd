//! Tables of names and shapes of real files, most of them of families that cannot be run: what each is recognised as, and
//! that no name of it is lost without a word.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use sd_core::WeightSource;
use sd_io::Checkpoint;
use sd_models::{FileKind, Files, Survey};

use crate::lora;
use crate::synth::{Fill, Spec, write_sparse};

/// What a file is, by the start of its name.
const KINDS: &[(&str, &str)] = &[
    ("anima_comfyui_keys", "Anima"),
    ("anima_lora_", "a LoRA"),
    ("flux2_transformer_bfl_keys", "FLUX.2 klein"),
    ("flux2_vae_bfl_keys", "a VAE of FLUX.2"),
    ("flux_control_lora_format", "a LoRA"),
    ("flux_lora_", "a LoRA"),
    ("qwen_image_lora_diffusers_format", "a LoRA"),
    ("qwen_vl_encoder_comfyui_keys", "a Qwen2.5-VL text encoder"),
    ("xlabs_flux_controlnet_state_dict", "a ControlNet"),
    ("xlabs_flux_ip_adapter_state_dict", "an IP-Adapter"),
    ("z_image_transformer_comfyui_keys", "Z-Image"),
];
/// A configuration and not a table of tensors, as users save it too.
const NO_TABLE: &str = "instantx_flux_controlnet_state_dict";
/// LoRAs of families that cannot be run.
const STRANGERS: &[&str] = &["anima_lora_", "qwen_image_lora_"];

/// Every table is recognised, and every name in it belongs to a part or is reported.
///
/// # Errors
/// One is not.
pub(crate) fn recognised(folder: &Path) -> Result<String> {
    let (mut tables, mut names) = (0, 0);
    for entry in std::fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if stem == NO_TABLE {
            let e = Checkpoint::open(&path).err().context("a configuration was taken for a checkpoint")?;
            ensure!(e.to_string().contains(&stem), "the error does not name the file: {e}");
            continue;
        }
        let known = KINDS.iter().find(|(start, _)| stem.starts_with(start));
        let (_, want) = known.with_context(|| format!("{stem}: an unknown table"))?;
        names += table(&path, &stem, want).with_context(|| stem.clone())?;
        tables += 1;
    }
    Ok(format!("{tables} tables recognised, {names} names in parts or reported"))
}

/// Looks at a file of holes with the names and shapes of a table.
fn table(path: &Path, stem: &str, want: &str) -> Result<usize> {
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let spec = |(name, shape): (&String, &Vec<usize>)| Spec {
        name: name.clone(),
        shape: shape.clone(),
        fill: Fill::Around(0.0),
    };
    let specs: Vec<Spec> = shapes.iter().map(spec).collect();
    let file = std::env::temp_dir().join(format!("sd-keytable-{}-{stem}.safetensors", std::process::id()));
    write_sparse(&file, &specs, 1)?;
    let checked = look(&file, stem, want);
    std::fs::remove_file(&file)?;
    checked?;
    Ok(shapes.len())
}

fn look(path: &PathBuf, stem: &str, want: &str) -> Result<()> {
    let file = Arc::new(Checkpoint::open(path)?);
    let survey = Survey::new(&Files { model: Some(file.clone()), ..Files::default() });
    let found = survey.files.first().context("no file")?;
    match found.kind {
        FileKind::Unsupported(name) | FileKind::Other(name, _) if name == want => {}
        _ => bail!("is {}, want {want}", found.what()),
    }
    ensure!(!found.evidence.is_empty(), "nothing shows what it is");
    if want == "a LoRA" {
        let strange = STRANGERS.iter().any(|start| stem.starts_with(start));
        return if strange { lora::stranger(file) } else { Ok(()) };
    }
    let parts: usize = survey.parts.iter().map(|p| p.tensors).sum();
    let unused: usize = survey.unused.iter().map(|u| u.count).sum();
    ensure!(parts + unused >= file.names().len(), "{parts} in parts, {unused} reported of {}", file.names().len());
    Ok(())
}
