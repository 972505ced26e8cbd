//! Folders whose files requests name.

use std::path::{Component, Path, PathBuf};

use sd_core::{Error, Result};

/// What the files of a folder are.
pub(super) struct Shelf {
    /// What messages call one, as "LoRA".
    pub(super) what: &'static str,
    /// The option that names the folder.
    pub(super) option: &'static str,
    /// What the names of listed files end in.
    pub(super) listed: &'static [&'static str],
    /// The files that a name may mean, relative to the folder, the first that is there counts.
    pub(super) candidates: fn(&Path, &str) -> Vec<String>,
    /// The name in lists of a file of the folder.
    pub(super) name_of: fn(&Path, &str) -> String,
}

impl Shelf {
    /// The file below `folder` that `name` means. A name without folders also means the one file below a subfolder that has it. Absolute names and those that lead out of the folder, by `..` or by a
    /// link, are only followed when `anywhere` is set.
    pub(super) fn find(&self, folder: &Path, name: &str, anywhere: bool) -> Result<PathBuf> {
        let what = self.what;
        // Who may name files of one folder only need not learn where that is.
        let place = if anywhere { folder.display().to_string() } else { format!("the folder of {what}s") };
        let outside = || Error::request(format!("{what} {name}: is outside of {place}"));
        let plain = |c: Component<'_>| matches!(c, Component::Normal(_) | Component::CurDir);
        if !anywhere && (name.contains('\0') || name.contains('\\') || !Path::new(name).components().all(plain)) {
            return Err(outside());
        }
        for file in (self.candidates)(folder, name) {
            let path = folder.join(file);
            if !path.is_file() {
                continue;
            }
            if !anywhere {
                let real = |p: &Path| p.canonicalize().map_err(|e| Error::io(p, e));
                if !real(&path)?.starts_with(real(folder)?) {
                    return Err(outside());
                }
            }
            return Ok(path);
        }
        if let [_] = Path::new(name).components().collect::<Vec<_>>().as_slice() {
            let mut of_that_name = self.list(folder);
            of_that_name.retain(|file| {
                let (whole, short) = (file.rsplit('/').next(), (self.name_of)(folder, file));
                whole == Some(name) || short.rsplit('/').next() == Some(name)
            });
            match of_that_name.as_slice() {
                [] => {}
                [file] => return Ok(folder.join(file)),
                several => {
                    let e = Error::request(format!("{what} {name}: is the name of {}", several.join(" and ")));
                    return Err(e.hint("name it with its folder"));
                }
            }
        }
        let e = Error::request(format!("{what} {name}: not found in {place}"));
        Err(e.hint(format!("name a file below {}, with or without its extension", self.option)))
    }

    /// The files below `folder` that [`Shelf::find`] finds, as paths relative to it with slashes, in order. Folders that
    /// cannot be read are left out.
    pub(super) fn list(&self, folder: &Path) -> Vec<String> {
        let (mut files, mut folders) = (Vec::new(), vec![String::new()]);
        while let Some(at) = folders.pop() {
            for entry in std::fs::read_dir(folder.join(&at)).into_iter().flatten().flatten() {
                let (Some(name), Ok(kind)) = (entry.file_name().to_str().map(str::to_owned), entry.file_type())
                else {
                    continue;
                };
                let path = if at.is_empty() { name } else { format!("{at}/{name}") };
                let extension = Path::new(&path).extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase);
                if kind.is_dir() {
                    folders.push(path);
                } else if extension.is_some_and(|e| self.listed.contains(&e.as_str()))
                    && self.find(folder, &path, false).is_ok()
                {
                    files.push(path);
                }
            }
        }
        files.sort();
        files
    }
}
