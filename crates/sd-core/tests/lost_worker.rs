//! A remote worker that goes away at any moment is an error, and nothing computed without it gets out.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Checkpoint, Random};
use sd_core::device::{add_rpc_server, serve_rpc};
use sd_core::graph::{Graph, Program};
use sd_core::{
    CancelToken, Cuts, DType, Device, Home, Manager, ManagerOptions, Result, Runner, RunnerOptions, Tensor,
};

const WIDTH: usize = 64;

/// A chain of `layers` products of square matrices, cut after each.
fn network(layers: usize) -> (Arc<Checkpoint>, Program, Tensor) {
    let mut r = Random::new(7);
    let mut checkpoint = Checkpoint::default();
    for i in 0..layers {
        checkpoint = checkpoint.random(&mut r, &format!("l.{i}.weight"), &[WIDTH, WIDTH], DType::F32);
    }
    let checkpoint = Arc::new(checkpoint);
    let w = sd_core::Scope::root(checkpoint.clone());
    let g = Graph::new();
    let x = g.input("x", &[4, WIDTH], DType::F32).unwrap();
    let mut y = x;
    for i in 0..layers {
        let at = w.at("l", i);
        y = g.linear(&at.linear_no_bias("").unwrap(), y).unwrap();
        y = g.silu(y).unwrap();
        g.cut(&at, &[y]);
    }
    (checkpoint, g.finish(&[y]).unwrap(), r.tensor(&[4, WIDTH]))
}

fn runner(device: Arc<Device>, weights: Arc<Checkpoint>) -> Result<Runner> {
    Runner::new(device, weights, RunnerOptions { threads: 1, cuts: Cuts::All, ..RunnerOptions::default() })
}

/// A worker in a process of its own, which is this test's program once more.
struct Worker(Child, String);

impl Worker {
    fn start() -> Worker {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Worker::start_at(format!("127.0.0.1:{port}"))
    }

