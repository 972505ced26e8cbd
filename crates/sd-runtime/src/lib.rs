//! The engine: requests, noise, schedules, samplers, guidance and the path from a prompt to a picture.
//! Knows no argv and no HTTP. `ARCHITECTURE.md` says how the parts fit.
//!
//! ```no_run
//! use sd_runtime::{CancelToken, Engine, ImageRequest};
//!
//! let mut engine = Engine::builder().model("model.safetensors").build()?;
//! let request = ImageRequest { prompt: "a lighthouse at dusk".into(), ..ImageRequest::default() };
//! for image in engine.generate(&request, &mut (), &CancelToken::new())? {
//!     let (pixels, text): (Vec<u8>, String) = (image.rgb, image.parameters.to_text());
//! }
//! # Ok::<(), sd_runtime::Error>(())
//! ```
#![forbid(unsafe_code)]

mod cache;
mod canny;
mod convert;
mod engine;
mod files;
mod generate;
mod guidance;
mod hires;
mod input;
mod names;
mod observer;
mod parameters;
mod picture;
mod placement;
mod preview;
mod request;
mod resample;
mod resize;
mod resolve;
mod rng;
mod sampler;
mod schedule;
#[cfg(test)]
mod testing;
mod tiling;
mod upscale;

pub use cache::{CacheMode, StepCache};
pub use convert::{Choice, Conversion, Converted, TypeRules};
pub use engine::{Engine, EngineBuilder, LoraMode, ModelInfo, PartOutline};
pub use files::ModelFiles;
pub use guidance::{Apg, Guidance, GuidanceSchedule, Interval, Prediction, Predictions, Scales, Scalings};
pub use hires::{Hires, HiresUpscaler};
pub use input::{InputImage, InputMask};
pub use names::nearest;
pub use observer::{Observer, PreviewPicture, Progress, Stage, StepLatent};
pub use parameters::{Parameters, Refiner, Upscaled, UsedControlNet};
pub use placement::Shorthands;
pub use preview::{Preview, PreviewMode};
pub use request::{
    ControlChoice, Defaults, GeneratedImage, ImageRequest, LoraChoice, MAX_BATCH, MAX_CONTROLS, MAX_PIXELS,
    MAX_PROMPT, MAX_REFERENCES, MAX_SIDE, MAX_STEPS, ReferenceIndex, SkipLayers, VaeTiling,
};
pub use rng::{Rng, RngKind};
pub use sampler::{Denoise, Estimate, Noise, SampleOptions, Sampler, SamplerKind, SamplerSetup};
pub use schedule::{Ays, ScheduleInput, SchedulerKind, SigmaTable, TIMESTEPS, shifted};
pub use sd_core::device::{DeviceKind, add_rpc_server, serve_rpc};
pub use sd_core::residency::{DeviceMemory, MemoryReport, ModuleMemory};
pub use sd_core::{CancelToken, Cuts, DType, Device, Error, Kind as ErrorKind, Precision, Result, Tensor, Trace};
pub use sd_io::Importance;
pub use sd_models::adapter::controlnet::files::{find as find_control_net, list as list_control_nets};
pub use sd_models::adapter::tags::{find as find_lora, list as list_loras, name_of as name_of_lora};
pub use sd_models::{FileKind, Part, Survey, SurveyedFile, SurveyedPart, VaeFormat};
pub use upscale::{MAX_UPSCALE_REPEATS, UPSCALE_TILE, UpscaleOptions, Upscaler};
