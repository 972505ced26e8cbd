//! What scripts use: presets, many prompts for one load, results as data, plans without work, workers.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use support::{files, folder, sd_cli};

/// The fewest steps on the smallest picture.
const QUICK: &[&str] = &["--steps", "1", "-W", "64", "-H", "64"];

fn quick(folder: &Path, args: &[&str]) -> support::Run {
    sd_cli(folder, &[QUICK, args].concat())
}

fn objects(stdout: &str) -> Vec<Value> {
    stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn presets_come_before_the_command_line() {
    let folder = folder("automation-config");
    let toml = "prompt = 'a blue square'\nsteps = 2\nwidth = 64\nheight = 64\ncfg_scale = 3.5\njson = true\nverbose = false\n";
    std::fs::write(folder.join("p.toml"), toml).unwrap();
    let run = sd_cli(&folder, &["--config", "p.toml", "--steps", "1", "-s", "7"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let told = &objects(&run.stdout)[0];
    let p = &told["parameters"];
    assert_eq!((&p["steps"], &p["cfg_scale"], &p["prompt"]), (&1.into(), &3.5.into(), &"a blue square".into()));
    assert_eq!((&told["seed"], &told["width"], &told["file"]), (&7.into(), &64.into(), &"output.png".into()));
    assert!(told["seconds"].as_f64().unwrap() > 0.0);
    for (text, wants) in [
        ("stpes = 2", &["--config w.toml: ", "\"stpes\"", "did you mean steps?"][..]),
        ("steps = 'two'", &["--config w.toml: ", "--steps"]),
        ("steps = true", &["--config w.toml: ", "--steps"]),
        ("circular = 3", &["--config w.toml: ", "circular", "true or false"]),
        ("steps =", &["--config w.toml: "]),
        ("[a]\nsteps = 1", &["--config w.toml: ", "a: want a text"]),
        ("config = 'other'", &["--config w.toml: ", "\"config\""]),
        ("temporal-tiling = true", &["--temporal-tiling is not supported yet"]),
    ] {
        std::fs::write(folder.join("w.toml"), text).unwrap();
        let run = sd_cli(&folder, &["--config", "w.toml"]);
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{text}");
        for want in wants {
            assert!(run.stderr.contains(want), "{text}: {}", run.stderr);
        }
    }
    let run = sd_cli(&folder, &["--config", "none.toml"]);
    assert!(run.code == Some(1) && run.stderr.contains("--config none.toml"), "{}", run.stderr);
}

#[test]
fn a_file_of_prompts_is_drawn_with_one_load() {
    let folder = folder("automation-prompts");
    std::fs::write(folder.join("p.txt"), "a red circle\n\n  a blue square \r\n").unwrap();
    let args = ["--prompts-file", "p.txt", "-b", "2", "-o", "x/%02d.png", "--json", "-v"];
    let run = quick(&folder, &args);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(files(&folder.join("x")), ["00.png", "01.png", "02.png", "03.png"]);
    let told: Vec<(String, String, i64)> = objects(&run.stdout)
        .iter()
        .map(|o| {
            let text = |v: &Value| v.as_str().unwrap().replace('\\', "/");
            (text(&o["file"]), text(&o["parameters"]["prompt"]), o["seed"].as_i64().unwrap())
        })
        .collect();
    let want = [
        ("x/00.png", "a red circle", 42),
        ("x/01.png", "a red circle", 43),
        ("x/02.png", "a blue square", 42),
        ("x/03.png", "a blue square", 43),
    ];
    assert_eq!(told, want.map(|(file, prompt, seed)| (file.to_owned(), prompt.to_owned(), seed)));
    assert_eq!(run.stderr.matches("using the built-in demo model").count(), 1);
    // A line gives what it would give alone.
    let alone = quick(&folder, &["-p", "a blue square", "-s", "43", "-o", "alone.png"]);
    assert_eq!(alone.code, Some(0), "{}", alone.stderr);
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert!(bytes("alone.png") == bytes("x/03.png"));

    let mut child = Command::new(env!("CARGO_BIN_EXE_sd-cli"))
        .args(QUICK)
        .args(["-t", "1", "--prompts-file", "-", "-o", "in.png"])
        .current_dir(&folder)
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"a blue square\na red circle").unwrap();
    assert!(child.wait().unwrap().success());
    assert!(files(&folder).contains(&"in_1.png".to_owned()), "{:?}", files(&folder));

    std::fs::write(folder.join("empty.txt"), "\n \n").unwrap();
    for (file, want) in [("empty.txt", "holds no prompt"), ("none.txt", "none.txt")] {
        let run = quick(&folder, &["--prompts-file", file]);
        assert!(run.code == Some(1) && run.stderr.contains("--prompts-file") && run.stderr.contains(want));
    }
}

#[test]
fn a_dry_run_says_what_would_be_where() {
    let folder = folder("automation-dry");
    let run = quick(&folder, &["--dry-run", "--type", "f16", "--backend", "cpu", "--params-backend", "te=disk"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let rows: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!(rows[0], ["part", "computes on", "weights in", "weights MB", "workspace MB", "pieces"]);
    let of = |part: &str| rows.iter().find(|row| row[0].contains(part)).unwrap().clone();
    assert_eq!(of("diffusion")[1..3], ["CPU", "CPU"]);
    assert_eq!(of("text encoder")[1..3], ["CPU", "disk"]);
    let number = |text: &str| text.parse::<f64>().unwrap();
    // The network's tensors are f16 in the file; vectors become f32, which are few.
    let bytes = std::fs::read(support::DEMO).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..end]).unwrap();
    let network = header.iter().filter(|(name, _)| name.starts_with("model.diffusion_model."));
    let size = |t: &Value| t["data_offsets"][1].as_f64().unwrap() - t["data_offsets"][0].as_f64().unwrap();
    let stored = network.map(|(_, t)| size(t)).sum::<f64>() / 1e6;
    let weights = number(of("diffusion")[3]);
    assert!(weights >= stored && weights < 1.05 * stored, "{weights} {stored}");
    assert!(rows[1..].iter().all(|row| number(row[4]) > 0.0), "{rows:?}");
    // From disk, weights come and go piece by piece.
    assert_eq!((of("diffusion")[5], of("VAE")[5]), ("1", "1"), "{rows:?}");
    assert!(number(of("text encoder")[5]) > 1.0, "{rows:?}");
    assert_eq!(files(&folder), [""; 0]);
    let run = quick(&folder, &["--dry-run", "--backend", "cpu", "--max-vram", "cpu=1e-6"]);
    assert!(run.code == Some(1) && run.stderr.contains("--max-vram"), "{}", run.stderr);
}

#[test]
fn a_trace_has_what_was_loaded_and_computed() {
    let folder = folder("automation-trace");
    let run = quick(&folder, &["--trace", "t.json", "--backend", "cpu", "--type", "f16"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let trace: Value = serde_json::from_slice(&std::fs::read(folder.join("t.json")).unwrap()).unwrap();
    let events = trace.as_array().or_else(|| trace["traceEvents"].as_array()).unwrap();
    let spans = events.iter().filter(|e| e["ph"] == "X").count();
    assert!(spans >= 6, "three networks load and compute: {events:?}");
    let run = quick(&folder, &["--trace", "no/such/folder/t.json"]);
    assert!(run.code == Some(1) && run.stderr.contains("--trace no/such/folder"), "{}", run.stderr);
}

#[test]
fn completions_know_the_options() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let run = sd_cli(Path::new("."), &["--completions", shell]);
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        assert!(run.stdout.contains("params-backend") && !run.stdout.contains("high-noise-steps"), "{shell}");
    }
}

#[test]
fn options_that_are_always_so_are_accepted() {
    let folder = folder("automation-always");
    let always = [
        "--mmap",
        "--fa",
        "--diffusion-fa",
        "--diffusion-conv-direct",
        "--vae-conv-direct",
        "--force-sdxl-vae-conv-scale",
        "--offload-to-cpu",
        "--clip-on-cpu",
        "--vae-on-cpu",
        "--control-net-cpu",
        "--disable-prefetch",
        "--disable-segmented-compute",
        "--auto-fit",
        "off",
        "-v",
    ];
    let run = quick(&folder, &always);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    for option in &always[..6] {
        assert!(run.stderr.contains(&format!("{option} changes nothing: ")), "{option}: {}", run.stderr);
    }
    assert!(!run.stderr.contains("WARN"), "{}", run.stderr);
    assert_eq!(files(&folder), ["output.png"]);
}

/// A worker process; it ends with this value.
struct Worker(Child, String);

impl Worker {
    fn start(args: &[&str]) -> Worker {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let mut child = Command::new(env!("CARGO_BIN_EXE_sd-cli"))
            .args(["rpc-worker", "--port", &port, "--threads", "1"])
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("serving CPU at 127.0.0.1") && line.contains("without authentication"), "{line}");
        Worker(child, format!("127.0.0.1:{port}"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_worker_serves_the_processor() {
    let folder = folder("automation-worker");
    let worker = Worker::start(&["--device", "cpu"]);
    let list = (0..100)
        .find_map(|_| {
            let run = sd_cli(&folder, &["--rpc-servers", &worker.1, "--list-devices"]);
            std::thread::sleep(std::time::Duration::from_millis(100));
            (run.code == Some(0)).then_some(run.stdout)
        })
        .unwrap();
    let remote: Vec<&str> = list.lines().find(|line| line.starts_with("RPC0\t")).unwrap().split('\t').collect();
    assert_eq!(remote[1], worker.1);
    assert!(remote[2].ends_with(" MiB free"), "{list}");
    let run = quick(&folder, &["--rpc-servers", &worker.1, "--backend", "rpc0", "--params-backend", "te=disk"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("on RPC0"), "{}", run.stderr);
    // Found by itself, as it is of the type of GPUs.
    let run = quick(&folder, &["--rpc-servers", &worker.1, "-o", "fit.png"]);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("auto-fit: RPC0: free") && run.stderr.contains("on RPC0"), "{}", run.stderr);
    let bytes = |name: &str| std::fs::read(folder.join(name)).unwrap();
    assert!(bytes("output.png") == bytes("fit.png"));
    let run = sd_cli(&folder, &["rpc-worker"]);
    assert_eq!(run.code, Some(1), "--threads comes first there: {}", run.stderr);
    for (args, want) in [(&["--device", "heron7"][..], "heron7"), (&["--port", "0"], "--port")] {
        let out = Command::new(env!("CARGO_BIN_EXE_sd-cli")).arg("rpc-worker").args(args).output().unwrap();
        assert!(!out.status.success() && String::from_utf8(out.stderr).unwrap().contains(want));
    }
}
