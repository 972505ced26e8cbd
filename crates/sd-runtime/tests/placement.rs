//! Where modules compute and where weights are changes no picture, and what does not fit is said before the work.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use sd_core::trace::{Event, EventKind};
use sd_runtime::{
    DType, Device, Engine, EngineBuilder, ImageRequest, Precision, SamplerKind, Trace, add_rpc_server, serve_rpc,
};
use support::{Log, generate, remote_device, sd1};

/// One test at a time: they look at what is on a device.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn checkpoint() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| sd1::write("placement-sd1.safetensors", |_, _| {}))
}

fn builder() -> EngineBuilder {
    Engine::builder().model(checkpoint()).threads(1)
}

fn request() -> ImageRequest {
    ImageRequest {
        prompt: "a (red:1.3) circle".into(),
        steps: Some(2),
        sampler: Some(SamplerKind::EulerA),
        ..support::oracle_request("sd1_pipeline.safetensors")
    }
}

fn gib(bytes: usize) -> String {
    format!("{}", bytes as f64 / (1u64 << 30) as f64)
}

/// Homes of weights, and from everything down, budgets of the device.
#[test]
fn places_and_budgets_change_no_picture() {
    let _alone = alone();
    let name = remote_device();
    let device = Device::find(name).unwrap();
    let draw = |builder: EngineBuilder| {
        device.reset_peak();
        let before = device.held().0;
        let mut engine = builder.build()?;
        let images = generate(&mut engine, &request(), &mut Log::default())?;
        let report = engine.memory();
        drop(engine);
        assert_eq!(device.held().0, before, "something stays on the device");
        Ok::<_, sd_runtime::Error>((images.into_iter().next().unwrap().rgb, device.held().1 - before, report))
    };
    let (want, whole, _) = draw(builder().backend(name)).unwrap();
    for params in ["cpu", "disk", "te=disk,vae=cpu", name] {
        let (got, _, report) = draw(builder().backend(name).params_backend(params)).unwrap();
        assert!(got == want, "{params}");
        let home = |module: &str| report.modules.iter().find(|m| m.module == module).unwrap().home.clone();
        let network = home("diffusion network");
        assert_eq!(
            network,
            if params == "cpu" {
                "ram"
            } else if params == "disk" {
                "disk"
            } else {
                name
            }
        );
    }
    let mut budget = whole;
    let mut cut = 0;
    let refused = loop {
        let builder = builder().backend(name).params_backend("disk").max_vram(gib(budget));
        match draw(builder) {
            Ok((got, peak, _)) => {
                assert!(got == want, "{budget} bytes");
                assert!(peak <= budget, "{peak} of {budget} bytes");
                cut += 1;
            }
            Err(e) => break e.to_string(),
        }
        budget -= budget / 5;
    };
    assert!(cut >= 2, "only {cut} budgets of {whole} bytes were enough");
    assert!(refused.contains("--max-vram") && refused.contains(name), "{refused}");
}

/// An autoencoder that does not fit works in pieces, as small as they have to be.
#[test]
fn a_picture_that_does_not_fit_is_made_in_pieces() {
    let _alone = alone();
    let name = remote_device();
    let device = Device::find(name).unwrap();
    let request = ImageRequest { width: Some(256), height: Some(192), steps: Some(1), ..request() };
    let draw = |limit: String| {
        device.reset_peak();
        let mut log = Log::default();
        let mut engine = builder().backend(name).params_backend("disk").max_vram(limit).build()?;
        let images = generate(&mut engine, &request, &mut log)?;
        Ok::<_, sd_runtime::Error>((images.into_iter().next().unwrap().rgb, log.warnings, device.held().1))
    };
    let (want, none, whole) = draw("0".to_owned()).unwrap();
    assert!(none.is_empty(), "{none:?}");
    let mut pieces = std::collections::BTreeSet::new();
    let mut budget = whole;
    while let Ok((got, warnings, peak)) = draw(gib(budget)) {
        assert!(peak <= budget, "{peak} of {budget}");
        let most = got.iter().zip(&want).map(|(a, b)| a.abs_diff(*b)).max();
        assert!(most <= Some(1), "{most:?} levels away: {warnings:?}");
        pieces.extend(warnings);
        budget -= budget / 4;
    }
    assert!(!pieces.is_empty() && pieces.iter().all(|w| w.contains("is done in pieces of ")), "{pieces:?}");
}

