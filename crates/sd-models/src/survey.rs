//! What files hold, also where no model can be opened from them: families, parts, what is missing, what nothing reads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use sd_core::{DType, Error, Graph, Result, Scope, WeightSource};
use sd_io::{Checkpoint, Format};

use crate::component::Component;
use crate::detect::{Kind, detect, evidence, variant};
use crate::diffusion::{Evaluation, Given};
use crate::family::{Defaults, Family, Info};
use crate::model::{Files, Model};
use crate::names::Part;
use crate::report::{self, Unused, explain};
use crate::text::clip::{self, Activation};
use crate::text::t5;
use crate::vae::kl;

/// What a set of files holds.
#[derive(Debug)]
pub struct Survey {
    /// The files, the one for all parts first.
    pub files: Vec<SurveyedFile>,
    /// What the diffusion network is, if there is one and its family can be run.
    pub family: Option<Family>,
    /// The parts that were found, each where it would be taken from.
    pub parts: Vec<SurveyedPart>,
    /// Parts that the family needs and no file has.
    pub missing: Vec<Part>,
    /// Facts about the whole model, if it could be opened.
    pub info: Option<Info>,
    /// What a request is filled up with: the model's, or what its family has in common.
    pub defaults: Option<Defaults>,
    /// Why the model could not be opened though no part is missing.
    pub problem: Option<Error>,
    /// Tensors that nothing reads, as far as their part could be checked.
    pub unused: Vec<Unused>,
}

/// One of the files.
#[derive(Debug)]
pub struct SurveyedFile {
    /// Its path.
    pub path: PathBuf,
    /// How it is stored.
    pub format: Format,
    /// The part it was given as; `None` for all parts.
    pub given_as: Option<Part>,
    /// How many tensors it has.
    pub tensors: usize,
    /// What it is.
    pub kind: FileKind,
    /// What it is beside others of its family, such as `inpainting`; `None` if it is the plain one.
    pub variant: Option<&'static str>,
    /// The tensors that tell, with their shapes.
    pub evidence: Vec<String>,
}

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A diffusion network of a family that can be run, perhaps with other parts.
    Model(Family),
    /// A model of this family, which cannot be run yet.
    Unsupported(&'static str),
    /// Not a model but this, and what to do with it.
    Other(&'static str, &'static str),
    /// Parts of a model without a diffusion network.
    Parts,
    /// Nothing that is known.
    Unknown,
}

impl SurveyedFile {
    /// What users call it: of a model the family, with its variant.
    pub fn what(&self) -> String {
        match (self.kind, self.variant) {
            (FileKind::Model(family), Some(variant)) => format!("{} ({variant})", family.name()),
            (FileKind::Model(family), None) => family.name().to_owned(),
            (FileKind::Unsupported(name), _) => format!("{name}, which is not supported yet"),
            (FileKind::Other(name, what), _) => format!("{name}, not a model; {what}"),
            (FileKind::Parts, _) => "parts of a model".to_owned(),
            (FileKind::Unknown, _) => "nothing that is known".to_owned(),
        }
    }
}

