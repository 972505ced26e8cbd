//! What many requests on one engine leave behind.

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sd_runtime::{CancelToken, Engine, ImageRequest, InputImage, Observer, Progress, SamplerKind};
use support::{Log, generate};

/// One test at a time: they measure time and memory of the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn engine() -> Engine {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo.safetensors");
    Engine::builder().model(demo).device("cpu").threads(1).build().unwrap()
}

fn request(side: u32, steps: u32) -> ImageRequest {
    let prompt = "a red circle on a blue background".to_owned();
    ImageRequest { prompt, width: Some(side), height: Some(side), steps: Some(steps), ..Default::default() }
}

/// Moments are fractions of the time a request takes by the golden ratio, so that they fall into every stage.
#[test]
fn a_request_stopped_at_any_moment_leaves_no_trace() {
    let _alone = alone();
    let mut engine = engine();
    let first = request(64, 4);
    let fresh = generate(&mut engine, &first, &mut Log::default()).unwrap();
    let begin = Instant::now();
    generate(&mut engine, &first, &mut Log::default()).unwrap();
    let whole = begin.elapsed();
    let mut stopped = 0;
    for moment in 0..50 {
        let share = (f64::from(moment) * 0.618_034).fract();
        let token = CancelToken::new();
        let stop = token.clone();
        // Text that was encoded before is not encoded again.
        let request = ImageRequest { prompt: format!("a green star {moment}"), ..first.clone() };
        let stopper = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs_f64(whole.as_secs_f64() * share));
            stop.cancel();
        });
        match engine.generate(&request, &mut Log::default(), &token) {
            Ok(images) => assert_eq!(images.len(), 1),
            Err(e) => {
                assert!(e.is_cancelled(), "at {share:.2}: {e}");
                stopped += 1;
            }
        }
        stopper.join().unwrap();
        if moment % 10 == 9 {
            assert_eq!(generate(&mut engine, &first, &mut Log::default()).unwrap(), fresh);
        }
    }
    assert!(stopped >= 20, "only {stopped} of 50 requests were stopped");
}

/// Cuts a file when a step begins.
#[cfg(unix)]
struct Cuts<'a> {
    path: &'a std::path::Path,
    step: usize,
    to: u64,
}

#[cfg(unix)]
impl Observer for Cuts<'_> {
    fn progress(&mut self, progress: Progress) {
        if progress.step == self.step {
            std::fs::File::options().write(true).open(self.path).unwrap().set_len(self.to).unwrap();
        }
    }
}

/// The processor computes with weights where the file is mapped.
#[cfg(unix)]
#[test]
fn a_file_that_is_cut_while_it_is_used_is_an_error_until_it_is_whole_again() {
    let _alone = alone();
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo.safetensors");
    let content = std::fs::read(demo).unwrap();
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("cut.safetensors");
    let request = request(64, 4);
    let draw = |engine: &mut Engine| generate(engine, &request, &mut Log::default()).map(|i| i[0].rgb.clone());
    let want = draw(&mut engine()).unwrap();
    for (home, step, part) in [("", 1, 2), ("", 3, 3), ("", 0, 5), ("disk", 2, 10), ("disk", 3, 2), ("disk", 0, 3)]
    {
        std::fs::write(&path, &content).unwrap();
        let builder = Engine::builder().model(&path).device("cpu").params_backend(home).threads(1);
        let mut engine = builder.build().unwrap();
        let mut cuts = Cuts { path: &path, step, to: (content.len() / part) as u64 };
        let e = engine.generate(&request, &mut cuts, &CancelToken::new()).unwrap_err().to_string();
        assert!(e.contains("cut.safetensors") && e.contains("when it was opened"), "{e}");
        // As long as it is not whole there is no picture.
        let e = draw(&mut engine).unwrap_err().to_string();
        assert!(e.contains("cut.safetensors"), "{e}");
        std::fs::write(&path, &content).unwrap();
        assert!(draw(&mut engine).unwrap() == want, "{home} {step}");
    }
    std::fs::remove_file(path).unwrap();
}

/// Bytes of this process in memory.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() * 1024
}

/// Sizes, samplers, batches, pictures to start from, refused and stopped requests, in turn.
#[cfg(target_os = "linux")]
#[test]
fn mixed_requests_leave_memory_as_it_was() {
    let _alone = alone();
    let mut engine = engine();
    let mut round = |first: i64| {
        for i in 0..10 {
            let side = [64, 72, 96, 128, 64][i as usize % 5];
            let mut r = ImageRequest { seed: Some(first + i), ..request(side, 2) };
            match i {
                1 => r.sampler = Some(SamplerKind::Heun),
                2 => r.batch_count = Some(3),
                3 | 4 => {
                    let rgb = [9, 99, 199].repeat(100 * 80);
                    r.init_image = Some(InputImage { width: 100, height: 80, rgb });
                }
                5 => r.prompt = "a big yellow square ".repeat(100),
                _ => {}
            }
            let token = CancelToken::new();
            match i {
                6 => r.width = Some(63),
                7 => token.cancel(),
                _ => {}
            }
            let result = engine.generate(&r, &mut Log::default(), &token);
            assert_eq!(result.is_err(), matches!(i, 6 | 7), "request {i}");
        }
    };
    round(0);
    round(10);
    let before = resident();
    (2..5).for_each(|n| round(n * 10));
    let after = resident();
    assert!(after < before + (8 << 20), "{before} bytes became {after}");
}
