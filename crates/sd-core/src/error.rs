//! One error type for every crate of the workspace: a kind with its facts, and the chain of what was being done.

use std::fmt;
use std::path::{Path, PathBuf};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with the facts a user needs to act on it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Kind {
    /// The operating system refused an operation on a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be: truncated, malformed, or of an unknown format.
    #[error("{}: {what}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, naming the tensor where there is one, with expected and found.
        what: String,
    },
    /// A tensor the network needs is not in the file.
    #[error("{name}: missing{}", in_file(origin))]
    MissingTensor {
        /// Its full name in the file's own spelling.
        name: String,
        /// The file or files searched.
        origin: String,
    },
    /// Operands do not fit together; the message holds names, shapes and dtypes.
    #[error("{0}")]
    Shape(String),
    /// A request asks for what cannot be done; the message names the option or field.
    #[error("{0}")]
    Request(String),
    /// The model or the feature is recognised and not supported.
    #[error("{0}")]
    Unsupported(String),
    /// A value became NaN or infinite.
    #[error("{0}")]
    NonFinite(String),
    /// A device could not be found, allocate or compute.
    #[error("{0}")]
    Device(String),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// A rule of this program was broken; always a bug.
    #[error("internal error: {0}")]
    Internal(String),
}

fn in_file(origin: &str) -> String {
    if origin.is_empty() { String::new() } else { format!(" from {origin}") }
}

/// A [`Kind`], the chain of what was being done (outermost first when printed), and an optional hint.
pub struct Error(Box<Inner>);

struct Inner {
    kind: Kind,
    context: Vec<String>,
    hint: Option<String>,
}

impl Error {
    /// An error on `path` from the operating system.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Error {
        Kind::Io { path: path.as_ref().into(), source }.into()
    }

    /// A malformed file.
    pub fn bad_file(path: impl AsRef<Path>, what: impl Into<String>) -> Error {
        Kind::BadFile { path: path.as_ref().into(), what: what.into() }.into()
    }

    /// A tensor that is not there.
    pub fn missing(name: impl Into<String>, origin: impl Into<String>) -> Error {
        Kind::MissingTensor { name: name.into(), origin: origin.into() }.into()
    }

    /// Operands that do not fit.
    pub fn shape(message: impl Into<String>) -> Error {
        Kind::Shape(message.into()).into()
    }

    /// A request that cannot be carried out.
    pub fn request(message: impl Into<String>) -> Error {
        Kind::Request(message.into()).into()
    }

    /// A known thing that is not supported.
    pub fn unsupported(message: impl Into<String>) -> Error {
        Kind::Unsupported(message.into()).into()
    }

    /// A NaN or an infinity.
    pub fn non_finite(message: impl Into<String>) -> Error {
        Kind::NonFinite(message.into()).into()
    }

    /// A device failure.
    pub fn device(message: impl Into<String>) -> Error {
        Kind::Device(message.into()).into()
    }

    /// A broken rule of this program.
    pub fn internal(message: impl Into<String>) -> Error {
        Kind::Internal(message.into()).into()
    }

    /// The error a cancelled computation ends with.
    pub fn cancelled() -> Error {
        Kind::Cancelled.into()
    }

    /// What went wrong.
    pub fn kind(&self) -> &Kind {
        &self.0.kind
    }

    /// Whether the caller asked to stop.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.0.kind, Kind::Cancelled)
    }

    /// Whether the request, not the program or the file, is at fault.
    pub fn is_request(&self) -> bool {
        matches!(self.0.kind, Kind::Request(_))
    }

    /// The same error, with what was being done prepended.
    #[must_use]
    pub fn context(mut self, what: impl Into<String>) -> Error {
        self.0.context.push(what.into());
        self
    }

    /// The same error, with advice on what to do.
    #[must_use]
    pub fn hint(mut self, what: impl Into<String>) -> Error {
        self.0.hint = Some(what.into());
        self
    }

    /// The same error, with this advice if it has none.
    #[must_use]
    pub(crate) fn or_hint(mut self, what: String) -> Error {
        self.0.hint.get_or_insert(what);
        self
    }
}

impl From<Kind> for Error {
    fn from(kind: Kind) -> Error {
        Error(Box::new(Inner { kind, context: Vec::new(), hint: None }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.context.iter().rev() {
            write!(f, "{c}: ")?;
        }
        write!(f, "{}", self.0.kind)?;
        if let Some(hint) = &self.0.hint {
            write!(f, "   hint: {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl std::error::Error for Error {
    /// What lies below the system's error, whose own text [`Display`](fmt::Display) already shows.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.kind {
            Kind::Io { source, .. } => source.source(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_reads_from_the_outside_in() {
        let e = Error::missing("a.weight", "x.gguf").context("to_q").context("block 3").hint("give --vae");
        assert_eq!(e.to_string(), "block 3: to_q: a.weight: missing from x.gguf   hint: give --vae");
    }

    #[test]
    fn a_chain_of_sources_repeats_nothing() {
        let e = Error::io("x.png", std::io::ErrorKind::NotFound.into());
        assert_eq!(e.to_string(), format!("x.png: {}", std::io::ErrorKind::NotFound));
        assert!(std::error::Error::source(&e).is_none());
        let e = Error::io("x.png", std::io::Error::other("below"));
        assert_eq!(e.to_string(), "x.png: below");
        assert!(std::error::Error::source(&e).is_none());
    }
}
