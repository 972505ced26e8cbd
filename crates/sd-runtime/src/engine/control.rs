//! ControlNets of an engine.

use std::path::Path;
use std::sync::Arc;

use sd_core::exec::Runner;
use sd_core::{CancelToken, Device, Error, Program, Result, RunnerOptions, Tensor};
use sd_io::Checkpoint;
use sd_models::adapter::controlnet::ControlNet;
use sd_models::{Evaluation, Model};

use super::networks::{dims, only};

/// A ControlNet on a device.
pub(super) struct Control {
    name: String,
    net: ControlNet,
    runner: Runner,
    /// The program that ran last.
    built: Option<(Evaluation, Program)>,
}

impl Control {
    pub(super) fn open(path: &Path, model: &Model, device: Arc<Device>, options: RunnerOptions) -> Result<Control> {
        let file = Arc::new(Checkpoint::open(path)?);
        let net = ControlNet::open(&file, model).map_err(|e| e.context("control_net"))?;
        let runner = Runner::new(device, net.source(), options)?;
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Control { name, net, runner, built: None })
    }

    /// Its file's name without the extension.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn net(&self) -> &ControlNet {
        &self.net
    }

    /// The most workspace that a hint or an evaluation takes, in bytes.
    pub(super) fn workspace(&mut self, e: &Evaluation) -> Result<usize> {
        let programs = [self.net.hint_program(e.size[0], e.size[1])?, self.net.program(e)?];
        let mut most = 0;
        for program in &programs {
            let steps = self.runner.measure(program)?;
            most = steps.iter().map(|s| s.workspace).fold(most, usize::max);
        }
        Ok(most)
    }

    /// `[1, c, h, w]` of a picture `[1, 3, f h, f w]`.
    pub(super) fn hint(&mut self, picture: &Tensor, pixels: usize, cancel: &CancelToken) -> Result<Tensor> {
        let [_, _, h, w] = dims(picture)?;
        let program = self.net.hint_program(h / pixels.max(1), w / pixels.max(1))?;
        only(self.runner.run(&program, &[("hint", picture)], cancel)?)
    }

    /// Adds what the network gives, times `strength`, to `sums`, which begin empty.
    pub(super) fn add(
        &mut self,
        e: &Evaluation,
        inputs: &[(&str, &Tensor)],
        strength: f32,
        sums: &mut Vec<Tensor>,
        cancel: &CancelToken,
    ) -> Result<()> {
        if self.built.as_ref().is_none_or(|(of, _)| of != e) {
            self.built = Some((e.clone(), self.net.program(e)?));
        }
        let Some((_, program)) = &self.built else { return Err(Error::internal("no program of a ControlNet")) };
        let mut out = self.runner.run(program, inputs, cancel).map_err(|e| e.context(self.name.clone()))?;
        for t in &mut out {
            t.values_mut().iter_mut().for_each(|v| *v *= strength);
        }
        if sums.is_empty() {
            *sums = out;
            return Ok(());
        }
        for (sum, t) in sums.iter_mut().zip(&out) {
            sum.values_mut().iter_mut().zip(t.values()).for_each(|(sum, v)| *sum += v);
        }
        Ok(())
    }

    /// Where it runs.
    pub(super) fn device(&self) -> &Arc<Device> {
        self.runner.device()
    }

    /// Ends a request.
    pub(super) fn finish(&mut self) {
        self.runner.finish();
    }

    /// Frees its memory.
    pub(super) fn release(&mut self) {
        self.runner.release_weights();
        self.runner.release_workspace();
    }
}
