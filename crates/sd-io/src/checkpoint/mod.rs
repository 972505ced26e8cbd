//! A checkpoint: one file, the shards of one, or a folder of components, as one index of tensors.

mod folder;
mod shards;
mod sniff;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};

use sd_core::{Bytes, Error, Origin, Result, TensorMeta, WeightSource};
use serde_json::Value as Json;

use crate::file::{Access, SourceFile};
use crate::form::Form;
use crate::gguf::{self, EmbeddedTokenizer};
use crate::listing::Listing;
use crate::metadata::Metadata;
use crate::safetensors::{header_len, parse_safetensors};
use crate::text::shown;
use crate::torch;
use sniff::Kind;

pub use shards::parse_index;

/// How a checkpoint is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One safetensors file, or the shards of one.
    Safetensors,
    /// One GGUF file, or the parts of one.
    Gguf,
    /// A file of `torch.save`: `.ckpt`, `.pt`, `.pth` or `.bin`.
    Torch,
    /// A diffusers folder, each component in its own subfolder.
    Folder,
}

/// An open checkpoint. Its headers are in memory, its tensors on disk.
pub struct Checkpoint {
    path: PathBuf,
    format: Format,
    files: Vec<SourceFile>,
    tensors: Vec<Entry>,
    index: HashMap<String, usize>,
    metadata: Metadata,
    configs: BTreeMap<String, Json>,
}

struct Entry {
    name: String,
    /// How much of `name` was put before the name in the file.
    prefix: usize,
    meta: TensorMeta,
    file: usize,
    range: Range<u64>,
    form: Form,
}

impl Checkpoint {
    /// Opens what `path` holds, whatever it is called: a safetensors, GGUF or PyTorch file, any shard of one, an index
    /// of shards, or a diffusers folder. The tensors of a folder are called after their component, such as
    /// `unet.conv_in.weight`. Reads headers only.
    ///
    /// # Errors
    /// The path does not exist, is no checkpoint of a known format, or is malformed; the message names the file and,
    /// where there is one, the tensor.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        Checkpoint::open_with(path, Access::default())
    }

    /// [`Checkpoint::open`] with the way bytes are reached given.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_with(path: impl AsRef<Path>, access: Access) -> Result<Checkpoint> {
        let path = path.as_ref();
        let meta = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
        if meta.is_dir() {
            return folder::open(path, access);
        }
        let file = SourceFile::open(path, access)?;
        match sniff::kind(&file)? {
            Kind::Index => shards::open_index(path, access),
            kind => match shards::parts(path) {
                Some(parts) => shards::open_all(path, &parts, access),
                None => {
                    let out = Checkpoint::single(file, kind)?;
                    shards::check_whole(path, out.metadata())?;
                    Ok(out)
                }
            },
        }
    }

    /// Opens a safetensors, GGUF or PyTorch file that is in memory; messages call it `name`.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn from_bytes(name: &str, bytes: Bytes) -> Result<Checkpoint> {
        let file = SourceFile::in_memory(Path::new(name), bytes);
        match sniff::kind(&file)? {
            Kind::Index => Err(Error::bad_file(name, "is an index; the files it names can only be found on disk")),
            kind => Checkpoint::single(file, kind),
        }
    }

    fn single(file: SourceFile, kind: Kind) -> Result<Checkpoint> {
        let mut out = Checkpoint::empty(file.path(), kind.format());
        let listing = listing(&file, kind)?;
        out.add(file, listing, "", &|_| true)?;
        Ok(out)
    }

    fn empty(path: &Path, format: Format) -> Checkpoint {
        Checkpoint {
            path: path.into(),
            format,
            files: Vec::new(),
            tensors: Vec::new(),
            index: HashMap::new(),
            metadata: Metadata::default(),
            configs: BTreeMap::new(),
        }
    }

    /// Adds those tensors of a file that `keep` wants, by their names in the file, and the file's metadata.
    fn add(&mut self, file: SourceFile, listing: Listing, prefix: &str, keep: &dyn Fn(&str) -> bool) -> Result<()> {
        for t in listing.tensors {
            if !keep(&t.name) {
                continue;
            }
            let name = format!("{prefix}{}", t.name);
            if let Some(other) = self.index.get(&name).and_then(|&i| self.tensors.get(i)) {
                let other = self.files.get(other.file).map(|f| f.path().display().to_string());
                let what = format!("tensor {} is also in {}", shown(&t.name), other.unwrap_or_default());
                return Err(Error::bad_file(file.path(), what));
            }
            self.index.insert(name.clone(), self.tensors.len());
            let (prefix, file) = (prefix.len(), self.files.len());
            self.tensors.push(Entry { name, prefix, meta: t.meta, file, range: t.range, form: t.form });
        }
        // Shards of one model repeat its metadata, so the first to give a key counts.
        for (key, value) in listing.metadata.iter() {
            self.metadata.insert(format!("{prefix}{key}"), value.clone());
        }
        self.files.push(file);
        Ok(())
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How the checkpoint is stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The files the tensors are in.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(SourceFile::path)
    }

    /// The key-value pairs of the file; those of a folder's components have the component's name before the key,
    /// such as `unet.format`.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tokenizer that a GGUF file of a language model carries.
    ///
    /// # Errors
    /// The tokenizer's keys hold values of other types.
    pub fn tokenizer(&self) -> Result<Option<EmbeddedTokenizer<'_>>> {
        EmbeddedTokenizer::read(&self.metadata).map_err(|e| e.context(self.path.display().to_string()))
    }

    /// The JSON configuration of a folder's component, such as `unet` or `scheduler`; `model_index` is the folder's
    /// own, and the empty name that of a folder which is itself a component.
    pub fn config(&self, component: &str) -> Option<&Json> {
        self.configs.get(component)
    }

    /// The components that have a configuration, by name.
    pub fn components(&self) -> impl Iterator<Item = &str> {
        self.configs.keys().map(String::as_str)
    }

    fn entry(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(*self.index.get(name)?)
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({:?}, {} tensors)", self.path.display(), self.format, self.tensors.len())
    }
}

