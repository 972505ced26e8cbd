//! The commands of README and documentation run as they stand. Files of the demo model have the names of published ones
//! of their kind; a command that needs another one must find nothing to complain about but that it is missing.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::collections::HashMap;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;
use support::{doubler, files, folder, sd_cli, zeros};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Which of `assets` each published file is here.
const ASSETS: &[(&str, &[&str])] = &[
    (
        "demo.safetensors",
        &[
            "v1-5-pruned-emaonly.safetensors",
            "sd15.safetensors",
            "model.safetensors",
            "sdxl.safetensors",
            "flux.gguf",
            "large.gguf",
            "vae.safetensors",
        ],
    ),
    ("demo-edges.safetensors", &["control_v11p_sd15_canny.safetensors", "canny.safetensors", "depth.safetensors"]),
    ("demo-style.safetensors", &["loras/styles/ink.safetensors"]),
];

/// Options whose value is a model, or a part of one.
const MODELS: &[&str] =
    &["-m", "--model", "--diffusion-model", "--clip_l", "--clip_g", "--t5xxl", "--vae", "--refiner"];

/// The machine of the documentation's RPC worker, which is this one here.
const MACHINE: &str = "192.168.1.5";

/// The commands of a page that begin with `sd-cli`, lines that go on joined and variables in place of their names.
fn commands(page: &str) -> Vec<String> {
    let (mut inside, mut commands, mut line) = (false, Vec::new(), String::new());
    let mut variables = HashMap::<String, String>::new();
    for text in page.lines() {
        if text.starts_with("```") {
            inside = text == "```sh";
            continue;
        }
        let Some(text) = Some(text).filter(|_| inside) else { continue };
        if let Some(begun) = text.strip_suffix('\\') {
            line.push_str(begun);
            continue;
        }
        let mut whole = std::mem::take(&mut line) + text;
        for (name, value) in &variables {
            whole = whole.replace(&format!("${name}"), value);
        }
        if let Some((name, value)) = whole.split_once("=\"").filter(|(name, _)| !name.contains(' ')) {
            variables.insert(name.to_owned(), value.trim_end_matches('"').to_owned());
        }
        let whole = whole.strip_prefix("target/release/").unwrap_or(&whole);
        if whole.starts_with("sd-cli ") {
            commands.push(whole.to_owned());
        }
    }
    commands
}

/// The arguments of a command, quotes taken off; nothing of a comment, and not where its output goes.
fn arguments(command: &str) -> Vec<String> {
    let (mut all, mut word, mut quoted) = (Vec::new(), None::<String>, false);
    for c in command.chars() {
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '#' | '>' if !quoted && word.is_none() => break,
            ' ' if !quoted => all.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    all.extend(word);
    all.into_iter().skip(1).collect()
}

/// `README.md` and every page below `docs`.
fn pages() -> Vec<PathBuf> {
    let below = |folder: &str| {
        let files = fs::read_dir(Path::new(ROOT).join(folder)).unwrap().map(|e| e.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|e| e == "md")).collect::<Vec<_>>()
    };
    let mut pages = [below("docs"), below("docs/models"), vec![Path::new(ROOT).join("README.md")]].concat();
    pages.sort();
    pages
}

/// Files of the repository that commands may name: below a folder, once for all pages.
fn repository() -> PathBuf {
    let root = folder("docs");
    for inner in ["assets", "docs/images"] {
        fs::create_dir_all(root.join(inner)).unwrap();
        for file in fs::read_dir(Path::new(ROOT).join(inner)).unwrap().map(|e| e.unwrap().path()) {
            fs::copy(&file, root.join(inner).join(file.file_name().unwrap())).unwrap();
        }
    }
    root
}

/// A folder with all that the commands of a page may name.
fn prepared(repository: &Path, name: &str, page: &str) -> PathBuf {
    let folder = folder(&format!("docs-{name}"));
    for inner in ["assets", "docs/images", "loras/styles", "embeddings", "out"] {
        fs::create_dir_all(folder.join(inner)).unwrap();
    }
    let link = |from: PathBuf, name: &str| fs::hard_link(from, folder.join(name)).unwrap();
    for inner in ["assets", "docs/images"] {
        for file in files(&repository.join(inner)) {
            link(repository.join(inner).join(&file), &format!("{inner}/{file}"));
        }
    }
    for (asset, names) in ASSETS {
        names.iter().for_each(|name| link(repository.join("assets").join(asset), name));
    }
    doubler(&folder.join("RealESRGAN_x4plus.pth"));
    zeros(&folder.join("embeddings/easynegative.safetensors"), &[("emb_params", &[2, 64])]);
    for name in ["photo.png", "edges.png", "depth.png", "mask.png", "cat.png", "room.png", "sofa.png"] {
        let photo = sd_io::Image::new(64, 64, vec![90; 64 * 64 * 3]).unwrap();
        photo.save(folder.join(name), 90, None).unwrap();
    }
    fs::write(folder.join("ideas.txt"), "a red circle\na blue heart\n").unwrap();
    if let Some((_, preset)) = page.split_once("```toml\n") {
        fs::write(folder.join("sdxl.toml"), preset.split("```").next().unwrap()).unwrap();
    }
    folder
}

