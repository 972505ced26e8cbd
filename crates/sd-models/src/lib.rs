//! Model families: what a checkpoint is, and the graphs that run it. Knows no device, no flag, no request.
//!
//! ```text
//! let model = Model::open(&Files { model: Some(Arc::new(Checkpoint::open(path)?)), ..Files::default() })?;
//! model.dry_run()?;                                  // builds every graph on headers alone; what no graph reads
//! let Info { family, size, latent, prediction, alphas_cumprod, .. } = model.info();
//!
//! let windows: Vec<Window> = model.tokenise(prompt)?;             // ids and weights, 77 each
//! let p = model.text_program(windows.len(), clip_skip)?;          // "ids" [b, 77] i32        -> [b, 77, c]
//! let context = model.context(states, &windows)?;                 // weighted, joined         -> [1, 77 n, c]
//! let p = model.diffusion_program(b, h, w, tokens)?;              // "x" [b, 4, h, w], "timesteps" [b],
//!                                                                 // "context" [b, tokens, c] -> [b, 4, h, w]
//! let p = model.decode_program(b, h, w)?;                         // "latent" [b, 4, h, w]    -> [b, 3, 8h, 8w]
//! let p = model.encode_program(b, h, w)?;                         // "image" [b, 3, h, w]     -> [b, 8, h/8, w/8]
//!
//! Runner::new(device, model.diffusion().source(), options)?       // one runner per component
//! ```

#![forbid(unsafe_code)]

mod component;
mod detect;
pub mod diffusion;
mod family;
mod names;
#[cfg(test)]
mod testing;
pub mod text;
pub mod vae;
mod view;

pub use component::Component;
pub use family::{Defaults, Family, Files, Info, Latent, Model, PartReport, Prediction, Report, Unused};
pub use names::Part;
pub use text::windows::Window;
