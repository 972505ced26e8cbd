//! What the program does.

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Draw pictures.
    ImgGen,
    /// Make a picture larger.
    Upscale,
    /// Write a model in other types or another format.
    Convert,
    /// Print what a picture says beside its pixels.
    Metadata,
}

pub(super) fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "img_gen" => Ok(Mode::ImgGen),
        "upscale" => Ok(Mode::Upscale),
        "convert" => Ok(Mode::Convert),
        "metadata" => Ok(Mode::Metadata),
        "adetailer" | "vid_gen" => {
            Err("not supported yet, only img_gen, upscale, convert and metadata are".to_owned())
        }
        _ => Err("no such mode; there are img_gen, upscale, convert and metadata".to_owned()),
    }
}

pub(super) fn output(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("want a path".to_owned());
    }
    Ok(text.to_owned())
}
