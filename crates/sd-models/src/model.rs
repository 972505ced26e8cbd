//! A model in its files: which parts there are, and the graphs that run them.

use std::collections::BTreeMap;
use std::sync::Arc;

use sd_core::graph::Op;
use sd_core::scope::Weight;
use sd_core::{DType, Error, Graph, Program, Result, Tensor, WeightSource};
use sd_io::Checkpoint;

use crate::adapter::embedding::Embeddings;
use crate::component::Component;
use crate::conditioning::{self, Conditioning, Prompt, Run, Sizes, TextEncoder, TextRecipe};
use crate::detect::{Kind, detect, variant};
use crate::diffusion::{Evaluation, Facts, Given, Network, Stretch};
use crate::family::{Family, Info, Latent, Noise, Prediction, VaeFormat};
use crate::markers;
use crate::names::{Part, part_of};
use crate::report::{Report, explain};
use crate::scaled;
use crate::vae::kl;
use crate::vae::steps::{self, Piece, Step};

/// The files a model is opened from. A part that is given apart replaces the one in `model`.
#[derive(Clone, Default)]
pub struct Files {
    /// All parts, or those that are not given apart.
    pub model: Option<Arc<Checkpoint>>,
    /// Parts in files of their own.
    pub parts: BTreeMap<Part, Arc<Checkpoint>>,
    /// The latents of the VAE, if they are not those of the family.
    pub vae_format: Option<VaeFormat>,
    /// Tensors of a part that take the place of those in the files, under the names and with the shapes that the networks
    /// use.
    pub prepared: BTreeMap<Part, Arc<dyn WeightSource>>,
}

/// An open model: its parts, and the graphs that run them.
pub struct Model {
    info: Info,
    /// Whether the size in `info` is one that the file names.
    own_size: bool,
    parts: BTreeMap<Part, Component>,
    network: Box<dyn Network>,
    encoders: Vec<Box<dyn TextEncoder>>,
    kl: kl::Config,
    files: Vec<Arc<Checkpoint>>,
}

impl Model {
    /// Finds out what the files hold and puts the parts together. Reads headers, and the noise table if there is one.
    ///
    /// # Errors
    /// The family is unknown or not supported, a part is missing, or parts do not fit together; the message says
    /// which file and what to give.
    pub fn open(files: &Files) -> Result<Model> {
        let main = files.parts.get(&Part::Diffusion).or(files.model.as_ref()).ok_or_else(|| {
            Error::request("no model").hint(
                "give a checkpoint with -m, or its parts with --diffusion-model, --clip_l, --clip_g, --t5xxl and --vae",
            )
        })?;
        let family = recognise(main)?;
        let recipe = family.recipe();
        let parts = parts(files)?;
        let missing: Vec<Part> = family.needed().into_iter().filter(|p| !parts.contains_key(p)).collect();
        if !missing.is_empty() {
            return Err(missing_parts(main, family, &missing));
        }
        let part = |part: Part| parts.get(&part).ok_or_else(|| missing_parts(main, family, &[part]));

        let diffusion = part(Part::Diffusion)?;
        let network = (recipe.network)(diffusion.scope()).map_err(|e| explain(e, diffusion))?;
        if let [first, ..] = recipe.encoders
            && !recipe.encoders.iter().any(|r| parts.contains_key(&r.part()))
        {
            return Err(missing_parts(main, family, &[first.part()]));
        }
        let encoder = |recipe: &'static TextRecipe| {
            let component = part(recipe.part());
            match (component, recipe.absent()) {
                (Ok(component), _) => recipe.detect(component).map_err(|e| explain(e, component)),
                (Err(_), Some(zeros)) => Ok(zeros),
                (Err(e), None) => Err(e),
            }
        };
        let encoders = recipe.encoders.iter().map(encoder).collect::<Result<Vec<_>>>()?;
        let vae = part(Part::Autoencoder)?;
        let kl = kl::Config::detect(vae.scope()).map_err(|e| explain(e, vae))?;
        let facts = network.facts();
        let given = conditioning::sizes(&encoders, recipe.vector);
        fit(&facts, &given, &kl).map_err(|e| e.context(main.path().display().to_string()))?;

