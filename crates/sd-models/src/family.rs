//! Families: what each of them is made of and how it is run. A new family is a row here, a model file, a table of
//! names and an oracle script.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use sd_core::{DType, Error, Graph, Kind as ErrorKind, Program, Result, Tensor, WeightSource, convert};
use sd_io::Checkpoint;

use crate::component::Component;
use crate::detect::{Kind, detect};
use crate::diffusion::unet::{self, Heads};
use crate::names::{Part, is_ignored};
use crate::text::clip::{self, Activation};
use crate::text::prompt;
use crate::text::tokenizer::{self, ClipTokenizer};
use crate::text::windows::{self, CONTEXT, Window};
use crate::vae::kl;

/// Entries of a stored noise table.
const STEPS: usize = 1000;
/// The largest side that a file may ask for as its default.
const MAX_DEFAULT_SIDE: usize = 4096;
/// Bytes of a name that a search for similar ones looks at.
const LONGEST_NAME: usize = 256;

/// The files a model is opened from. A part that is given apart replaces the one in `model`.
#[derive(Clone, Default)]
pub struct Files {
    /// All parts, or those that are not given apart.
    pub model: Option<Arc<Checkpoint>>,
    /// The diffusion network.
    pub diffusion: Option<Arc<Checkpoint>>,
    /// The CLIP text encoder.
    pub clip_l: Option<Arc<Checkpoint>>,
    /// The autoencoder.
    pub vae: Option<Arc<Checkpoint>>,
}

/// Families that can be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Stable Diffusion 1.x.
    Sd1,
}

impl Family {
    /// What users call it.
    pub fn name(self) -> &'static str {
        match self {
            Family::Sd1 => "SD 1.x",
        }
    }
}

/// What the diffusion network predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prediction {
    /// The noise.
    Epsilon,
    /// The velocity (Salimans & Ho 2022).
    V,
}

/// The latents that the diffusion network works on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latent {
    /// Channels.
    pub channels: usize,
    /// Pixels per value in each axis.
    pub compression: usize,
    /// The network's values are `(autoencoder's - shift) * scale`.
    pub scale: f32,
    /// See `scale`.
    pub shift: f32,
}

impl Latent {
    /// The autoencoder's values as the network's, in place.
    pub fn to_network(&self, latent: &mut Tensor) {
        latent.values_mut().iter_mut().for_each(|x| *x = (*x - self.shift) * self.scale);
    }

    /// The network's values as the autoencoder's, in place.
    pub fn to_autoencoder(&self, latent: &mut Tensor) {
        latent.values_mut().iter_mut().for_each(|x| *x = *x / self.scale + self.shift);
    }
}

/// What a request is filled up with, by names that the runtime knows.
#[derive(Debug, Clone, PartialEq)]
pub struct Defaults {
    /// Width and height in pixels.
    pub size: [usize; 2],
    /// Denoising steps.
    pub steps: usize,
    /// Classifier-free guidance.
    pub cfg: f32,
    /// Sampler.
    pub sampler: &'static str,
    /// Schedule.
    pub schedule: &'static str,
    /// 1 for the last layer of the text encoder.
    pub clip_skip: usize,
}

/// Facts about an open model.
#[derive(Debug, Clone, PartialEq)]
pub struct Info {
    /// Which family it is.
    pub family: Family,
    /// What a request leaves open.
    pub defaults: Defaults,
    /// Width and height in pixels are multiples of this.
    pub size_multiple: usize,
    /// The latents.
    pub latent: Latent,
    /// What the network predicts.
    pub prediction: Prediction,
    /// Cumulative products of `1 - beta`, 1000 of them, where the file brings its own.
    pub alphas_cumprod: Option<Vec<f32>>,
    /// The most prompt tokens a window holds, without start and end.
    pub window: usize,
}

/// An open model: its parts, and the graphs that run them.
pub struct Model {
    info: Info,
    diffusion: Component,
    text: Component,
    vae: Component,
    unet: unet::Config,
    clip: clip::Config,
    kl: kl::Config,
    files: Vec<Arc<Checkpoint>>,
}

