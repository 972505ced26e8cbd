//! Autoencoders: pictures to latents and back.

pub mod kl;
