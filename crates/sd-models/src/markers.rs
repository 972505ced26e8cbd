//! What a file says of its model beside the weights: marker tensors, metadata, and a folder's configurations.

use sd_core::{Error, Result, WeightSource, convert};
use sd_io::Checkpoint;

use crate::family::{Noise, Prediction};

/// Entries of a stored noise table.
const STEPS: usize = 1000;
/// The largest side that a file may ask for as its default.
const MAX_DEFAULT_SIDE: usize = 4096;
/// The noise levels of CosXL, whose markers hold them.
const EDM: [(&str, f64); 2] = [("edm_vpred.sigma_min", 0.002), ("edm_vpred.sigma_max", 120.0)];

/// Width and height that the model was trained at: `sd-rs.default_size` in the file's metadata, such as `128x128`, or
/// the latent's size in a folder's configuration.
pub(crate) fn size(file: &Checkpoint, compression: usize, multiple: usize) -> Option<[usize; 2]> {
    let fits =
        |n: usize| (n > 0 && n <= MAX_DEFAULT_SIDE && multiple > 0 && n.is_multiple_of(multiple)).then_some(n);
    let Some(text) = file.metadata().str("sd-rs.default_size") else {
        let network = file.config("unet").or_else(|| file.config("transformer"))?;
        let side = network.get("sample_size")?.as_u64()?;
        return fits(usize::try_from(side).ok()?.checked_mul(compression)?).map(|n| [n, n]);
    };
    let side = |s: &str| s.trim().parse().ok().and_then(fits);
    let size = text.split_once('x').and_then(|(w, h)| Some([side(w)?, side(h)?]));
    if size.is_none() {
        tracing::warn!("{}: sd-rs.default_size is no size in multiples of {multiple}", file.path().display());
    }
    size
}

/// What the network predicts, if the file says so: by an empty tensor `v_pred` or CosXL's, or a folder by its
/// scheduler's configuration.
pub(crate) fn prediction(file: &Checkpoint) -> Option<Prediction> {
    let tensors = ["v_pred", "edm_vpred.sigma_max"];
    if tensors.iter().any(|name| file.meta(name).is_some()) {
        return Some(Prediction::V);
    }
    match file.config("scheduler")?.get("prediction_type")?.as_str()? {
        "v_prediction" => Some(Prediction::V),
        "epsilon" => Some(Prediction::Epsilon),
        _ => None,
    }
}

/// The noise levels: the file's own table, CosXL's levels, a table with zero terminal SNR where an empty tensor
/// `ztsnr` or a folder's scheduler asks for it, or else Stable Diffusion's.
pub(crate) fn noise(file: &Checkpoint) -> Result<Noise> {
    if file.meta("edm_vpred.sigma_max").is_some() {
        let level = |(name, usual): (&str, f64)| {
            let level = scalar(file, name)?.filter(|v| v.is_finite() && *v > 0.0);
            Ok::<f64, Error>(level.unwrap_or(usual))
        };
        let [min, max] = [level(EDM[0])?, level(EDM[1])?];
        let [min, max] = if min < max { [min, max] } else { EDM.map(|e| e.1) };
        return Ok(Noise::Continuous { min, max });
    }
    if let Some(table) = alphas_cumprod(file)? {
        return Ok(Noise::AlphasCumprod(table));
    }
    let rescaled = || file.config("scheduler")?.get("rescale_betas_zero_snr")?.as_bool();
    Ok(if file.meta("ztsnr").is_some() || rescaled() == Some(true) {
        Noise::ZeroTerminalSnr
    } else {
        Noise::ScaledLinear
    })
}

fn scalar(file: &Checkpoint, name: &str) -> Result<Option<f64>> {
    let Some(meta) = file.meta(name).filter(|m| m.shape.elements() == 1 && m.dtype.is_float()) else {
        return Ok(None);
    };
    let values =
        convert::to_f32(meta.dtype, &file.bytes(name)?.read()?, 1).map_err(|e| e.context(name.to_owned()))?;
    Ok(values.first().map(|v| f64::from(*v)))
}

/// The file's own noise table, if it brings one.
fn alphas_cumprod(file: &Checkpoint) -> Result<Option<Vec<f32>>> {
    const NAME: &str = "alphas_cumprod";
    let Some(meta) = file.meta(NAME) else { return Ok(None) };
    if meta.shape.dims() != [STEPS] {
        let what = format!("{NAME} is {}, want [{STEPS}]", meta.shape);
        return Err(Error::bad_file(file.path(), what));
    }
    let values = convert::to_f32(meta.dtype, &file.bytes(NAME)?.read()?, STEPS).map_err(|e| e.context(NAME))?;
    match values.iter().enumerate().find(|(_, v)| !(**v > 0.0 && **v <= 1.0)) {
        Some((i, v)) => {
            let what = format!("{NAME}: value {i} is {v}, want it above 0 and at most 1");
            Err(Error::bad_file(file.path(), what))
        }
        None => Ok(Some(values)),
    }
}