/// What a dry run found.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The parts.
    pub parts: Vec<PartReport>,
    /// Tensors that no graph reads, in groups of similar names.
    pub unused: Vec<Unused>,
}

/// The size of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartReport {
    /// Which.
    pub part: Part,
    /// Tensors.
    pub tensors: usize,
    /// Elements.
    pub parameters: u64,
    /// Bytes as stored.
    pub bytes: u64,
}

/// Tensors of a file that no graph reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused {
    /// The first two components of their names.
    pub group: String,
    /// How many.
    pub count: usize,
    /// One of them.
    pub example: String,
    /// The file.
    pub file: PathBuf,
}

impl Model {
    /// Finds out what the files hold and puts the parts together. Reads headers, and the noise table if there is one.
    ///
    /// # Errors
    /// The family is unknown or not supported, a part is missing, or parts do not fit together; the message says
    /// which file and what to give.
    pub fn open(files: &Files) -> Result<Model> {
        let main = files.diffusion.as_ref().or(files.model.as_ref()).ok_or_else(|| {
            Error::request("no model")
                .hint("give a checkpoint with -m, or its parts with --diffusion-model, --clip_l and --vae")
        })?;
        let family = recognise(main)?;

        let mut parts: BTreeMap<Part, Component> = BTreeMap::new();
        let sources = [
            (&files.model, None),
            (&files.diffusion, Some(Part::Diffusion)),
            (&files.clip_l, Some(Part::Text)),
            (&files.vae, Some(Part::Autoencoder)),
        ];
        for (file, only) in sources {
            let Some(file) = file else { continue };
            let source: Arc<dyn WeightSource> = file.clone();
            let found = Component::split(&source, only);
            if let (Some(part), []) = (only, found.as_slice()) {
                let what = format!("holds no {}", part.name());
                return Err(Error::bad_file(file.path(), what).context(part.option()));
            }
            parts.extend(found.into_iter().map(|c| (c.part(), c)));
        }
        let mut take = |part: Part| parts.remove(&part).ok_or_else(|| missing_part(main, part));
        let (diffusion, text, vae) = (take(Part::Diffusion)?, take(Part::Text)?, take(Part::Autoencoder)?);

        let unet = unet::Config::detect(diffusion.scope(), Heads::Count(8)).map_err(|e| hint(e, &diffusion))?;
        let clip = clip::Config::detect(text.scope(), Activation::QuickGelu).map_err(|e| hint(e, &text))?;
        let kl = kl::Config::detect(vae.scope()).map_err(|e| hint(e, &vae))?;
        fit(&unet, &clip, &kl)?;

        let latent = Latent { channels: kl.latent, compression: kl.compression(), scale: 0.18215, shift: 0.0 };
        let size_multiple =
            latent.compression.saturating_mul(1usize.checked_shl(unet.halvings as u32).unwrap_or(0));
        let list = [&files.model, &files.diffusion, &files.clip_l, &files.vae];
        let info = Info {
            family,
            defaults: Defaults {
                size: default_size(main, size_multiple).unwrap_or([512, 512]),
                steps: 20,
                cfg: 7.0,
                sampler: "euler_a",
                schedule: "discrete",
                clip_skip: 1,
            },
            size_multiple,
            latent,
            prediction: prediction(main),
            alphas_cumprod: alphas_cumprod(main)?,
            window: windows::WINDOW,
        };
        let files = list.into_iter().flatten().cloned().collect();
        Ok(Model { info, diffusion, text, vae, unet, clip, kl, files })
    }

    /// Facts.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The diffusion network.
    pub fn diffusion(&self) -> &Component {
        &self.diffusion
    }

    /// The text encoder.
    pub fn text(&self) -> &Component {
        &self.text
    }

    /// The autoencoder.
    pub fn vae(&self) -> &Component {
        &self.vae
    }

