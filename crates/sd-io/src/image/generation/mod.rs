//! How a picture was made, from the texts that the common programs leave in it.

mod a1111;
mod comfy;
mod json;

use serde::Serialize;

use super::texts::{PictureText, USER_COMMENT, read_texts};

/// The program that made a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Generator {
    /// A program of this workspace.
    #[serde(rename = "sd-rs")]
    SdRs,
    /// stable-diffusion.cpp.
    #[serde(rename = "stable-diffusion.cpp")]
    SdCpp,
    /// The web UI of AUTOMATIC1111, or one that writes its format.
    A1111,
    /// ComfyUI.
    #[serde(rename = "ComfyUI")]
    ComfyUi,
    /// Fooocus.
    Fooocus,
    /// InvokeAI.
    #[serde(rename = "InvokeAI")]
    InvokeAi,
    /// NovelAI.
    #[serde(rename = "NovelAI")]
    NovelAi,
}

/// How a picture was made, as far as its file says.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Generation {
    /// The program.
    pub generator: Generator,
    /// What was asked for.
    pub prompt: String,
    /// What was to be avoided.
    pub negative_prompt: String,
    /// Steps of the sampler.
    pub steps: Option<u64>,
    /// The sampler, as the program calls it.
    pub sampler: Option<String>,
    /// The schedule of noise levels, as the program calls it.
    pub scheduler: Option<String>,
    /// The scale of guidance.
    pub cfg_scale: Option<f64>,
    /// The seed.
    pub seed: Option<i128>,
    /// Width and height in pixels.
    pub size: Option<(u64, u64)>,
    /// The model, by name or file.
    pub model: Option<String>,
    /// The hash of the model.
    pub model_hash: Option<String>,
    /// Layers of the text encoder, counted from its end.
    pub clip_skip: Option<i64>,
    /// How much of an initial picture is replaced, from 0 to 1.
    pub denoise: Option<f64>,
    /// LoRA files with their weights.
    pub loras: Vec<(String, f64)>,
    /// All else, by the program's own names.
    pub others: Vec<(String, String)>,
}

impl Generation {
    fn new(generator: Generator) -> Generation {
        Generation {
            generator,
            prompt: String::new(),
            negative_prompt: String::new(),
            steps: None,
            sampler: None,
            scheduler: None,
            cfg_scale: None,
            seed: None,
            size: None,
            model: None,
            model_hash: None,
            clip_skip: None,
            denoise: None,
            loras: Vec::new(),
            others: Vec::new(),
        }
    }
}

/// How a PNG, JPEG or WebP file says that its picture was made; `None` if it does not, or in a way that is not known.
/// [`read_texts`] gives the texts as they are.
pub fn read_generation(bytes: &[u8]) -> Option<Generation> {
    generation(&read_texts(bytes))
}

/// [`read_generation`] of texts that are read already.
pub fn generation(texts: &[PictureText]) -> Option<Generation> {
    let find = |keyword: &str| texts.iter().find(|t| t.keyword == keyword).map(|t| t.text.as_str());
    let parameters = ["parameters", USER_COMMENT, "stealth"].into_iter().filter_map(find);
    for text in parameters {
        let found = if text.trim_start().starts_with('{') {
            json::fooocus(text).or_else(|| json::novel_ai_hidden(text)).or_else(|| comfy::read(text))
        } else {
            a1111::read(text)
        };
        if found.is_some() {
            return found;
        }
    }
    if find("Software") == Some("NovelAI") {
        return json::novel_ai(find("Description"), find("Source"), find("Comment")?);
    }
    if let Some(found) = find("invokeai_metadata").and_then(json::invoke_ai) {
        return Some(found);
    }
    if let Some(found) = find("sd-metadata").and_then(json::invoke_ai_2) {
        return Some(found);
    }
    // In WebP and JPEG files ComfyUI uses fields of EXIF and puts the keyword before the text.
    let fields = texts.iter().filter(|t| matches!(t.keyword.as_str(), "Make" | "Model" | "ImageDescription"));
    let workflow = find("prompt").or_else(|| fields.into_iter().find_map(|t| t.text.strip_prefix("prompt:")));
    workflow.and_then(comfy::read)
}