        let format = files.vae_format.filter(|format| {
            let fits = format.channels() == kl.latent;
            if !fits {
                let (name, channels) = (family.name(), kl.latent);
                tracing::warn!("--vae-format: the latents of this {name} model have {channels} channels, those of that format {}; it has no effect", format.channels());
            }
            fits
        });
        let [scale, shift] = format.map_or(recipe.latent, VaeFormat::latent);
        let latent = Latent { channels: kl.latent, compression: kl.compression(), scale, shift };
        let size_multiple = latent.compression.saturating_mul(facts.multiple);
        let noise = match recipe.flow {
            Some((shift, time_scale)) => Noise::Flow { shift, time_scale },
            None => markers::noise(main)?,
        };
        let mut defaults = recipe.defaults.clone();
        if let Noise::Continuous { .. } = noise {
            defaults.schedule = "exponential";
        }
        let own_size = markers::size(main, latent.compression, size_multiple);
        defaults.size = own_size.unwrap_or(defaults.size);
        let info = Info {
            family,
            defaults,
            size_multiple,
            latent,
            prediction: None,
            noise,
            tokens: given.tokens,
            guidance: facts.guidance,
            joined: facts.joined,
            references: facts.references,
            blocks: facts.blocks,
            control: facts.control.is_some(),
        };
        let used =
            |p: &Part| [Part::Diffusion, Part::Autoencoder].contains(p) || encoders.iter().any(|e| e.part() == *p);
        let parts = parts.into_iter().filter(|(p, _)| used(p)).collect();
        let files = files.model.iter().chain(files.parts.values()).cloned().collect();
        let mut model = Model { info, own_size: own_size.is_some(), parts, network, encoders, kl, files };
        let marked = if recipe.flow.is_some() { None } else { markers::prediction(main) };
        if let Some(prediction) = marked.or(recipe.prediction) {
            model.set_prediction(prediction);
        }
        Ok(model)
    }

    /// Facts.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The parts, each once.
    pub fn components(&self) -> impl Iterator<Item = &Component> {
        self.parts.values()
    }

    /// A part.
    ///
    /// # Errors
    /// The family has no such part.
    pub fn component(&self, part: Part) -> Result<&Component> {
        let name = self.info.family.name();
        self.parts.get(&part).ok_or_else(|| Error::request(format!("{name} has no {}", part.name())))
    }

    fn vae(&self) -> Result<&Component> {
        self.component(Part::Autoencoder)
    }

    /// Builds every graph without reading weights, so that a missing or misshapen tensor is found at once.
    ///
    /// # Errors
    /// One is; the message has its name in the file, and the most similar name that nothing reads.
    pub fn dry_run(&self) -> Result<Report> {
        let check = |part: Part, program: Result<Program>| -> Result<()> {
            let component = self.component(part)?;
            program.map(|_| ()).map_err(|e| explain(e, component))
        };
        for e in &self.encoders {
            let looked = e.dry_run(self.info.defaults.clip_skip);
            looked.map_err(|error| self.component(e.part()).map_or_else(|e| e, |c| explain(error, c)))?;
        }
        check(Part::Diffusion, self.diffusion_program(&self.smallest()))?;
        check(Part::Autoencoder, self.decode_program(1, 1, 1, [false; 2]))?;
        if self.can_encode() {
            let side = self.info.latent.compression;
            check(Part::Autoencoder, self.encode_program(1, side, side, [false; 2]))?;
        }
        Ok(Report::new(&self.components().collect::<Vec<_>>(), &self.files))
    }

    /// The weights that the graphs of a part read.
    ///
    /// # Errors
    /// The family has no such part, or a weight is missing or misshapen.
    pub fn weights(&self, part: Part) -> Result<Vec<Weight>> {
        let programs = match part {
            Part::Diffusion => vec![self.diffusion_program(&self.smallest())?],
            Part::Autoencoder if self.can_encode() => {
                let side = self.info.latent.compression;
                vec![self.decode_program(1, 1, 1, [false; 2])?, self.encode_program(1, side, side, [false; 2])?]
            }
            Part::Autoencoder => vec![self.decode_program(1, 1, 1, [false; 2])?],
            part => vec![self.text_program(part, 1, 1)?],
        };
        let mut weights: BTreeMap<String, Weight> = BTreeMap::new();
        for node in programs.iter().flat_map(Program::nodes) {
            if let Op::Weight(w) = &node.op {
                weights.insert(w.name().to_owned(), w.clone());
            }
        }
        Ok(weights.into_values().collect())
    }

    /// What the network is.
    pub(crate) fn network(&self) -> Facts {
        self.network.facts()
    }

    /// The evaluation that asks least of the network.
    pub(crate) fn smallest(&self) -> Evaluation {
        let side = self.network.facts().multiple;
        Evaluation { batch: 1, size: [side; 2], tokens: self.info.tokens, ..Evaluation::default() }
    }

    /// What a prompt conditions the network on. `run` runs the text encoders.
    ///
    /// # Errors
    /// The prompt is too long, `clip_skip` skips every layer, a weight is missing or misshapen, or `run` fails.
    pub fn condition(&self, prompt: &Prompt<'_>, run: &mut Run<'_>) -> Result<Conditioning> {
        self.condition_with(prompt, &Embeddings::default(), run)
    }

    /// The same for a prompt in which names of embeddings stand for their vectors. `run` runs the text encoders with
    /// tables that [`Embeddings::rows`] follow.
    ///
    /// # Errors
    /// As for [`Model::condition`].
    pub fn condition_with(
        &self,
        prompt: &Prompt<'_>,
        embeddings: &Embeddings,
        run: &mut Run<'_>,
    ) -> Result<Conditioning> {
        let recipe = self.info.family.recipe();
        conditioning::encode(&self.encoders, recipe.vector, recipe.zero_negative, prompt, embeddings, run)
    }

    /// Token states of a text encoder: `ids [batch, t]` i32 to `[batch, t, c]`, if they are a part of the context, and to
    /// `[batch, t, p]` if a pooled state is taken from them. `t` is 77 for CLIP, and what the family says for T5.
    ///
    /// # Errors
    /// The family has no such encoder, `clip_skip` skips every layer, or a weight is missing or misshapen.
    pub fn text_program(&self, part: Part, batch: usize, clip_skip: usize) -> Result<Program> {
        let encoder = self.encoders.iter().find(|e| e.part() == part);
        let name = self.info.family.name();
        let encoder = encoder.ok_or_else(|| Error::request(format!("{name} has no {}", part.name())))?;
        encoder.program(batch, clip_skip)
    }

    /// The prediction `[b, c, h, w]` for `x [b, c, h, w]`, `timesteps [b]`, `context [b, t, k]`, and as the network reads
    /// them `vector [b, v]`, `guidance [b]`, `joined [b, k, h, w]`, `reference.0`, … `[b, c, h_i, w_i]`, the
    /// [`Model::tables`], and the residuals of a [ControlNet](crate::adapter::controlnet) or the sum of several. `h` and `w`
    /// are those of the latent. A [`Stretch`] has other results.
    ///
    /// # Errors
    /// The network cannot halve `h` or `w` as often as it does, it takes no references, a block cannot be skipped, or a
    /// weight is missing or misshapen.
    pub fn diffusion_program(&self, e: &Evaluation) -> Result<Program> {
        let (facts, name) = (self.network.facts(), self.info.family.name());
        if !facts.references && !e.references.is_empty() {
            return Err(Error::request(format!("this {name} model takes no reference pictures")));
        }
        if facts.blocks == 0 && !e.skip.is_empty() {
            return Err(Error::request(format!("no blocks of {name} can be skipped")));
        }
        if facts.control.is_none() && e.control {
            return Err(Error::request(format!("{name} takes no ControlNets")));
        }
        let g = Graph::new();
        let given = Given::declare(&g, &facts, e)?;
        let w = self.component(Part::Diffusion)?.scope();
        match e.stretch {
            Stretch::All => g.finish(&[self.network.build(&g, w, &given, e)?]),
            _ => g.finish(&self.network.build_stretch(&g, w, &given, e)?),
        }
    }

    /// Inputs of [`Model::diffusion_program`] that follow from the evaluation alone, by name, such as rotary tables.
    ///
    /// # Errors
    /// None for a model that is open.
    pub fn tables(&self, e: &Evaluation) -> Result<Vec<(&'static str, Tensor)>> {
        self.network.tables(e)
    }

    /// Finds out what the network predicts where no marker says so: one that predicts the velocity answers a latent
    /// of 0.5 at the last timestep with about its negative, one that predicts the noise with about itself.
    ///
    /// # Errors
    /// A weight is missing or misshapen, or `run` fails.
    pub fn try_prediction(&self, run: &mut Run<'_>) -> Result<Prediction> {
        let facts = self.network.facts();
        let (c, side, tokens) = (facts.latent, facts.multiple, 2);
        let e = Evaluation { batch: 1, size: [side; 2], tokens, ..Evaluation::default() };
        let program = self.diffusion_program(&e)?;
        let filled = |dims: &[usize], by: f32| Tensor::f32(dims, vec![by; dims.iter().product()]);
        let (x, context) = (filled(&[1, c, side, side], 0.5)?, filled(&[1, tokens, facts.context], 0.5)?);
        let timesteps = Tensor::f32(&[1], vec![999.0])?;
        let vector = facts.vector.map(|v| filled(&[1, v], 0.5)).transpose()?;
        let joined = match facts.joined.channels(c) {
            0 => None,
            k => Some(filled(&[1, k, side, side], 0.0)?),
        };
        let mut inputs = vec![("x", &x), ("timesteps", &timesteps), ("context", &context)];
        inputs.extend(vector.iter().map(|v| ("vector", v)));
        inputs.extend(joined.iter().map(|j| ("joined", j)));
        let out = run(Part::Diffusion, &program, &inputs)?;
        let values = out.first().map(Tensor::values).unwrap_or_default();
        let mean = values.iter().map(|y| f64::from(*y) - 0.5).sum::<f64>() / values.len().max(1) as f64;
        Ok(if mean < -1.0 { Prediction::V } else { Prediction::Epsilon })
    }

    /// Settles what the network predicts, which the size it was trained at may hang on.
    pub fn set_prediction(&mut self, prediction: Prediction) {
        self.info.prediction = Some(prediction);
        if !self.own_size {
            let recipe = self.info.family.recipe();
            self.info.defaults.size = match prediction {
                Prediction::V => recipe.size_of_v,
                Prediction::Epsilon | Prediction::Flow => recipe.defaults.size,
            };
        }
    }

    /// Pictures, about -1 to 1: `latent [batch, channels, h, w]` in the autoencoder's scale to `[batch, 3, f h, f w]`. They
    /// repeat without a seam down and across as `circular` says.
    ///
    /// # Errors
    /// A weight is missing or misshapen.
    pub fn decode_program(&self, batch: usize, h: usize, w: usize, circular: [bool; 2]) -> Result<Program> {
        let g = Graph::new();
        let latent = g.input("latent", &[batch, self.info.latent.channels, h, w], DType::F32)?;
        let y = kl::decode(&g, self.vae()?.scope(), &self.kl, latent, circular)?;
        g.finish(&[y])
    }

    /// Decoding in steps: the program that makes the first step's `x` of `latent [1, channels, h, w]` in the
    /// autoencoder's scale, and the steps that make a picture of it. See [`Step`].
    ///
    /// # Errors
    /// A weight is missing or misshapen.
    pub fn decode_steps(&self, h: usize, w: usize, circular: [bool; 2]) -> Result<(Program, Vec<Step>)> {
        let (g, scope) = (Graph::new(), self.vae()?.scope());
        let latent = g.input("latent", &[1, self.info.latent.channels, h, w], DType::F32)?;
        let x = steps::decode_start(&g, scope, &self.kl, latent, circular)?;
        Ok((g.finish(&[x])?, steps::decoding(scope, &self.kl)))
    }

    /// Encoding in steps, the first of which reads a picture.
    ///
    /// # Errors
    /// The autoencoder has no encoder.
    pub fn encode_steps(&self) -> Result<Vec<Step>> {
        self.wants_encoder()?;
        steps::encoding(self.vae()?.scope())
    }

    /// What follows [`Model::encode_steps`]: `x [1, c, h, w]` to the moments that [`Model::encode_program`] gives.
    ///
    /// # Errors
    /// A weight is missing or misshapen.
    pub fn encode_end_program(&self, [c, h, w]: [usize; 3], circular: [bool; 2]) -> Result<Program> {
        let g = Graph::new();
        let x = g.input("x", &[1, c, h, w], DType::F32)?;
        let y = steps::encode_end(&g, self.vae()?.scope(), x, circular)?;
        g.finish(&[y])
    }

    /// The program of a step on a piece, whose `x` and `y` have these many channels. It reads `x`, and where the step says
    /// so `y`, `factor` and `offset`.
    ///
    /// # Errors
    /// A weight is missing or misshapen.
    pub fn step_program(&self, step: &Step, piece: Piece, channels: [usize; 2]) -> Result<Program> {
        step.program(self.vae()?.scope(), piece, channels)
    }

    /// Whether the autoencoder can turn pictures into latents.
    pub fn can_encode(&self) -> bool {
        self.vae().is_ok_and(|c| c.scope().contains("encoder"))
    }

    /// Mean and logarithm of the variance of latents in the autoencoder's scale: `image [batch, 3, h, w]`, -1 to 1, to
    /// `[batch, 2 channels, h / f, w / f]`. The picture repeats down and across as `circular` says.
    ///
    /// # Errors
    /// A side is no multiple of `f`, the autoencoder has no encoder, or a weight is missing or misshapen.
    pub fn encode_program(&self, batch: usize, h: usize, w: usize, circular: [bool; 2]) -> Result<Program> {
        self.wants_encoder()?;
        let g = Graph::new();
        let image = g.input("image", &[batch, 3, h, w], DType::F32)?;
        let y = kl::encode(&g, self.vae()?.scope(), &self.kl, image, circular)?;
        g.finish(&[y])
    }

    fn wants_encoder(&self) -> Result<()> {
        if self.can_encode() {
            return Ok(());
        }
        let e = Error::request("the VAE has no encoder, so it cannot read pictures");
        Err(e.hint("give a full one with --vae"))
    }
}

