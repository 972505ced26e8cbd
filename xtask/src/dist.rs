//! An archive of the programs that runs on any machine of its architecture: ggml's drivers are libraries beside them, for
//! the processor one for each kind, and one for a GPU can be put there too.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sd_io::Image;

const PROGRAMS: [&str; 2] = ["sd-cli", "sd-server"];
const TEXTS: [&str; 5] = ["README.md", "CHANGELOG.md", "LICENSE", "LICENSE-APACHE-2.0", "NOTICE"];
/// The oldest processors that the archive is for.
const BASELINE: &str = if cfg!(target_arch = "x86_64") { "x86-64" } else { "generic" };
/// The picture that `check` draws.
const PROMPT: [&str; 8] = ["-p", "a red circle on a blue background", "-s", "7", "--steps", "8", "--threads", "2"];
/// Levels of 255 that pictures of two kinds of processor may differ on average.
const LEVELS: f64 = 2.0;

/// Builds the programs and puts them below `target/dist`; the folder and the archive of it.
///
/// # Errors
/// A command fails, or the build leaves no library for a processor.
pub fn make(root: &Path) -> Result<(PathBuf, PathBuf)> {
    let target = root.join("target/dist");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--release", "--locked", "--target-dir"]).arg(&target);
    for program in PROGRAMS {
        build.args(["-p", program, "--features", &format!("{program}/dynamic-backends")]);
    }
    build.env("RUSTFLAGS", format!("-Ctarget-cpu={BASELINE} -Clink-arg=-Wl,-rpath,$ORIGIN"));
    done(build.current_dir(root))?;
    let name = format!("sd-rs-{}-{}-{}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
    let folder = target.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for program in PROGRAMS {
        let from = target.join("release").join(program);
        fs::copy(&from, folder.join(program)).with_context(|| from.display().to_string())?;
    }
    for text in TEXTS {
        fs::copy(root.join(text), folder.join(text)).with_context(|| text.to_owned())?;
    }
    libraries(&target.join("release/build"), &folder)?;
    ensure!(!processors(&folder)?.is_empty(), "the build left no library for a processor");
    let archive = target.join(format!("{name}.tar.gz"));
    done(Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(&target).arg(&name))?;
    Ok((folder, archive))
}

/// Draws a picture with each processor's library of ggml alone, and at each level of the kernels, and compares them; a
/// line for each.
///
/// # Errors
/// A program fails other than by refusing this machine, pictures differ, or there is no library that this machine runs.
pub fn check(folder: &Path) -> Result<Vec<String>> {
    let lone = PathBuf::from(format!("{}-lone", folder.display()));
    let mut lines = Vec::new();
    let mut pictures: Vec<(String, Image)> = Vec::new();
    let mut refused = BTreeSet::new();
    for library in processors(folder)? {
        if lone.exists() {
            fs::remove_dir_all(&lone)?;
        }
        fs::create_dir_all(&lone)?;
        for file in fs::read_dir(folder)? {
            let file = file?.path();
            let name = name(&file);
            if !name.starts_with(PROCESSOR) || name == library {
                fs::copy(&file, lone.join(&name))?;
            }
        }
        match draw(&lone, "ggml")? {
            Some(picture) => pictures.push((library, picture)),
            None => drop(refused.insert(library)),
        }
    }
    fs::remove_dir_all(&lone)?;
    ensure!(!pictures.is_empty(), "no library is for this machine: {refused:?}");
    for level in ["portable", "avx2", "avx512", "avx512bf16"] {
        // A level that the machine lacks is a warning and another one.
        let picture = draw(folder, level)?.with_context(|| format!("SD_CPU={level} draws nothing"))?;
        pictures.push((format!("SD_CPU={level}"), picture));
    }
    let (first, rest) = pictures.split_first().context("no picture")?;
    lines.push(format!("{}: drew", first.0));
    for (name, picture) in rest {
        let apart = apart(&first.1, picture)?;
        ensure!(apart < LEVELS, "{name} is {apart:.2} levels from {}", first.0);
        lines.push(format!("{name}: {apart:.2} levels from the first"));
    }
    lines.extend(refused.into_iter().map(|library| format!("{library}: not for this machine")));
    Ok(lines)
}

const PROCESSOR: &str = "libggml-cpu-";

/// The libraries for processors in the folder.
fn processors(folder: &Path) -> Result<Vec<String>> {
    let mut found: Vec<String> =
        fs::read_dir(folder)?.map(|file| Ok(name(&file?.path()))).collect::<Result<_>>()?;
    found.retain(|name| name.starts_with(PROCESSOR));
    found.sort();
    Ok(found)
}

/// Copies the libraries of the newest build of ggml below `build`, under the names that programs look for.
fn libraries(build: &Path, to: &Path) -> Result<()> {
    let mut builds = Vec::new();
    for entry in fs::read_dir(build)? {
        let out = entry?.path().join("out");
        if out.join("backends").is_dir() {
            builds.push((fs::metadata(&out)?.modified()?, out));
        }
    }
    let (_, out) = builds.into_iter().max().with_context(|| format!("no ggml below {}", build.display()))?;
    for part in ["lib", "lib64", "backends"] {
        let Ok(files) = fs::read_dir(out.join(part)) else { continue };
        for file in files {
            let file = file?.path();
            let name = name(&file);
            // Programs ask for `libggml.so.0`; what follows in longer names is the version.
            let wanted = name.ends_with(".so") && part == "backends"
                || name.rsplit_once(".so.").is_some_and(|(_, version)| version.parse::<u32>().is_ok());
            if wanted {
                fs::copy(&file, to.join(&name)).with_context(|| file.display().to_string())?;
            }
        }
    }
    Ok(())
}

/// The picture that the program in `folder` draws with kernels `level`; none if its libraries refuse this machine.
fn draw(folder: &Path, level: &str) -> Result<Option<Image>> {
    let out = PathBuf::from(format!("{}.png", folder.display()));
    let mut command = Command::new(folder.join(PROGRAMS[0]));
    let command = command.args(PROMPT).arg("-o").arg(&out).env("SD_CPU", level).env_remove("LD_LIBRARY_PATH");
    let result = command.output().with_context(|| format!("run {}", folder.display()))?;
    let text = String::from_utf8_lossy(&result.stderr);
    if !result.status.success() {
        ensure!(text.contains(NO_PROCESSOR), "{} with SD_CPU={level}: {}\n{text}", folder.display(), result.status);
        return Ok(None);
    }
    let bytes = fs::read(&out)?;
    fs::remove_file(&out)?;
    Ok(Some(Image::decode(&bytes)?))
}

/// What the programs say if no library runs here.
const NO_PROCESSOR: &str = "no library of ggml beside the program is for this machine";

fn apart(a: &Image, b: &Image) -> Result<f64> {
    ensure!(a.rgb().len() == b.rgb().len(), "the sizes differ");
    let sum: f64 = a.rgb().iter().zip(b.rgb()).map(|(a, b)| f64::from(a.abs_diff(*b))).sum();
    Ok(sum / a.rgb().len() as f64)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn done(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
