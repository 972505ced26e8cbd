//! A tiny autoencoder on a device, in place of the model's or for previews alone.

use std::path::Path;
use std::sync::Arc;

use sd_core::exec::Runner;
use sd_core::{CancelToken, Device, Error, Result, RunnerOptions, Tensor};
use sd_io::Checkpoint;
use sd_models::TinyVae;

use super::networks::{dims, only};

/// A tiny autoencoder.
pub(super) struct Tiny {
    vae: TinyVae,
    runner: Runner,
    preview_only: bool,
}

impl Tiny {
    /// Opens the file of one for latents of `channels` channels, of which a value stands for `pixels` pixels along each
    /// axis.
    pub(super) fn open(
        path: &Path,
        device: Arc<Device>,
        options: RunnerOptions,
        [channels, pixels]: [usize; 2],
        preview_only: bool,
    ) -> Result<Tiny> {
        let vae = TinyVae::open(&Arc::new(Checkpoint::open(path)?))?;
        if [vae.channels(), vae.compression()] != [channels, pixels] {
            let (own, by) = (vae.channels(), vae.compression());
            let what = format!(
                "latents of {own} channels, {by} times smaller; the model's have {channels}, {pixels} times"
            );
            return Err(Error::bad_file(path, what).hint("it belongs to another family"));
        }
        let runner = Runner::new(device, vae.source(), options)?;
        Ok(Tiny { vae, runner, preview_only })
    }

    /// Ends a request.
    pub(super) fn finish(&mut self) {
        self.runner.finish();
    }

    /// Whether it decodes finished latents.
    pub(super) fn decodes(&self) -> bool {
        !self.preview_only && self.vae.can_decode()
    }

    /// Whether it encodes pictures.
    pub(super) fn encodes(&self) -> bool {
        !self.preview_only && self.vae.can_encode()
    }

    /// Whether it can show latents.
    pub(super) fn shows(&self) -> bool {
        self.vae.can_decode()
    }

    /// The picture of a latent in the network's scale.
    pub(super) fn decode(&mut self, latent: &Tensor, circular: [bool; 2], cancel: &CancelToken) -> Result<Tensor> {
        let [_, _, h, w] = dims(latent)?;
        let program = self.vae.decode_program(h, w, circular)?;
        only(self.runner.run(&program, &[("latent", latent)], cancel)?)
    }

    /// The latent of a picture, in the network's scale.
    pub(super) fn encode(&mut self, picture: &Tensor, circular: [bool; 2], cancel: &CancelToken) -> Result<Tensor> {
        let [_, _, h, w] = dims(picture)?;
        let program = self.vae.encode_program(h, w, circular)?;
        only(self.runner.run(&program, &[("image", picture)], cancel)?)
    }

    /// Frees weights and workspace.
    pub(super) fn release(&mut self) {
        self.runner.release_weights();
        self.runner.release_workspace();
    }
}