/// A worker that other commands of the page use. It ends with this value.
struct Worker(Child);

impl Worker {
    /// Starts it, and says where it listens.
    fn start(arguments: &[String]) -> (Worker, String) {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let worker = Command::new(env!("CARGO_BIN_EXE_sd-cli"))
            .args(arguments.iter().map(|a| a.replace(MACHINE, "127.0.0.1")))
            .args(["--threads", "1", "--port", &address.port().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let worker = Worker(worker.unwrap());
        let listens = |_| {
            std::thread::sleep(Duration::from_millis(50));
            TcpStream::connect(address).is_ok()
        };
        assert!((0..400).any(listens), "{arguments:?} does not listen at {address}");
        (worker, address.to_string())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the options of these names are given.
fn values<'a>(arguments: &'a [String], names: &'a [&str]) -> impl Iterator<Item = &'a String> {
    arguments.windows(2).filter(|pair| names.contains(&pair[0].as_str())).map(|pair| &pair[1])
}

/// How many commands ran, how many lacked a model or a device, and what the others said.
#[derive(Default)]
struct Counts {
    ran: usize,
    lacked: usize,
    failed: Vec<String>,
}

impl Counts {
    /// Runs the command. Unless it runs to its end and writes its files, it must name the model or the device that is not
    /// here.
    fn run(&mut self, folder: &Path, command: &str, arguments: &[String]) {
        let done = sd_cli(folder, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let missing: Vec<&String> = values(arguments, MODELS).filter(|file| !folder.join(file).exists()).collect();
        let written = || {
            let one = |output: &&String| values(arguments, &["-b"]).next().is_none() && !output.contains('%');
            values(arguments, &["-o", "--trace", "--imat-out"]).filter(one).all(|o| folder.join(o).is_file())
        };
        let mut absent = missing.iter().map(|file| file.trim_end_matches('/')).chain(["CUDA0"]);
        if done.code == Some(0) && written() {
            self.ran += 1;
        } else if done.code == Some(1)
            && missing.iter().all(|file| !file.starts_with("assets/"))
            && absent.any(|word| command.contains(word) && done.stderr.contains(word))
        {
            self.lacked += 1;
        } else {
            self.failed.push(format!("{}: {command}\n{}", folder.display(), done.stderr));
        }
    }
}

/// Runs a page's commands, one after the other in one folder.
fn check(repository: &Path, page: &Path, counts: &mut Counts) {
    let name = page.file_stem().unwrap().to_str().unwrap();
    let text = fs::read_to_string(page).unwrap();
    let commands: Vec<(String, Vec<String>)> =
        commands(&text).into_iter().map(|command| (command.clone(), arguments(&command))).collect();
    if commands.is_empty() {
        return;
    }
    let folder = prepared(repository, name, &text);
    let worker = |arguments: &Vec<String>| arguments.first().is_some_and(|a| a == "rpc-worker");
    let serving = commands.iter().find(|(_, a)| worker(a)).map(|(_, a)| Worker::start(a));
    for (command, mut arguments) in commands.into_iter().filter(|(_, a)| !worker(a)) {
        for argument in &mut arguments {
            if let Some((_, address)) = serving.as_ref().filter(|_| argument.starts_with(MACHINE)) {
                *argument = address.clone();
            }
        }
        counts.run(&folder, &command, &arguments);
    }
}

#[test]
fn commands_run() {
    let (pages, repository) = (Mutex::new(pages()), repository());
    let next = || {
        let mut counts = Counts::default();
        while let Some(page) = { pages.lock().unwrap().pop() } {
            check(&repository, &page, &mut counts);
        }
        counts
    };
    let [a, b] = std::thread::scope(|scope| [scope.spawn(next), scope.spawn(next)].map(|t| t.join().unwrap()));
    let failed = [a.failed, b.failed].concat();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let (ran, lacked) = (a.ran + b.ran, a.lacked + b.lacked);
    assert!(ran >= 45 && lacked <= 30, "{ran} commands ran, {lacked} lacked a model");
    let previews = Path::new(env!("CARGO_TARGET_TMPDIR")).join("docs-previews");
    for step in ["step-00.png", "step-19.png", "preview.png"] {
        assert!(previews.join(step).is_file(), "{step}");
    }
}
