//! What a file is, by what is in it.

use sd_core::{Error, Result};

use super::Format;
use crate::file::SourceFile;
use crate::safetensors::header_len;
use crate::torch::{self, Layout};
use crate::{gguf, text};

/// The kinds of file a checkpoint can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Safetensors,
    Gguf,
    Torch(Layout),
    /// A JSON file that says which shard holds which tensor.
    Index,
}

impl Kind {
    pub(crate) fn format(self) -> Format {
        match self {
            Kind::Safetensors | Kind::Index => Format::Safetensors,
            Kind::Gguf => Format::Gguf,
            Kind::Torch(_) => Format::Torch,
        }
    }
}

const ANEW: &str = "download it again";
const UNPACK: &str = "unpack it and give the model file in it";
const OTHER: &str = "give the model as safetensors, GGUF or a PyTorch checkpoint";

/// What else is found in a folder of models: where the signature is, what the file is, and what to do.
const SIGNATURES: &[(usize, &[u8], &str, &str)] = &[
    (0, b"\x89HDF\r\n\x1a\n", "is an HDF5 file, as Keras writes", OTHER),
    (0, b"\x93NUMPY", "is a NumPy array", OTHER),
    (4, b"TFL3", "is a TensorFlow Lite model", OTHER),
    (0, b"lmgg", "is a GGML file, older than GGUF", "convert it to GGUF with a program of its time"),
    (0, b"tjgg", "is a GGJT file, older than GGUF", "convert it to GGUF with a program of its time"),
    (0, b"fmgg", "is a GGMF file, older than GGUF", "convert it to GGUF with a program of its time"),
    (0, b"\x1f\x8b", "is compressed with gzip", UNPACK),
    (0, b"\xfd7zXZ\0", "is compressed with xz", UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "is compressed with Zstandard", UNPACK),
    (0, b"BZh", "is compressed with bzip2", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "is a 7-Zip archive", UNPACK),
    (0, b"Rar!\x1a\x07", "is a RAR archive", UNPACK),
    (0, b"\x89PNG\r\n\x1a\n", "is a picture (PNG), not a model", OTHER),
    (0, b"\xff\xd8\xff", "is a picture (JPEG), not a model", OTHER),
    (8, b"WEBP", "is a picture (WebP), not a model", OTHER),
    (0, b"%PDF", "is a PDF document, not a model", OTHER),
    (0, b"\x7fELF", "is a program, not a model", OTHER),
    (0, b"MZ", "is a program, not a model", OTHER),
];

/// The kind of `file`.
///
/// # Errors
/// It is none; the message says what it looks like instead.
pub(crate) fn kind(file: &SourceFile) -> Result<Kind> {
    let start = file.prefix(512)?;
    let bad = |what: &str| Error::bad_file(file.path(), what);
    if start.is_empty() {
        return Err(bad("the file is empty").hint(ANEW));
    }
    if start.starts_with(gguf::MAGIC) {
        return Ok(Kind::Gguf);
    }
    // The JSON header of a safetensors file follows an 8-byte length and starts with a brace. In a JSON file the
    // same place can hold a brace too, but its first 8 characters make no possible length.
    let is_text = start.starts_with(b"{") && header_len(&start, file.len()).is_err();
    if start.get(8) == Some(&b'{') && !is_text {
        return Ok(Kind::Safetensors);
    }
    if start.starts_with(b"PK\x03\x04") {
        return Ok(Kind::Torch(Layout::Zip));
    }
    // A pickle of protocol 2 or later starts with 0x80 and the protocol.
    if let [0x80, 2..=5, ..] = *start {
        return Ok(Kind::Torch(Layout::Legacy));
    }
    if torch::is_tar(&start) {
        return Ok(Kind::Torch(Layout::Tar));
    }
    if start.starts_with(b"version https://git-lfs") {
        return Err(bad("is a Git LFS pointer, not the file it stands for").hint("fetch it with `git lfs pull`"));
    }
    let text: Vec<u8> = start.trim_ascii_start().to_ascii_lowercase();
    if text.starts_with(b"<!doctype") || text.starts_with(b"<html") || text.starts_with(b"<?xml") {
        return Err(
            bad("is a web page, not a model").hint("the download saved an error or login page; fetch it anew")
        );
    }
    if text.starts_with(b"{") {
        return Ok(Kind::Index);
    }
    if let Some((_, _, what, hint)) =
        SIGNATURES.iter().find(|s| start.get(s.0..).is_some_and(|b| b.starts_with(s.1)))
    {
        return Err(bad(what).hint(*hint));
    }
    if start.iter().all(|b| *b == 0) {
        return Err(
            bad("not a model file: it starts with zeros, as a download does that was not finished").hint(ANEW)
        );
    }
    // What a server answers instead of a file, such as "Invalid username or password."
    if let Ok(words) = std::str::from_utf8(&start)
        && words.chars().all(|c| !c.is_control() || c.is_whitespace())
    {
        let words = text::cut(words.trim(), 80);
        return Err(bad(&format!("is text, not a model: {words}")).hint("fetch the model anew"));
    }
    let first: Vec<String> = start.iter().take(8).map(|b| format!("{b:02x}")).collect();
    let len = file.len();
    Err(bad(&format!(
        "not a model file: expected GGUF, safetensors, a PyTorch checkpoint or an index of shards, found {len} bytes \
         starting with {}",
        first.join(" ")
    )))
}
