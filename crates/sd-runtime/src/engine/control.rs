//! ControlNets of an engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sd_core::exec::Runner;
use sd_core::{CancelToken, Device, Error, Program, Result, RunnerOptions, Tensor};
use sd_io::Checkpoint;
use sd_models::adapter::controlnet::{ControlNet, files};
use sd_models::{Evaluation, Model};

use super::adapters::{Stamp, stamp, told};
use super::networks::{dims, only};
use crate::request::{ControlChoice, MAX_CONTROLS};

/// How many ControlNets of the folder stay open.
const KEPT: usize = MAX_CONTROLS;

/// What a control of a request means.
enum Meant {
    /// One that the engine was given.
    Given(usize),
    /// A file of the folder, with its name there.
    File(Stamp, PathBuf, String),
}

/// The places and names in `open` of the ControlNets that `choices` mean, one for each. Those of `folder` that are not open yet
/// are opened; which of the others are closed, the latest requests say.
///
/// # Errors
/// A name means none, or leads out of the folder; a file cannot be read or holds no ControlNet for the model.
pub(super) fn choose(
    open: &mut Vec<Control>,
    choices: &[ControlChoice],
    folder: Option<&Path>,
    make: impl Fn(&Path) -> Result<Control>,
) -> Result<Vec<(usize, String)>> {
    if choices.len() > MAX_CONTROLS {
        return Err(Error::request(format!("controls: want at most {MAX_CONTROLS}, got {}", choices.len())));
    }
    let meant = choices.iter().enumerate().map(|(place, choice)| meant(open, place, choice, folder));
    let meant = meant.collect::<Result<Vec<_>>>()?;
    let mut made: Vec<Control> = Vec::new();
    for meant in &meant {
        let Meant::File(stamp, path, name) = meant else { continue };
        let is_it = |c: &Control| c.of_folder.as_ref() == Some(stamp);
        if open.iter().chain(&made).any(is_it) {
            continue;
        }
        let hidden = |e| match folder {
            Some(folder) => told(e, folder, &format!("ControlNet {name}")),
            None => e,
        };
        let control = make(path).map_err(hidden)?;
        tracing::info!("ControlNet {name} ({})", path.display());
        made.push(Control { name: name.clone(), of_folder: Some(stamp.clone()), ..control });
    }
    // The latest last, behind those that were given.
    let (mut used, mut idle): (Vec<Control>, Vec<Control>) = (Vec::new(), Vec::new());
    let mut given = Vec::new();
    for control in open.drain(..) {
        let asked = |m: &Meant| matches!(m, Meant::File(stamp, ..) if control.of_folder.as_ref() == Some(stamp));
        match () {
            () if control.is_given() => given.push(control),
            () if meant.iter().any(asked) => used.push(control),
            () => idle.push(control),
        }
    }
    used.extend(made);
    let too_many = (used.len() + idle.len()).saturating_sub(KEPT);
    open.extend(given.into_iter().chain(idle.into_iter().skip(too_many)).chain(used));
    let place = |meant: &Meant| {
        let place = match meant {
            Meant::Given(place) => Some(*place),
            Meant::File(stamp, ..) => open.iter().position(|c| c.of_folder.as_ref() == Some(stamp)),
        };
        let control = place.and_then(|place| Some((place, open.get(place)?.name.clone())));
        control.ok_or_else(|| Error::internal("a ControlNet was closed"))
    };
    let chosen = meant.iter().map(place).collect::<Result<Vec<_>>>()?;
    for (at, control) in open.iter_mut().enumerate() {
        control.followed = chosen.iter().any(|(place, _)| *place == at);
    }
    Ok(chosen)
}

fn meant(open: &[Control], place: usize, choice: &ControlChoice, folder: Option<&Path>) -> Result<Meant> {
    let given: Vec<&str> = open.iter().filter(|c| c.is_given()).map(Control::name).collect();
    let (wanted, known) = match &choice.net {
        Some(name) => (name.clone(), given.iter().position(|n| n == name)),
        None => (format!("number {}", place + 1), Some(place).filter(|at| *at < given.len())),
    };
    if let Some(at) = known {
        return Ok(Meant::Given(at));
    }
    if let (Some(name), Some(folder)) = (&choice.net, folder) {
        let path = files::find(folder, name)?;
        let below = path.strip_prefix(folder).unwrap_or(&path);
        return Ok(Meant::File(stamp(&path)?, path.clone(), files::name(below)));
    }
    let all = if given.is_empty() { "there is none".into() } else { format!("want one of {}", given.join(", ")) };
    let e = Error::request(format!("controls: no ControlNet {wanted}, {all}"));
    Err(e.hint("ControlNets are loaded with --control-net, or named by files below --control-net-dir"))
}

/// A ControlNet on a device.
pub(super) struct Control {
    name: String,
    /// Which file of the folder it is; `None` for one that the engine was given.
    of_folder: Option<Stamp>,
    /// Whether the latest request that follows any follows it.
    followed: bool,
    net: ControlNet,
    runner: Runner,
    /// The program that ran last.
    built: Option<(Evaluation, Program)>,
}

impl Control {
    pub(super) fn open(path: &Path, model: &Model, device: Arc<Device>, options: RunnerOptions) -> Result<Control> {
        let file = Arc::new(Checkpoint::open(path)?);
        let net = ControlNet::open(&file, model)?;
        let runner = Runner::new(device, net.source(), options)?;
        let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Control { name, of_folder: None, followed: false, net, runner, built: None })
    }

    /// Whether the engine was given it.
    pub(super) fn is_given(&self) -> bool {
        self.of_folder.is_none()
    }

    /// Whether the latest request that follows any ControlNet follows this one.
    pub(super) fn is_followed(&self) -> bool {
        self.followed
    }

    /// Its file's name without the extension; of one of the folder with the path to it there.
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
