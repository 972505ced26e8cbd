//! The built server, over a socket.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStderr, Command, Stdio};

struct Server {
    child: Child,
    log: BufReader<ChildStderr>,
    address: SocketAddr,
}

impl Server {
    fn start() -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_sd-server"))
            .args(["--listen-port", "0"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        log.read_line(&mut line).unwrap();
        let (_, address) = line.trim().split_once("http://").unwrap_or_else(|| panic!("{line}"));
        let address = address.parse().unwrap();
        Server { child, log, address }
    }

    /// Status and body of one request.
    fn ask(&self, method: &str, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone when the test ended it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn health_and_unknown_paths() {
    let server = Server::start();
    assert_eq!(server.address.ip().to_string(), "127.0.0.1");
    assert_eq!(server.ask("GET", "/health"), (200, r#"{"status":"ok"}"#.to_owned()));
    let missing = (404, r#"{"error":"not found"}"#.to_owned());
    assert_eq!(server.ask("GET", "/nothing"), missing);
    assert_eq!(server.ask("POST", "/health"), missing);
}

#[cfg(unix)]
#[test]
fn a_signal_ends_it_in_good_order() {
    let mut server = Server::start();
    let kill = Command::new("sh").arg("-c").arg(format!("kill -TERM {}", server.child.id())).status().unwrap();
    assert!(kill.success());
    assert!(server.child.wait().unwrap().success());
    let mut rest = String::new();
    server.log.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("stopped"), "{rest}");
}

#[test]
fn a_taken_port_and_a_wrong_one_end_with_a_message() {
    let server = Server::start();
    for (port, part) in [(server.address.port().to_string(), "listen on"), ("70000".into(), "--listen-port")] {
        let out = Command::new(env!("CARGO_BIN_EXE_sd-server")).args(["--listen-port", &port]).output().unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.code() == Some(1) && text.contains(part), "{port}: {:?} {text}", out.status);
    }
}