impl WeightSource for Checkpoint {
    fn names(&self) -> Vec<&str> {
        self.tensors.iter().map(|t| t.name.as_str()).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        self.entry(name).map(|t| t.meta)
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let missing = || Error::missing(name, self.path.display().to_string());
        let t = self.entry(name).ok_or_else(missing)?;
        let file = self.files.get(t.file).ok_or_else(missing)?;
        let stored = file.bytes(t.range.clone()).map_err(|e| e.context(shown(name)))?;
        let stored = if t.form == Form::default() { stored } else { stored.read()? };
        let whole = t.form.apply(&t.meta, stored);
        whole.ok_or_else(|| Error::bad_file(file.path(), format!("no memory for tensor {}", shown(name))))
    }

    fn origin(&self, name: &str) -> Origin {
        match self.entry(name) {
            Some(t) => {
                let file = self.files.get(t.file).map_or(self.path.as_path(), SourceFile::path);
                let name = t.name.get(t.prefix..).unwrap_or(&t.name).to_owned();
                Origin { name, file: file.display().to_string() }
            }
            None => Origin { name: name.to_owned(), file: self.path.display().to_string() },
        }
    }
}

/// The header of a file whose kind is known.
fn listing(file: &SourceFile, kind: Kind) -> Result<Listing> {
    match kind {
        Kind::Gguf => gguf::listing(file, file.path()),
        Kind::Torch(layout) => torch::listing(file, layout),
        Kind::Safetensors | Kind::Index => safetensors_listing(file),
    }
}

fn safetensors_listing(file: &SourceFile) -> Result<Listing> {
    let start = file.prefix(8)?;
    let len = header_len(&start, file.len()).map_err(|e| Error::bad_file(file.path(), e))?;
    parse_safetensors(file.path(), &file.prefix(8 + len)?, file.len())
}