    /// Builds every graph without reading weights, so that a missing or misshapen tensor is found at once.
    ///
    /// # Errors
    /// One is; the message has its name in the file, and the most similar name that nothing reads.
    pub fn dry_run(&self) -> Result<Report> {
        let small = 1usize.checked_shl(self.unet.halvings as u32).unwrap_or(1);
        self.text_program(1, 1).map_err(|e| hint(e, &self.text))?;
        self.diffusion_program(1, small, small, CONTEXT).map_err(|e| hint(e, &self.diffusion))?;
        self.decode_program(1, 1, 1).map_err(|e| hint(e, &self.vae))?;
        if self.can_encode() {
            let side = self.info.latent.compression;
            self.encode_program(1, side, side).map_err(|e| hint(e, &self.vae))?;
        }
        let parts = [&self.diffusion, &self.text, &self.vae];
        Ok(Report {
            parts: parts
                .iter()
                .map(|c| PartReport {
                    part: c.part(),
                    tensors: c.tensors(),
                    parameters: c.parameters(),
                    bytes: c.bytes(),
                })
                .collect(),
            unused: self.unused(&parts),
        })
    }

    fn unused(&self, parts: &[&Component]) -> Vec<Unused> {
        let mut out: BTreeMap<(PathBuf, String), Unused> = BTreeMap::new();
        for file in &self.files {
            let source: Arc<dyn WeightSource> = file.clone();
            let mut left: BTreeSet<&str> = source.names().into_iter().filter(|n| !is_ignored(n)).collect();
            for c in parts.iter().filter(|c| std::ptr::addr_eq(Arc::as_ptr(c.file()), Arc::as_ptr(&source))) {
                let unused: BTreeSet<String> = c.scope().unused().into_iter().collect();
                for here in c.source().names().into_iter().filter(|n| !unused.contains(*n)) {
                    c.file_names(here).iter().for_each(|n| _ = left.remove(n.as_str()));
                }
            }
            for name in left {
                let group: String = name.split('.').take(2).collect::<Vec<_>>().join(".");
                let path = file.path().to_owned();
                out.entry((path.clone(), group.clone()))
                    .or_insert_with(|| Unused { group, count: 0, example: name.into(), file: path })
                    .count += 1;
            }
        }
        out.into_values().collect()
    }

    /// A prompt as windows of ids and weights; at least one.
    ///
    /// # Errors
    /// The vocabulary compiled into the program is damaged.
    pub fn tokenise(&self, text: &str) -> Result<Vec<Window>> {
        Ok(windows::windows(tokenizer::clip()?, &prompt::parse(text), ClipTokenizer::END))
    }

    /// Token states: `ids [batch, 77]` i32 to `[batch, 77, c]`.
    ///
    /// # Errors
    /// `clip_skip` skips every layer, or a weight is missing or misshapen.
    pub fn text_program(&self, batch: usize, clip_skip: usize) -> Result<Program> {
        let g = Graph::new();
        let ids = g.input("ids", &[batch, CONTEXT], DType::I32)?;
        let states = clip::build(&g, self.text.scope(), &self.clip, ids, clip_skip)?;
        g.finish(&[states])
    }

    /// What the network is conditioned on: the states `[n, 77, c]` of `n` windows, weighted and joined to
    /// `[1, 77 n, c]`.
    ///
    /// # Errors
    /// There are not as many states as windows.
    pub fn context(&self, states: &Tensor, windows: &[Window]) -> Result<Tensor> {
        let [n, t, c] =
            states.shape().array().filter(|[n, t, _]| (*n, *t) == (windows.len(), CONTEXT)).ok_or_else(|| {
                Error::internal(format!("states {} for {} windows", states.shape(), windows.len()))
            })?;
        let mut values = Vec::with_capacity(n * t * c);
        for (window, part) in windows.iter().zip(states.values().chunks(t * c)) {
            let mut part = Tensor::f32(&[t, c], part.to_vec())?;
            windows::weigh(&mut part, &window.weights)?;
            values.append(&mut part.into_values());
        }
        Tensor::f32(&[1, n * t, c], values)
    }

