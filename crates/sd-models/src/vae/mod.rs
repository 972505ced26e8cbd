//! Autoencoders: pictures to latents and back.

pub mod kl;
pub mod steps;
pub mod tiny;
