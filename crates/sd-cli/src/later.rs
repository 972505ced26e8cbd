//! Options of stable-diffusion.cpp's command line that this program does not have yet. They are recognised, so that
//! a script written for it ends with a message that says so rather than with "unexpected argument".

use crate::args::hidden;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

/// Options that take no value.
const FLAGS: &[&str] = &["temporal-tiling"];

/// Options that take one value.
const VALUES: &[&str] = &[
    "high-noise-diffusion-model",
    "uncond-diffusion-model",
    "clip_vision",
    "llm",
    "llm_vision",
    "qwen2vl",
    "qwen2vl_vision",
    "embeddings-connectors",
    "audio-vae",
    "ip-adapter",
    "motion-module",
    "photo-maker",
    "pulid-weights",
    "model-args",
    "high-noise-steps",
    "high-noise-cfg-scale",
    "high-noise-img-cfg-scale",
    "high-noise-guidance",
    "high-noise-slg-scale",
    "high-noise-skip-layers",
    "high-noise-skip-layer-start",
    "high-noise-skip-layer-end",
    "high-noise-eta",
    "high-noise-sampling-method",
    "moe-boundary",
    "end-img",
    "control-video",
    "ref-video",
    "ref-video-audio",
    "ref-audio",
    "ip-adapter-image",
    "ip-adapter-strength",
    "pm-id-images-dir",
    "pm-id-embed-path",
    "pm-style-strength",
    "pulid-id-embedding",
    "pulid-id-weight",
    "video-frames",
    "fps",
    "vace-strength",
    "qwen-image-layers",
    "extra-tiling-args",
    "ad-model",
    "ad-prompt",
    "ad-negative-prompt",
    "extra-ad-args",
];

/// `command` with the options of this table, hidden from the help.
pub(crate) fn add(command: Command) -> Command {
    let flags = FLAGS.iter().map(|name| hidden(name, false));
    let values = VALUES.iter().map(|name| hidden(name, true));
    command.args(flags).args(values)
}

/// An error that names the first option of this table among those given.
pub(crate) fn check(command: &mut Command, matches: &ArgMatches) -> Result<(), clap::Error> {
    let given = |name: &&&str| matches.value_source(name) == Some(ValueSource::CommandLine);
    match FLAGS.iter().chain(VALUES).find(given) {
        Some(name) => Err(command.error(ErrorKind::UnknownArgument, format!("--{name} is not supported yet"))),
        None => Ok(()),
    }
}
