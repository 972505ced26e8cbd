//! Tags in a prompt, `<lora:name:strength>`, and the files they mean.

use std::path::{Path, PathBuf};

use sd_core::Result;

use super::shelf::Shelf;

const OPEN: &str = "<lora:";
const HIGH_NOISE: &str = "|high_noise|";
/// Tried after a name, in this order.
const EXTENSIONS: &[&str] = &["", "gguf", "safetensors", "pt", "ckpt"];

/// What the names of listed files end in.
const LISTED: &[&str] = &["gguf", "safetensors", "pt", "pth", "ckpt"];

/// An adapter that a prompt asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Tag {
    /// A file below the folder of adapters, with or without its extension.
    pub name: String,
    /// What its changes are multiplied by; any number.
    pub strength: f32,
    /// Whether it is for the network of high noise levels only.
    pub high_noise: bool,
}

/// A prompt without its tags.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Tagged {
    /// What is left.
    pub text: String,
    /// The tags in order, those of one file added up.
    pub tags: Vec<Tag>,
    /// Tags whose strength is no number, which are left out.
    pub ignored: Vec<String>,
}

/// Takes the tags out of a prompt. Without a strength, `<lora:name>`, it is 1.
pub fn extract(prompt: &str) -> Tagged {
    let mut out = Tagged::default();
    let mut rest = prompt;
    while let Some(start) = rest.find(OPEN) {
        let (before, tag) = rest.split_at(start);
        let Some(end) = tag.find('>') else { break };
        let (tag, after) = tag.split_at(end + 1);
        out.text.push_str(before);
        rest = after;
        let inside = tag.strip_prefix(OPEN).and_then(|t| t.strip_suffix('>')).unwrap_or_default();
        let (name, strength) = inside.rsplit_once(':').unwrap_or((inside, "1"));
        let strength = strength.trim().parse::<f32>().ok().filter(|s| s.is_finite());
        let (high_noise, name) = match name.trim().strip_prefix(HIGH_NOISE) {
            Some(name) => (true, name),
            None => (false, name.trim()),
        };
        match strength.filter(|_| !name.is_empty()) {
            None => out.ignored.push(tag.to_owned()),
            Some(strength) => match out.tags.iter_mut().find(|t| t.name == name && t.high_noise == high_noise) {
                Some(same) => same.strength += strength,
                None => out.tags.push(Tag { name: name.to_owned(), strength, high_noise }),
            },
        }
    }
    out.text.push_str(rest);
    out
}

/// What PEFT notes about the tensors beside it.
pub(super) const PEFT_CONFIG: &str = "adapter_config.json";

/// What PEFT calls the file with the tensors.
const PEFT_FILES: [&str; 2] = ["adapter_model.safetensors", "adapter_model.bin"];

const LORAS: Shelf = Shelf { what: "LoRA", option: "--lora-model-dir", listed: LISTED, candidates, name_of };

fn candidates(folder: &Path, name: &str) -> Vec<String> {
    let plain = EXTENSIONS.iter().map(|e| if e.is_empty() { name.to_owned() } else { format!("{name}.{e}") });
    let of_peft = PEFT_FILES.iter().map(|file| format!("{name}/{file}"));
    plain.chain(of_peft.filter(|_| folder.join(name).join(PEFT_CONFIG).is_file())).collect()
}

/// The file that `name` means: as it stands or with an extension, below `folder`; of a folder that PEFT wrote, the one
/// with its tensors. A name without folders also means the one file below a subfolder that has it. Absolute names and those
/// that lead out of the folder, by `..` or by a link, are only followed when `anywhere` is set.
///
/// # Errors
/// There is no such file, or several in subfolders, or it is outside.
pub fn find(folder: &Path, name: &str, anywhere: bool) -> Result<PathBuf> {
    LORAS.find(folder, name, anywhere)
}

/// The configuration that PEFT wrote beside `file`, if it is one of PEFT's.
pub fn config_of(file: &Path) -> Option<PathBuf> {
    let is_peft = file.file_stem().is_some_and(|stem| stem == "adapter_model");
    Some(file.with_file_name(PEFT_CONFIG)).filter(|config| is_peft && config.is_file())
}

/// The name by which prompts know a listed file: its path without extension, or the folder's if PEFT wrote it.
pub fn name_of(folder: &Path, file: &str) -> String {
    let at = match config_of(&folder.join(file)) {
        Some(_) => file.rsplit_once('/'),
        None => file.rsplit_once('.'),
    };
    at.map_or(file, |(name, _)| name).to_owned()
}