/// From the second step on nothing is planned, lowered, allocated or loaded that memory has room for.
#[test]
fn steps_do_nothing_twice() {
    const STEPS: usize = 4;
    let _alone = alone();
    let name = remote_device();
    let request = ImageRequest { steps: Some(STEPS as u32), sampler: Some(SamplerKind::Euler), ..request() };
    let draw = |builder: EngineBuilder| {
        let trace = Trace::new();
        let mut engine = builder.backend(name).trace(trace.clone()).build().unwrap();
        generate(&mut engine, &request, &mut Log::default()).unwrap();
        let events: Vec<Event> = trace.events().into_iter().filter(|e| &*e.module == "diffusion network").collect();
        let computed: Vec<usize> = (0..events.len()).filter(|&i| events[i].kind == EventKind::Compute).collect();
        // What happened after the first step's last segment, until the last step's.
        let segments = computed.len() / STEPS;
        assert_eq!(computed.len(), STEPS * segments);
        let report = engine.memory();
        let module = report.modules.iter().find(|m| m.module == "diffusion network").unwrap();
        (events[computed[segments - 1] + 1..=computed[STEPS * segments - 1]].to_vec(), segments, module.weights)
    };
    let of = |events: &[Event], kinds: &[EventKind]| -> Vec<usize> {
        events.iter().filter(|e| kinds.contains(&e.kind)).map(|e| e.bytes).collect()
    };
    use EventKind::{Evict, Load, Plan, Prefetch, Workspace};
    let (events, segments, weights) = draw(builder());
    assert_eq!((segments, of(&events, &[Load, Prefetch, Evict, Plan, Workspace])), (1, Vec::new()));

    let (events, segments, _) = draw(builder().params_backend("cpu").max_vram(gib(weights * 4 / 5)));
    assert!(segments > 2);
    assert!(of(&events, &[Plan, Workspace]).is_empty());
    let moved: usize = of(&events, &[Load, Prefetch]).iter().sum();
    assert!(moved > 0 && moved < weights * (STEPS - 1) * 3 / 4, "{moved} of {weights} in {} steps", STEPS - 1);
}

#[test]
fn what_cannot_fit_is_said_before_the_work() {
    let _alone = alone();
    let name = remote_device();
    for (builder, want) in [
        (builder().backend(name).max_vram("1e-6"), "--max-vram"),
        (builder().backend(name).max_vram("1e-6").segmented(false), "budget 1.0 KiB"),
    ] {
        let mut log = Log::default();
        let mut engine = builder.build().unwrap();
        let e = generate(&mut engine, &request(), &mut log).unwrap_err().to_string();
        assert!(e.contains(want), "{e}");
        assert!(log.latents.is_empty());
    }
}

#[test]
fn wrong_places_are_found_before_files_are_opened() {
    let _alone = alone();
    let none = || Engine::builder().model("no/such/file.safetensors");
    for (builder, want) in [
        (none().backend("lora=cpu"), "--backend lora=cpu: there is no module \"lora\""),
        (none().backend("cuda9"), "--backend: there is no device \"cuda9\""),
        (none().params_backend("te=a&b"), "--params-backend te=a&b: weights are kept in one place"),
        (none().split_mode("column"), "--split-mode column: \"column\", want layer or row"),
        (none().max_vram("much"), "--max-vram much: want a number of GiB"),
        (none().max_vram("cuda9=2"), "--max-vram: there is no device \"cuda9\""),
    ] {
        let e = builder.build().unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
    }
}

#[test]
fn modules_compute_on_devices_of_their_own() {
    let _alone = alone();
    let name = remote_device();
    // The processor would multiply bf16 otherwise, which the other device does not.
    let engine =
        |builder: EngineBuilder| builder.precision(Precision::F32).weight_type(DType::F32).build().unwrap();
    let cpu = generate(&mut engine(builder().backend("cpu")), &request(), &mut Log::default()).unwrap();
    let mut mixed = engine(builder().backend(format!("{name},te=cpu,vae=cpu")));
    assert_eq!(mixed.info().device, name);
    let got = generate(&mut mixed, &request(), &mut Log::default()).unwrap();
    let db = support::psnr(&got[0].rgb, &cpu[0].rgb);
    assert!(db >= 60.0, "{db:.1} dB");
    let devices: Vec<String> = mixed.memory().devices.iter().map(|d| d.device.clone()).collect();
    assert!(devices.contains(&"CPU".to_owned()) && devices.contains(&name.to_owned()), "{devices:?}");
    let eager = builder().backend(name).eager_load(true).build().unwrap();
    let loaded = eager.memory().modules.iter().map(|m| (m.resident, m.weights)).collect::<Vec<_>>();
    assert!(loaded.iter().all(|(resident, weights)| resident == weights && *weights > 0), "{loaded:?}");
}

