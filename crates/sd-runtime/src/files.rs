//! Which files a model is made of, and what they hold.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use sd_core::Result;
use sd_io::{Access, Checkpoint};
use sd_models::{Files, Part, Survey};

/// Paths of a model, or of parts of one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelFiles {
    /// All parts, or those that are not given apart.
    pub model: Option<PathBuf>,
    /// Parts in files of their own.
    pub parts: BTreeMap<Part, PathBuf>,
}

impl ModelFiles {
    /// Whether no file is given.
    pub fn is_empty(&self) -> bool {
        self.model.is_none() && self.parts.is_empty()
    }

    /// What the files hold, whether or not a model can be made of them. Reads headers only.
    ///
    /// # Errors
    /// A file cannot be read or is no checkpoint.
    pub fn survey(&self) -> Result<Survey> {
        Ok(Survey::new(&self.open(Access::default())?))
    }

    pub(crate) fn open(&self, access: Access) -> Result<Files> {
        let open = |path: &PathBuf| Checkpoint::open_with(path, access).map(Arc::new);
        Ok(Files {
            model: self.model.as_ref().map(open).transpose()?,
            parts: self.parts.iter().map(|(part, path)| Ok((*part, open(path)?))).collect::<Result<_>>()?,
            ..Files::default()
        })
    }
}
