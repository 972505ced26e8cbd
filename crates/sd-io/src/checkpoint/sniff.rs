//! What a file is, by what is in it.

use sd_core::{Error, Result};

use crate::file::SourceFile;
use crate::gguf;
use crate::safetensors::header_len;

/// The kinds of file a checkpoint can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Safetensors,
    Gguf,
    /// A JSON file that says which shard holds which tensor.
    Index,
}

const TO_SAFETENSORS: &str = "convert it to safetensors";

/// The kind of `file`.
///
/// # Errors
/// It is none; the message says what it looks like instead.
pub(crate) fn kind(file: &SourceFile) -> Result<Kind> {
    let start = file.prefix(512)?;
    let bad = |what: &str| Error::bad_file(file.path(), what);
    if start.is_empty() {
        return Err(bad("the file is empty"));
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
        return Err(
            bad("recognised as a PyTorch checkpoint (zip), which is not supported yet").hint(TO_SAFETENSORS)
        );
    }
    // A pickle of protocol 2 or later starts with 0x80 and the protocol; the legacy format is a row of pickles.
    if let [0x80, 2..=5, ..] = *start {
        return Err(
            bad("recognised as a PyTorch checkpoint (pickle), which is not supported yet").hint(TO_SAFETENSORS)
        );
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
    let first: Vec<String> = start.iter().take(8).map(|b| format!("{b:02x}")).collect();
    let len = file.len();
    Err(bad(&format!(
        "not a model file: expected GGUF, safetensors or a safetensors index, found {len} bytes starting with {}",
        first.join(" ")
    )))
}
