//! What a model of real size takes on a device with less memory than it has weights. The device is a worker process on
//! loopback, so that its memory is what the system says of that process.

use anyhow::{Context, Result, bail, ensure};
use sd_runtime::{
    CancelToken, Device, Engine, ErrorKind, ImageRequest, Observer, Progress, add_rpc_server, serve_rpc,
};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// GiB that the device may have.
const BUDGETS: [f64; 4] = [4.0, 1.0, 0.5, 0.35];
/// What the worker may take beside what its client asked for.
const SLACK: u64 = 64 << 20;

/// Draws with SD 1.5's network from `checkpoint` under each budget, weights read from the file whenever they are needed,
/// and returns a line for each.
///
/// # Errors
/// A budget is exceeded, a picture differs, or a budget that is too small is only found when something was computed.
pub fn run(checkpoint: &Path) -> Result<Vec<String>> {
    if !cfg!(target_os = "linux") {
        return Ok(vec!["memory of a worker: skipped, this system does not say what a process takes".to_owned()]);
    }
    let mut lines = Vec::new();
    let mut first: Option<Vec<u8>> = None;
    for budget in BUDGETS {
        // One of its own, as what was there before would hide what comes.
        let worker = Worker::start()?;
        let name = add_rpc_server(&worker.endpoint)?.first().context("no device")?.name().to_owned();
        let base = worker.memory("VmRSS")?;
        let begun = Instant::now();
        let mut log = Log::default();
        let drawn = draw(checkpoint, &name, budget, &mut log);
        let seconds = begun.elapsed().as_secs_f64();
        let peak = worker.memory("VmHWM")?.saturating_sub(base);
        let mib = |bytes: u64| bytes >> 20;
        let allowed = (budget * (1u64 << 30) as f64) as u64;
        match drawn {
            Ok(rgb) => {
                ensure!(peak <= allowed + SLACK, "under {budget} GiB the worker took {} MiB", mib(peak));
                ensure!(first.get_or_insert_with(|| rgb.clone()) == &rgb, "under {budget} GiB the picture differs");
                lines.push(format!("SD 1.5 under {budget} GiB: the worker took {} MiB, {seconds:.0} s", mib(peak)));
            }
            Err(e) if matches!(e.kind(), ErrorKind::Device(_) | ErrorKind::Request(_)) => {
                ensure!(!log.worked, "under {budget} GiB it fails only after some work: {e}");
                lines.push(format!("SD 1.5 under {budget} GiB: refused before any work: {e}"));
            }
            Err(e) => bail!("under {budget} GiB: {e}"),
        }
    }
    ensure!(first.is_some(), "no budget was enough");
    Ok(lines)
}

fn draw(checkpoint: &Path, device: &str, budget: f64, log: &mut Log) -> sd_core::Result<Vec<u8>> {
    let builder = Engine::builder().model(checkpoint).backend(device).params_backend("disk");
    let mut engine = builder.max_vram(budget.to_string()).build()?;
    let (side, steps) = (Some(256), Some(2));
    let request = ImageRequest {
        prompt: "a lighthouse at dusk".into(),
        width: side,
        height: side,
        steps,
        ..Default::default()
    };
    let images = engine.generate(&request, log, &CancelToken::new())?;
    Ok(images.into_iter().next().map(|image| image.rgb).unwrap_or_default())
}

/// Whether a step was taken.
#[derive(Default)]
struct Log {
    worked: bool,
}

impl Observer for Log {
    fn progress(&mut self, progress: Progress) {
        self.worked |= progress.step > 0;
    }
}

/// Serves the processor at `endpoint`; the worker's side.
///
/// # Errors
/// The endpoint is malformed or taken.
pub fn serve(endpoint: &str) -> Result<()> {
    Ok(serve_rpc(endpoint, 0, &[Device::find("cpu")?])?)
}

/// The worker process, which is this program once more; it ends with the value.
struct Worker {
    child: Child,
    endpoint: String,
}

impl Worker {
    fn start() -> Result<Worker> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let endpoint = format!("127.0.0.1:{port}");
        let child = Command::new(std::env::current_exe()?)
            .args(["serve", &endpoint])
            // The GNU C library otherwise keeps what was freed, up to 32 MiB at a time.
            .env("MALLOC_MMAP_THRESHOLD_", "65536")
            .stdout(Stdio::null())
            .spawn()
            .context("start the worker")?;
        let worker = Worker { child, endpoint };
        let deadline = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(&worker.endpoint).is_err() {
            ensure!(Instant::now() < deadline, "the worker does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(worker)
    }

    /// A line of its status, in bytes.
    fn memory(&self, key: &str) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        let kib = line.and_then(|text| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
        kib.map(|kib| kib << 10).with_context(|| format!("the worker's status has no {key}"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