/// A part of a model.
#[derive(Debug)]
pub struct SurveyedPart {
    /// Which.
    pub part: Part,
    /// The file it is in.
    pub file: PathBuf,
    /// How many tensors it has.
    pub tensors: usize,
    /// How many elements they have.
    pub parameters: u64,
    /// Tensors and bytes in the file by type.
    pub stored: BTreeMap<DType, (usize, u64)>,
    /// Its sizes, by what they are sizes of.
    pub sizes: Vec<(&'static str, usize)>,
    /// Why its graph cannot be built.
    pub problem: Option<Error>,
}

/// A part with the file it came from, and what was found out about it.
struct Found {
    component: Component,
    file: PathBuf,
    sizes: Vec<(&'static str, usize)>,
    /// Whether a graph was built of it; an error if it could not be.
    built: Option<Result<()>>,
}

impl Survey {
    /// Looks at the headers of `files`.
    pub fn new(files: &Files) -> Survey {
        let given = files.parts.iter().map(|(part, file)| (Some(*part), file));
        let given: Vec<(Option<Part>, &Arc<Checkpoint>)> =
            files.model.iter().map(|file| (None, file)).chain(given).collect();
        let mut found: BTreeMap<Part, Found> = BTreeMap::new();
        let mut surveyed = Vec::new();
        for (only, file) in &given {
            let source: Arc<dyn WeightSource> = (*file).clone();
            let parts = Component::split(&source, *only);
            surveyed.push(surveyed_file(file, *only, parts.is_empty()));
            for component in parts {
                let file = file.path().to_owned();
                found.insert(component.part(), Found { component, file, sizes: Vec::new(), built: None });
            }
        }
        let main = files.parts.get(&Part::Diffusion).or(files.model.as_ref());
        let family = main.and_then(|file| match detect(&**file) {
            Kind::Runs(family) => Some(family),
            _ => None,
        });
        let missing: Vec<Part> = family.map(Family::needed).unwrap_or_default();
        let missing: Vec<Part> = missing.into_iter().filter(|part| !found.contains_key(part)).collect();
        for f in found.values_mut() {
            f.look(family);
        }
        let mut out = Survey {
            files: surveyed,
            family,
            missing,
            info: None,
            defaults: family.map(|f| f.recipe().defaults.clone()),
            problem: None,
            unused: Vec::new(),
            parts: Vec::new(),
        };
        let whole = family.is_some() && out.missing.is_empty();
        let opened = if whole { Some(open(files)) } else { None };
        match opened {
            Some(Ok((info, unused))) => {
                out.defaults = Some(info.defaults.clone());
                (out.info, out.unused) = (Some(info), unused);
            }
            other => {
                let all: Vec<Arc<Checkpoint>> = given.iter().map(|(_, file)| (*file).clone()).collect();
                let is_built = |f: &&Found| matches!(f.built, Some(Ok(())));
                let built: Vec<&Component> = found.values().filter(is_built).map(|f| &f.component).collect();
                let rest = found.values().filter(|f| !is_built(f)).map(|f| &f.component).collect::<Vec<_>>();
                out.unused = report::unused(&built, &rest, &all);
                out.problem = other.and_then(Result::err);
            }
        }
        out.parts = found.into_values().map(Found::surveyed).collect();
        out
    }
}

fn open(files: &Files) -> Result<(Info, Vec<Unused>)> {
    let model = Model::open(files)?;
    let report = model.dry_run()?;
    Ok((model.info().clone(), report.unused))
}

fn surveyed_file(file: &Checkpoint, given_as: Option<Part>, empty: bool) -> SurveyedFile {
    let kind = match detect(file) {
        Kind::Runs(family) => FileKind::Model(family),
        Kind::Known(name) => FileKind::Unsupported(name),
        Kind::NotAModel(name, what) => FileKind::Other(name, what),
        Kind::NoNetwork if empty => FileKind::Unknown,
        Kind::NoNetwork => FileKind::Parts,
    };
    let variant = if let FileKind::Model(family) = kind { variant(file, family) } else { None };
    SurveyedFile {
        path: file.path().to_owned(),
        format: file.format(),
        given_as,
        tensors: file.names().len(),
        kind,
        variant,
        evidence: evidence(file),
    }
}

impl Found {
    /// Reads sizes off the weights, and builds what can be built without the other parts.
    fn look(&mut self, family: Option<Family>) {
        let w = self.component.scope();
        let looked = match self.component.part() {
            Part::Diffusion => family.map(|f| network(f, w)),
            Part::Autoencoder => Some(autoencoder(w)),
            Part::ClipL | Part::ClipG => {
                // The activation has no part in the sizes.
                self.sizes = clip::Config::detect(w, Activation::Gelu)
                    .map(|c| {
                        vec![
                            ("channels", c.width),
                            ("layers", c.layers),
                            ("positions", c.positions),
                            ("tokens", c.vocabulary),
                        ]
                    })
                    .unwrap_or_default();
                None
            }
            Part::T5 => {
                self.sizes = t5::Config::detect(w)
                    .map(|c| {
                        vec![
                            ("channels", c.width),
                            ("blocks", c.blocks),
                            ("heads", c.heads),
                            ("tokens", c.vocabulary),
                        ]
                    })
                    .unwrap_or_default();
                None
            }
        };
        self.built = looked.map(|sizes| {
            self.sizes = sizes.map_err(|e| explain(e, &self.component))?;
            Ok(())
        });
    }

    fn surveyed(self) -> SurveyedPart {
        SurveyedPart {
            part: self.component.part(),
            tensors: self.component.tensors(),
            parameters: self.component.parameters(),
            stored: self.component.stored(),
            file: self.file,
            sizes: self.sizes,
            problem: self.built.and_then(Result::err),
        }
    }
}

fn network(family: Family, w: &Scope) -> Result<Vec<(&'static str, usize)>> {
    let network = (family.recipe().network)(w)?;
    let facts = network.facts();
    let e = Evaluation { batch: 1, size: [facts.multiple; 2], tokens: 1, ..Evaluation::default() };
    let g = Graph::new();
    let given = Given::declare(&g, &facts, &e)?;
    network.build(&g, w, &given, &e)?;
    let mut sizes = vec![("latent channels", facts.latent)];
    sizes.extend(Some(("joined channels", facts.joined.channels(facts.latent))).filter(|(_, n)| *n > 0));
    sizes.push(("context channels", facts.context));
    sizes.extend(facts.vector.map(|v| ("vector channels", v)));
    sizes.extend(Some(("blocks", facts.blocks)).filter(|(_, n)| *n > 0));
    Ok(sizes)
}

fn autoencoder(w: &Scope) -> Result<Vec<(&'static str, usize)>> {
    let cfg = kl::Config::detect(w)?;
    let g = Graph::new();
    let latent = g.input("latent", &[1, cfg.latent, 1, 1], DType::F32)?;
    kl::decode(&g, w, &cfg, latent, [false; 2])?;
    if w.contains("encoder") {
        let side = cfg.compression();
        let image = g.input("image", &[1, 3, side, side], DType::F32)?;
        kl::encode(&g, w, &cfg, image, [false; 2])?;
    }
    Ok(vec![("latent channels", cfg.latent), ("pixels per latent value", cfg.compression())])
}

#[cfg(test)]
mod tests;
