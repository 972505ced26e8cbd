//! Model families: what a checkpoint is, and the graphs that run it. Knows no device, no flag, no request.
//!
//! ```text
//! let model = Model::open(&Files { model: Some(Arc::new(Checkpoint::open(path)?)), ..Files::default() })?;
//! model.dry_run()?;                                  // builds every graph on headers alone; what no graph reads
//! let Info { family, size_multiple, latent, prediction, noise, .. } = model.info();
//!
//! // A runner per component: Runner::new(device, component.source(), options)
//! let run = &mut |part, program, inputs| runners[part].run(program, inputs, cancel);
//! let Conditioning { context, vector } = model.condition(&Prompt { text, negative, clip_skip, size }, run)?;
//!
//! let e = Evaluation { batch, size: [h, w], tokens, ..Evaluation::default() };
//! let p = model.diffusion_program(&e)?;              // "x" [b, c, h, w], "timesteps" [b], "context" [b, tokens, k],
//!                                                    // model.tables(&e), and what `Info` says -> [b, c, h, w]
//! let p = model.decode_program(b, h, w, circular)?;  // "latent" [b, c, h, w]    -> [b, 3, f h, f w]
//! let p = model.encode_program(b, h, w, circular)?;  // "image" [b, 3, h, w]     -> [b, 2 c, h / f, w / f]
//! ```

#![forbid(unsafe_code)]

pub mod adapter;
mod bundle;
mod component;
mod conditioning;
mod detect;
pub mod diffusion;
mod family;
mod markers;
mod model;
mod names;
mod report;
mod scaled;
mod survey;
#[cfg(test)]
mod testing;
pub mod text;
mod upscale;
pub mod vae;
mod view;

pub use bundle::Bundle;
pub use component::Component;
pub use conditioning::{Conditioning, Prompt, Run};
pub use diffusion::patches::ReferencePlan;
pub use diffusion::{Evaluation, Stretch};
pub use family::{Defaults, Family, Info, Joined, Latent, Noise, Prediction, Shift, VaeFormat};
pub use model::{Files, Model};
pub use names::Part;
pub use report::{PartReport, Report, Unused};
pub use scaled::{ScaledAs, ScaledSource};
pub use survey::{FileKind, Survey, SurveyedFile, SurveyedPart};
pub use upscale::Upscaler;
pub use vae::steps::{EPS as STEP_EPS, GROUPS as STEP_GROUPS, Piece, Step, Value as StepValue};
pub use vae::tiny::TinyVae;