/// The files of adapters below a folder that [`find`] finds, as paths relative to it with slashes, in order. Folders that
/// cannot be read are left out.
pub fn list(folder: &Path) -> Vec<String> {
    LORAS.list(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(name: &str, strength: f32, high_noise: bool) -> Tag {
        Tag { name: name.into(), strength, high_noise }
    }

    #[test]
    fn tags_leave_the_prompt() {
        let t = extract("a <lora:styles/ink:0.5>cat<lora:x:-1>, <lora:|high_noise|x:.25> (big:1.2)<lora:x:0.5>");
        assert_eq!(t.text, "a cat,  (big:1.2)");
        assert_eq!(t.tags, [tag("styles/ink", 0.5, false), tag("x", -0.5, false), tag("x", 0.25, true)]);
        assert!(t.ignored.is_empty());
        let t = extract("<lora:a><lora:b:much><lora::1> <lora:c:NaN>é <lora:open");
        assert_eq!((t.text.as_str(), t.tags), (" é <lora:open", vec![tag("a", 1.0, false)]));
        assert_eq!(t.ignored, ["<lora:b:much>", "<lora::1>", "<lora:c:NaN>"]);
        assert_eq!(extract("a <b> c").text, "a <b> c");
    }

    #[test]
    fn files_are_found_below_the_folder_only() {
        let folder = std::env::temp_dir().join(format!("sd-tags-{}", std::process::id()));
        let inside = folder.join("loras");
        std::fs::create_dir_all(inside.join("styles")).unwrap();
        for file in
            ["loras/styles/ink.safetensors", "loras/both.gguf", "loras/both.safetensors", "secret.safetensors"]
        {
            std::fs::write(folder.join(file), "").unwrap();
        }
        let found = |name: &str, anywhere| {
            find(&inside, name, anywhere).map(|p| p.strip_prefix(&folder).unwrap().to_owned())
        };
        assert_eq!(found("styles/ink", false).unwrap(), Path::new("loras/styles/ink.safetensors"));
        assert_eq!(found("styles/ink.safetensors", false).unwrap(), Path::new("loras/styles/ink.safetensors"));
        assert_eq!(found("both", false).unwrap(), Path::new("loras/both.gguf"));
        assert_eq!(found("ink", false).unwrap(), Path::new("loras/styles/ink.safetensors"));
        assert_eq!(found("ink.safetensors", false).unwrap(), Path::new("loras/styles/ink.safetensors"));
        assert_eq!(name_of(&inside, "styles/ink.safetensors"), "styles/ink");
        for missing in ["in", "styles/in", "other/ink", "styles"] {
            let e = found(missing, false).unwrap_err().to_string();
            assert!(e.starts_with(&format!("LoRA {missing}: not found in ")), "{e}");
        }
        std::fs::create_dir_all(inside.join("more/ink")).unwrap();
        std::fs::write(inside.join("more/ink/adapter_model.safetensors"), "").unwrap();
        std::fs::write(inside.join("more/ink/adapter_config.json"), "{}").unwrap();
        assert_eq!(name_of(&inside, "more/ink/adapter_model.safetensors"), "more/ink");
        let e = found("ink", false).unwrap_err().to_string();
        let both = "more/ink/adapter_model.safetensors and styles/ink.safetensors";
        assert_eq!(e, format!("LoRA ink: is the name of {both}   hint: name it with its folder"));
        assert_eq!(found("styles/ink", false).unwrap(), Path::new("loras/styles/ink.safetensors"));
        std::fs::remove_dir_all(inside.join("more")).unwrap();
        let absolute = folder.join("secret.safetensors");
        for name in ["../secret", "styles/../../secret", absolute.to_str().unwrap(), "..\\secret", "a\0b"] {
            assert!(found(name, false).unwrap_err().to_string().contains("is outside of"), "{name}");
        }
        assert!(found("../secret", true).is_ok());
        std::fs::write(inside.join("notes.txt"), "").unwrap();
        let listed = ["both.gguf", "both.safetensors", "styles/ink.safetensors"];
        assert_eq!(list(&inside), listed);
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(folder.join("secret.safetensors"), inside.join("link.safetensors")).unwrap();
            assert!(found("link", false).unwrap_err().to_string().contains("is outside of"));
            assert!(found("link", true).is_ok());
            std::os::unix::fs::symlink(&inside, inside.join("styles/round")).unwrap();
            assert_eq!(list(&inside), listed);
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
