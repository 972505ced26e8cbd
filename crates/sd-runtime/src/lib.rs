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

mod convert;
mod engine;
mod guidance;
mod names;
mod observer;
mod parameters;
mod picture;
mod request;
mod rng;
mod sampler;
mod schedule;
mod txt2img;

pub use convert::{Choice, TypeRules};
pub use engine::{Engine, EngineBuilder, ModelInfo};
pub use guidance::{Prediction, Scalings, classifier_free};
pub use observer::{Observer, Progress, Stage, StepLatent};
pub use parameters::Parameters;
pub use request::{Defaults, GeneratedImage, ImageRequest, MAX_BATCH, MAX_PIXELS, MAX_SIDE, MAX_STEPS};
pub use rng::{Rng, RngKind};
pub use sampler::{Denoise, Noise, Sampler, SamplerKind};
pub use schedule::{ScheduleInput, SchedulerKind, SigmaTable, TIMESTEPS, flux_shift, shifted};
pub use sd_core::device::{DeviceKind, add_rpc_server};
pub use sd_core::{CancelToken, Cuts, DType, Device, Error, Kind as ErrorKind, Result, Tensor};
