//! The modules that users assign to devices.

use sd_core::{Error, Result};

/// Networks that are placed as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Module {
    Diffusion,
    Te,
    ClipVision,
    Vae,
    ControlNet,
    PhotoMaker,
    Upscaler,
    Detector,
}

/// Names that options take, without `-` and `_`; the first of a module is its own.
const NAMES: &[(Module, &[&str])] = &[
    (Module::Diffusion, &["diffusion", "model", "unet", "dit"]),
    (
        Module::Te,
        &["te", "clip", "text", "textencoder", "textencoders", "conditioner", "cond", "llm", "t5", "t5xxl"],
    ),
    (Module::ClipVision, &["clipvision", "vision"]),
    (Module::Vae, &["vae", "firststage", "autoencoder", "tae"]),
    (Module::ControlNet, &["controlnet", "control"]),
    (Module::PhotoMaker, &["photomaker", "photomakerid", "pmid", "photo"]),
    (Module::Upscaler, &["upscaler", "esrgan", "hires"]),
    (Module::Detector, &["detector", "adetailer", "yolo"]),
];

impl Module {
    /// The module of a user's name, in any case, with or without `-` and `_`.
    pub(super) fn parse(name: &str) -> Result<Module> {
        let plain: String = name.chars().filter(|c| !matches!(c, '-' | '_')).flat_map(char::to_lowercase).collect();
        let found = NAMES.iter().find(|(_, names)| names.contains(&plain.as_str()));
        found.map(|(module, _)| *module).ok_or_else(|| {
            let own: Vec<&str> = NAMES.iter().filter_map(|(_, names)| names.first().copied()).collect();
            Error::request(format!("there is no module {name:?}")).hint(format!("modules: {}", own.join(", ")))
        })
    }

    /// Its name in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Module::Diffusion => "diffusion",
            Module::Te => "te",
            Module::ClipVision => "clip_vision",
            Module::Vae => "vae",
            Module::ControlNet => "controlnet",
            Module::PhotoMaker => "photomaker",
            Module::Upscaler => "upscaler",
            Module::Detector => "detector",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_modules() {
        for (module, names) in NAMES {
            assert_eq!(Module::parse(module.name()).unwrap(), *module);
            for name in *names {
                assert_eq!(Module::parse(name).unwrap(), *module, "{name}");
            }
        }
        for (name, want) in [
            ("Text-Encoder", Module::Te),
            ("TEXT_ENCODERS", Module::Te),
            ("clip_vision", Module::ClipVision),
            ("First_Stage", Module::Vae),
            ("control-net", Module::ControlNet),
            ("photo_maker_id", Module::PhotoMaker),
        ] {
            assert_eq!(Module::parse(name).unwrap(), want, "{name}");
        }
        let e = Module::parse("lora").unwrap_err().to_string();
        assert!(e.contains("\"lora\"") && e.contains("diffusion, te, clipvision, vae"), "{e}");
    }
}