fn recognise(file: &Checkpoint) -> Result<Family> {
    let path = file.path().display();
    match detect(file) {
        Kind::Runs(family) => Ok(family),
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
                Some(_) => {
                    e.hint("give the model with -m, a VAE with --vae and text encoders with --clip_l, --clip_g and --t5xxl")
                }
                None => e,
            })
        }
    }
}

fn holds(file: &Checkpoint, part: Part) -> bool {
    file.names().iter().any(|n| part_of(n, None).is_some_and(|p| p.0 == part))
}

/// What the message of a model without `parts` says: all of them, and how to give them.
fn missing_parts(file: &Checkpoint, family: Family, parts: &[Part]) -> Error {
    let list = |names: Vec<&str>| match names.split_last() {
        Some((last, [])) => (*last).to_owned(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    };
    let what = list(parts.iter().map(|p| p.name()).collect());
    let name =
        variant(file, family).map_or_else(|| family.name().to_owned(), |v| format!("{} ({v})", family.name()));
    let options = list(parts.iter().map(|p| p.option()).collect());
    let them = if parts.len() > 1 { "them" } else { "it" };
    Error::bad_file(file.path(), format!("holds no {what}, which {name} needs"))
        .hint(format!("give {them} with {options}"))
}

/// The parts in all files, those given apart last.
fn parts(files: &Files) -> Result<BTreeMap<Part, Component>> {
    let mut parts: BTreeMap<Part, Component> = BTreeMap::new();
    let apart = files.parts.iter().map(|(part, file)| (file, Some(*part)));
    for (file, only) in files.model.iter().map(|file| (file, None)).chain(apart) {
        let source: Arc<dyn WeightSource> = file.clone();
        if let (Some(part), Kind::NotAModel(name, hint)) = (only, detect(&**file)) {
            let what = format!("is {name}, not a {} for {}", part.name(), part.option());
            return Err(Error::bad_file(file.path(), what).hint(hint));
        }
        scaled::check(&source)?;
        let found = Component::split(&source, only);
        if let (Some(part), []) = (only, found.as_slice()) {
            let what = format!("holds no {}", part.name());
            return Err(Error::bad_file(file.path(), what).context(part.option()));
        }
        parts.extend(found.into_iter().map(|c| (c.part(), c)));
    }
    for (part, source) in &files.prepared {
        if let Some(component) = parts.get_mut(part) {
            component.prepare(source.clone());
        }
    }
    Ok(parts)
}

/// Checks what one part hands to another.
fn fit(facts: &Facts, given: &Sizes, kl: &kl::Config) -> Result<()> {
    let wrong = |what: String| Err(Error::shape(what).hint("the files are of different families"));
    let &Sizes { context, vector, .. } = given;
    if context != facts.context {
        return wrong(format!(
            "the text encoder's states have {context} channels, the diffusion network reads {}",
            facts.context
        ));
    }
    if vector != facts.vector {
        let channels = |v: Option<usize>| v.map_or("none".to_owned(), |n| format!("{n} channels"));
        let (given, read) = (channels(vector), channels(facts.vector));
        return wrong(format!(
            "the vector beside the context: the text encoder gives {given}, the diffusion network reads {read}"
        ));
    }
    if kl.latent != facts.latent {
        return wrong(format!(
            "the VAE's latents have {} channels, those of the diffusion network {}",
            kl.latent, facts.latent
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
