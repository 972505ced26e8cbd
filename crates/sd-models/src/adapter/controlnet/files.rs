//! The files of a folder of ControlNets.

use std::path::{Path, PathBuf};

use sd_core::Result;

use crate::adapter::shelf::Shelf;

const SHELF: Shelf =
    Shelf { what: "ControlNet", option: "--control-net-dir", listed: EXTENSIONS, candidates, name_of };

/// Tried after a name, in this order.
const EXTENSIONS: &[&str] = &["safetensors", "gguf", "pth", "pt", "ckpt", "bin"];

/// What diffusers calls the file in a folder of its own.
const DIFFUSERS_FILES: [&str; 3] = [
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model.bin",
];

fn candidates(_: &Path, name: &str) -> Vec<String> {
    let plain = EXTENSIONS.iter().map(|e| format!("{name}.{e}"));
    let of_diffusers = DIFFUSERS_FILES.iter().map(|file| format!("{name}/{file}"));
    std::iter::once(name.to_owned()).chain(plain).chain(of_diffusers).collect()
}

fn name_of(_: &Path, file: &str) -> String {
    name(Path::new(file))
}

/// The file that `name` means: as it stands or with an extension, below `folder`; of a folder that diffusers wrote, the one
/// with its tensors. A name without folders also means the one file below a subfolder that has it. Absolute names and those that lead out of the folder, by `..` or by a link, are not followed.
///
/// # Errors
/// There is no such file, or several in subfolders, or it is outside.
pub fn find(folder: &Path, name: &str) -> Result<PathBuf> {
    SHELF.find(folder, name, false)
}

/// Names below a folder that [`find`] finds, in order: paths with slashes and without extensions. Folders that cannot be read
/// are left out.
pub fn list(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = SHELF.list(folder).iter().map(|path| name(Path::new(path))).collect();
    names.sort();
    names.dedup();
    names
}

/// What lists call the file at `path`, which is relative to the folder.
pub fn name(path: &Path) -> String {
    let is_diffusers = path.file_name().is_some_and(|f| DIFFUSERS_FILES.iter().any(|d| f == *d));
    let named = path.parent().filter(|folder| is_diffusers && *folder != Path::new(""));
    let parts = named.map_or_else(|| path.with_extension(""), Path::to_owned);
    let parts: Vec<_> = parts.components().map(|c| c.as_os_str().to_string_lossy()).collect();
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_below_the_folder_only() {
        let folder = std::env::temp_dir().join(format!("sd-controls-{}", std::process::id()));
        let inside = folder.join("controls");
        std::fs::create_dir_all(inside.join("sd15/depth")).unwrap();
        let files =
            ["controls/sd15/canny.pth", "controls/edges.safetensors", "controls/edges.pth", "secret.safetensors"];
        for file in files.into_iter().chain(["controls/sd15/depth/diffusion_pytorch_model.safetensors"]) {
            std::fs::write(folder.join(file), "").unwrap();
        }
        std::fs::write(inside.join("notes.txt"), "").unwrap();
        let found = |name: &str| find(&inside, name).map(|p| p.strip_prefix(&inside).unwrap().to_owned());
        for (name, file) in [
            ("sd15/canny", "sd15/canny.pth"),
            ("edges", "edges.safetensors"),
            ("edges.pth", "edges.pth"),
            ("canny", "sd15/canny.pth"),
            ("depth", "sd15/depth/diffusion_pytorch_model.safetensors"),
            ("sd15/depth", "sd15/depth/diffusion_pytorch_model.safetensors"),
        ] {
            assert_eq!(found(name).unwrap(), Path::new(file), "{name}");
        }
        let e = found("pose").unwrap_err().to_string();
        assert!(e.starts_with("ControlNet pose: not found in the folder"), "{e}");
        let absolute = folder.join("secret.safetensors");
        for name in ["../secret", "sd15/../../secret", absolute.to_str().unwrap(), "..\\secret", "a\0b"] {
            let e = found(name).unwrap_err().to_string();
            assert!(e.contains("is outside of") && !e.contains(inside.to_str().unwrap()), "{e}");
        }
        let listed = ["edges", "sd15/canny", "sd15/depth"];
        assert_eq!(list(&inside), listed);
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(folder.join("secret.safetensors"), inside.join("link.pth")).unwrap();
            assert!(found("link").unwrap_err().to_string().contains("is outside of"));
            assert_eq!(list(&inside), listed);
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
