//! The networks that predict noise.

pub mod flux;
mod rope;
pub mod unet;