    /// The prediction: `x [batch, channels, h, w]`, `timesteps [batch]` and `context [batch, tokens, c]` to
    /// `[batch, channels, h, w]`, where `h` and `w` are those of the latent.
    ///
    /// # Errors
    /// The network cannot halve `h` or `w` as often as it does, or a weight is missing or misshapen.
    pub fn diffusion_program(&self, batch: usize, h: usize, w: usize, tokens: usize) -> Result<Program> {
        let g = Graph::new();
        let x = g.input("x", &[batch, self.info.latent.channels, h, w], DType::F32)?;
        let timesteps = g.input("timesteps", &[batch], DType::F32)?;
        let context = g.input("context", &[batch, tokens, self.unet.context], DType::F32)?;
        let y = unet::build(&g, self.diffusion.scope(), &self.unet, x, timesteps, context)?;
        g.finish(&[y])
    }

    /// Pictures, about -1 to 1: `latent [batch, channels, h, w]` in the autoencoder's scale to `[batch, 3, f h, f w]`.
    ///
    /// # Errors
    /// A weight is missing or misshapen.
    pub fn decode_program(&self, batch: usize, h: usize, w: usize) -> Result<Program> {
        let g = Graph::new();
        let latent = g.input("latent", &[batch, self.info.latent.channels, h, w], DType::F32)?;
        let y = kl::decode(&g, self.vae.scope(), &self.kl, latent)?;
        g.finish(&[y])
    }

    /// Whether the autoencoder can turn pictures into latents.
    pub fn can_encode(&self) -> bool {
        self.vae.scope().contains("encoder")
    }

    /// Mean and logarithm of the variance of latents in the autoencoder's scale: `image [batch, 3, h, w]`, -1 to 1, to
    /// `[batch, 2 channels, h / f, w / f]`.
    ///
    /// # Errors
    /// A side is no multiple of `f`, the autoencoder has no encoder, or a weight is missing or misshapen.
    pub fn encode_program(&self, batch: usize, h: usize, w: usize) -> Result<Program> {
        if !self.can_encode() {
            return Err(Error::request("the VAE has no encoder, so it cannot read pictures")
                .hint("give a full one with --vae"));
        }
        let g = Graph::new();
        let image = g.input("image", &[batch, 3, h, w], DType::F32)?;
        let y = kl::encode(&g, self.vae.scope(), &self.kl, image)?;
        g.finish(&[y])
    }
}

fn recognise(file: &Checkpoint) -> Result<Family> {
    let path = file.path().display();
    match detect(file) {
        Kind::Sd1 => Ok(Family::Sd1),
        Kind::Known(name) => Err(Error::unsupported(format!("{path}: recognised as {name}; not supported yet"))),
        Kind::NotAModel(name, what) => {
            Err(Error::bad_file(file.path(), format!("is {name}, not a model")).hint(what))
        }
        Kind::NoNetwork => {
            let source_parts: Vec<&str> =
                Part::ALL.into_iter().filter(|p| holds(file, *p)).map(Part::name).collect();
            let what = match source_parts.as_slice() {
                [] => "holds no tensor of a known model".to_owned(),
                parts => format!("holds no diffusion network, only: {}", parts.join(", ")),
            };
            let e = Error::bad_file(file.path(), what);
            Err(match source_parts.first() {
                Some(_) => e.hint("give the model with -m, a VAE with --vae and a text encoder with --clip_l"),
                None => e,
            })
        }
    }
}

fn holds(file: &Checkpoint, part: Part) -> bool {
    file.names().iter().any(|n| crate::names::part_of(n, None).is_some_and(|p| p.0 == part))
}

fn missing_part(file: &Checkpoint, part: Part) -> Error {
    Error::bad_file(file.path(), format!("holds no {}", part.name()))
        .hint(format!("give it with {}", part.option()))
}