/// Where nothing listens.
fn free_endpoint() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// A worker in a process of its own, which is this test's program once more.
struct Worker(Child);

impl Worker {
    fn start(endpoint: &str) -> Worker {
        // A copy of a connection of this process would keep it open when ggml closes it.
        let close = r#"for fd in /proc/self/fd/*; do n=${fd##*/}; ((n < 3)) || eval "exec $n>&-"; done; exec "$@""#;
        let worker = Worker(
            Command::new("bash")
                .args(["-c", close, "bash"])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", "serves_when_asked"])
                .env("SD_TEST_SERVE", endpoint)
                .stdout(Stdio::null())
                .spawn()
                .unwrap(),
        );
        for _ in 0..1000 {
            if TcpStream::connect(endpoint).is_ok() {
                return worker;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("no worker at {endpoint}");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The worker's side of [`Worker`]; without the variable there is nothing to do.
#[test]
fn serves_when_asked() {
    if let Ok(endpoint) = std::env::var("SD_TEST_SERVE") {
        panic!("{}", serve_rpc(&endpoint, 1, &[Device::find("cpu").unwrap()]).unwrap_err());
    }
}

#[test]
fn an_engine_connects_again_to_a_worker_that_was_lost() {
    let _alone = alone();
    let endpoint = free_endpoint();
    let worker = Worker::start(&endpoint);
    let name = add_rpc_server(&endpoint).unwrap()[0].name().to_owned();
    let mut engine = builder().backend(name).build().unwrap();
    let first = generate(&mut engine, &request(), &mut Log::default()).unwrap();
    drop(worker);
    let other = ImageRequest { prompt: "another".into(), ..request() };
    for _ in 0..2 {
        let e = generate(&mut engine, &other, &mut Log::default()).unwrap_err().to_string();
        assert!(e.contains(&endpoint), "{e}");
    }
    let _worker = Worker::start(&endpoint);
    assert!(generate(&mut engine, &request(), &mut Log::default()).unwrap() == first);
    assert!(generate(&mut engine, &other, &mut Log::default()).is_ok());
}

#[test]
fn devices_share_a_network_that_none_has_room_for() {
    let _alone = alone();
    let (first, endpoint) = (remote_device(), free_endpoint());
    let mut worker = Worker::start(&endpoint);
    let second = add_rpc_server(&endpoint).unwrap()[0].name().to_owned();
    let both = format!("{first}&{second}");
    let engine = |limits: &str, trace: &Arc<Trace>| {
        builder().backend(format!("{first},dit={both},te={both}")).max_vram(limits).trace(trace.clone())
    };
    let mut whole = builder().backend(first).build().unwrap();
    let want = generate(&mut whole, &request(), &mut Log::default()).unwrap();
    let network = whole.memory().modules.iter().find(|m| m.module == "diffusion network").unwrap().weights;
    drop(whole);
    // The weights with a little for values, part of them, and so little that they come and go.
    for (a, b) in [(network * 2 / 3, network), (network, network / 2), (network / 2, network / 2)] {
        let trace = Trace::new();
        let limits = format!("{first}={},{second}={}", gib(a), gib(b));
        let mut engine = engine(&limits, &trace).split_mode("row").eager_load(true).build().unwrap();
        let loaded = engine.memory();
        let network = loaded.modules.iter().find(|m| m.module == "diffusion network").unwrap();
        assert!(network.resident > network.weights / 2, "{network:?}");
        assert!(generate(&mut engine, &request(), &mut Log::default()).unwrap() == want, "{limits}");
        let events = trace.events();
        let computed = |device: &str| {
            let of = |e: &&Event| {
                e.kind == EventKind::Compute && &*e.module == "diffusion network" && &*e.device == device
            };
            events.iter().filter(of).count()
        };
        assert!(computed(first) > 0 && computed(&second) > 0, "{limits}");
        let report = engine.memory();
        assert!(report.modules.iter().any(|m| m.home == both));
    }
    // One of them is lost, and comes back.
    let mut engine =
        engine(&format!("{first}={},{second}=1", gib(network * 2 / 3)), &Trace::new()).build().unwrap();
    assert!(generate(&mut engine, &request(), &mut Log::default()).unwrap() == want);
    drop(worker);
    let e = generate(&mut engine, &request(), &mut Log::default()).unwrap_err().to_string();
    assert!(e.contains(&endpoint), "{e}");
    worker = Worker::start(&endpoint);
    assert!(generate(&mut engine, &request(), &mut Log::default()).unwrap() == want);
    drop((engine, worker));
}