    fn start_at(endpoint: String) -> Worker {
        // A copy of a connection of this process would keep it open when ggml closes it.
        let close = r#"for fd in /proc/self/fd/*; do n=${fd##*/}; ((n < 3)) || eval "exec $n>&-"; done; exec "$@""#;
        let child = Command::new("bash")
            .args(["-c", close, "bash"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "serves_when_asked"])
            .env("SD_TEST_SERVE", &endpoint)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let worker = Worker(child, endpoint);
        let deadline = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(&worker.1).is_err() {
            assert!(Instant::now() < deadline, "no worker at {}", worker.1);
            std::thread::sleep(Duration::from_millis(10));
        }
        worker
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The worker's side of [`Worker`]; without the variable there is nothing to do.
/// Held by a test while it runs: a port that one frees for a moment must not be given to another.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[test]
fn serves_when_asked() {
    if let Ok(endpoint) = std::env::var("SD_TEST_SERVE") {
        panic!("{}", serve_rpc(&endpoint, 1, &[Device::cpu().unwrap()]).unwrap_err());
    }
}

/// Passes on `limit` bytes of what a client sends to `to`, then hangs up. Returns where it listens.
fn severing(to: &str, limit: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let to = to.to_owned();
    std::thread::spawn(move || {
        let mut left = limit;
        for client in listener.incoming() {
            let (mut client, mut worker) = (client.unwrap(), TcpStream::connect(&to).unwrap());
            let (mut back, mut answers) = (client.try_clone().unwrap(), worker.try_clone().unwrap());
            let answering = std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
            let mut bytes = [0; 4096];
            while left > 0 {
                let n = client.read(&mut bytes[..left.min(4096)]).unwrap_or(0);
                if n == 0 || worker.write_all(&bytes[..n]).is_err() {
                    break;
                }
                left -= n;
            }
            let _ = worker.shutdown(std::net::Shutdown::Both);
            let _ = client.shutdown(std::net::Shutdown::Both);
            let _ = answering.join();
            if left == 0 {
                return;
            }
        }
    });
    at
}

#[test]
fn a_connection_that_breaks_anywhere_is_an_error() {
    let _alone = alone();
    breaks_anywhere(3, None);
}

/// Weights then come and go on one thread while another computes.
#[test]
fn a_connection_that_breaks_anywhere_while_weights_are_loaded_ahead_is_an_error() {
    let _alone = alone();
    breaks_anywhere(6, Some(4 * WIDTH * WIDTH * 4));
}

fn breaks_anywhere(layers: usize, budget: Option<usize>) {
    let worker = Worker::start();
    let (weights, program, x) = network(layers);
    let run = |endpoint: &str| -> Result<Tensor> {
        let device = add_rpc_server(endpoint)?.remove(0);
        let manager = Manager::new(ManagerOptions::default());
        manager.set_budget(&device, budget);
        let cuts = if budget.is_some() { Cuts::Auto } else { Cuts::All };
        let (home, manager) = (budget.map(|_| Home::Ram), Some(manager));
        let options = RunnerOptions { threads: 1, cuts, home, manager, ..RunnerOptions::default() };
        let mut runner = Runner::new(device, weights.clone(), options)?;
        runner.run(&program, &[("x", &x)], &CancelToken::new())?;
        Ok(runner.run(&program, &[("x", &x)], &CancelToken::new())?.remove(0))
    };
    let want = run(&severing(&worker.1, usize::MAX)).unwrap();
    let (mut limit, mut failures) = (1, 0);
    loop {
        let endpoint = severing(&worker.1, limit);
        match run(&endpoint) {
            Ok(got) => {
                assert_eq!(got, want, "after {limit} bytes");
                break;
            }
            Err(e) => {
                let text = e.to_string();
                assert!(text.contains(&endpoint), "after {limit} bytes: {text}");
                failures += 1;
            }
        }
        limit += limit / if budget.is_some() { 3 } else { 5 } + 17;
    }
    assert!(failures > 15, "{failures}");
}

#[test]
fn a_worker_that_dies_during_a_run_is_an_error_until_it_is_there_again() {
    let _alone = alone();
    let mut worker = Worker::start();
    let (weights, program, x) = network(40);
    let device = add_rpc_server(&worker.1).unwrap().remove(0);
    assert_eq!(device.description(), worker.1);
    let mut runner = runner(device.clone(), weights.clone()).unwrap();
    let first = runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        worker.0.kill().unwrap();
        worker.0.wait().unwrap();
        worker
    });
    let deadline = Instant::now() + Duration::from_secs(20);
    let e = loop {
        assert!(Instant::now() < deadline, "it goes on without its worker");
        match runner.run(&program, &[("x", &x)], &CancelToken::new()) {
            Ok(again) => assert_eq!(again, first),
            Err(e) => break e.to_string(),
        }
    };
    let worker = killer.join().unwrap();
    assert!(e.contains(&format!("RPC worker {} was lost", worker.1)) && e.contains("hint: "), "{e}");
    let again = runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap_err().to_string();
    assert!(again.contains("was lost"), "{again}");
    // It is not there to connect to.
    assert!(add_rpc_server(&worker.1).unwrap_err().to_string().contains(&worker.1));
    let worker = Worker::start_at(worker.1.clone());
    assert!(add_rpc_server(&worker.1).is_ok_and(|again| again[0].is_same(&device)));
    // What this runner had there is gone: nothing it computes now gets out.
    let stale = runner.run(&program, &[("x", &x)], &CancelToken::new()).unwrap_err().to_string();
    assert!(stale.contains("what it had in memory is gone"), "{stale}");
    drop(runner);
    add_rpc_server(&worker.1).unwrap();
    device.check().unwrap();
    let mut new = self::runner(device, weights.clone()).unwrap();
    assert_eq!(new.run(&program, &[("x", &x)], &CancelToken::new()).unwrap(), first);
    // Other devices do not care.
    let mut cpu = self::runner(Device::cpu().unwrap(), weights).unwrap();
    cpu.run(&program, &[("x", &x)], &CancelToken::new()).unwrap();
}
