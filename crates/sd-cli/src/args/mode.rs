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
}

pub(super) fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "img_gen" => Ok(Mode::ImgGen),
        "upscale" => Ok(Mode::Upscale),
        "convert" => Ok(Mode::Convert),
        "adetailer" | "vid_gen" | "metadata" => {
            Err("not supported yet, only img_gen, upscale and convert are".to_owned())
        }
        _ => Err("no such mode; there are img_gen, upscale and convert".to_owned()),
    }
}

pub(super) fn output(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("want a path".to_owned());
    }
    Ok(text.to_owned())
}