/// Checks what one part hands to another.
fn fit(unet: &unet::Config, clip: &clip::Config, kl: &kl::Config) -> Result<()> {
    let ids = ClipTokenizer::END as usize + 1;
    if clip.vocabulary < ids {
        return Err(Error::shape(format!("the text encoder knows {} tokens, CLIP has {ids}", clip.vocabulary)));
    }
    if clip.positions < CONTEXT {
        return Err(Error::shape(format!("the text encoder has {} positions, want {CONTEXT}", clip.positions)));
    }
    if clip.width != unet.context {
        let what = format!(
            "the text encoder's states have {} channels, the diffusion network reads {}",
            clip.width, unet.context
        );
        return Err(Error::shape(what).hint("the files are of different families"));
    }
    if kl.latent != unet.in_channels || kl.latent != unet.out_channels {
        let what = format!(
            "the VAE's latents have {} channels, the diffusion network reads {} and predicts {}",
            kl.latent, unet.in_channels, unet.out_channels
        );
        return Err(Error::shape(what).hint("the files are of different families"));
    }
    Ok(())
}

/// `sd-rs.default_size` in the file's metadata, such as `128x128`: the size that a small model was trained at.
fn default_size(file: &Checkpoint, multiple: usize) -> Option<[usize; 2]> {
    let text = file.metadata().str("sd-rs.default_size")?;
    let side = |s: &str| {
        let n: usize = s.trim().parse().ok()?;
        (n > 0 && n <= MAX_DEFAULT_SIDE && multiple > 0 && n.is_multiple_of(multiple)).then_some(n)
    };
    let size = text.split_once('x').and_then(|(w, h)| Some([side(w)?, side(h)?]));
    if size.is_none() {
        tracing::warn!("{}: sd-rs.default_size is no size in multiples of {multiple}", file.path().display());
    }
    size
}

/// Noise, unless the file says otherwise: by an empty tensor `v_pred`, or a folder by its scheduler's configuration.
fn prediction(file: &Checkpoint) -> Prediction {
    let scheduler = file.config("scheduler").and_then(|c| c.get("prediction_type")?.as_str());
    let v = file.meta("v_pred").is_some() || scheduler == Some("v_prediction");
    if v { Prediction::V } else { Prediction::Epsilon }
}

/// The file's own noise table, if it is one.
fn alphas_cumprod(file: &Checkpoint) -> Result<Option<Vec<f32>>> {
    const NAME: &str = "alphas_cumprod";
    let Some(meta) = file.meta(NAME) else { return Ok(None) };
    if meta.shape.dims() != [STEPS] {
        tracing::warn!("{}: {NAME} is {}, so it is not used", file.path().display(), meta.shape);
        return Ok(None);
    }
    let values = convert::to_f32(meta.dtype, &file.bytes(NAME)?, STEPS).map_err(|e| e.context(NAME))?;
    if values.iter().any(|v| !(*v > 0.0 && *v <= 1.0)) {
        tracing::warn!("{}: {NAME} leaves (0, 1], so it is not used", file.path().display());
        return Ok(None);
    }
    Ok(Some(values))
}

/// Adds the most similar name that nothing reads to the error of a missing tensor.
fn hint(e: Error, c: &Component) -> Error {
    let ErrorKind::MissingTensor { name, .. } = e.kind() else { return e };
    let unused = c.scope().unused();
    let names = unused.iter().flat_map(|n| c.file_names(n)).map(String::as_str);
    let limit = 2.max(name.len() / 6);
    let near = names.map(|n| (distance(n, name), n)).filter(|(d, _)| *d <= limit).min();
    let Some(near) = near.map(|(_, n)| format!("the file has {n}, which nothing reads")) else { return e };
    e.hint(near)
}

/// How many bytes to insert, remove or change to get from `a` to `b` (Levenshtein), in their first bytes.
fn distance(a: &str, b: &str) -> usize {
    let start = |s: &str| s.bytes().take(LONGEST_NAME).collect::<Vec<u8>>();
    let (a, b) = (start(a), start(b));
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cell, y) in row.iter_mut().skip(1).zip(&b) {
            left = (diagonal + usize::from(x != y)).min(*cell + 1).min(left + 1);
            diagonal = std::mem::replace(cell, left);
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(a.len())
}

#[cfg(test)]
mod tests;
