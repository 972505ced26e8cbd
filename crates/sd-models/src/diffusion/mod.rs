//! The networks that predict noise.

pub mod unet;
