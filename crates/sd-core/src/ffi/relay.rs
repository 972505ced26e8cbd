//! A relay on loopback between ggml and a remote worker.
//!
//! ggml ends the process when a worker goes away or answers something malformed. So ggml talks to this relay, which
//! passes every message on and, once the worker is lost, answers in its place with values that make ggml go on.
//! Whoever reads a result asks [`Relay::check`] afterwards, so nothing computed with such an answer gets out.

use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use crate::error::{Error, Result};

/// How long a worker may take to accept a connection and to greet.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// After how long a silence the system asks whether the other one is there; it gives up after as much again.
const SILENCE: Duration = Duration::from_secs(60);

/// Of the protocol at the pinned version: `RPC_PROTO_MAJOR_VERSION`, `RPC_PROTO_MINOR_VERSION`.
pub(super) const PROTOCOL: (u8, u8) = (7, 0);

/// Commands of the protocol that are answered, as `ggml-rpc.cpp` numbers them; it answers no others. And the one that
/// frees memory, which is not answered.
pub(super) mod command {
    pub(crate) const ALLOC_BUFFER: u8 = 0;
    pub(crate) const GET_ALIGNMENT: u8 = 1;
    pub(crate) const GET_MAX_SIZE: u8 = 2;
    pub(crate) const BUFFER_GET_BASE: u8 = 3;
    pub(crate) const FREE_BUFFER: u8 = 4;
    pub(crate) const SET_TENSOR_HASH: u8 = 7;
    pub(crate) const GET_TENSOR: u8 = 8;
    pub(crate) const COPY_TENSOR: u8 = 9;
    pub(crate) const GET_DEVICE_MEMORY: u8 = 11;
    pub(crate) const GET_ALLOC_SIZE: u8 = 13;
    pub(crate) const HELLO: u8 = 14;
    pub(crate) const DEVICE_COUNT: u8 = 15;
}

/// Bytes of the capabilities in a greeting.
pub(super) const CAPABILITIES: usize = 24;

/// Bytes passed on at once.
const CHUNK: usize = 1 << 18;

/// The relay of one worker, for the life of the process.
pub(super) struct Relay {
    worker: Arc<Worker>,
    address: SocketAddr,
}

struct Worker {
    /// As the user wrote it.
    endpoint: String,
    /// Why it is lost. What it had in memory is lost with it, so connections of that time stay without it.
    lost: Mutex<Option<String>>,
}

impl Relay {
    /// Starts to relay to the worker at `endpoint`, `host:port`. Nothing is sent before somebody connects.
    pub(super) fn start(endpoint: &str) -> Result<Relay> {
        let bad = |e: io::Error| Error::device(format!("RPC worker {endpoint}: no local relay: {e}"));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(bad)?;
        let address = listener.local_addr().map_err(bad)?;
        let worker = Arc::new(Worker { endpoint: endpoint.to_owned(), lost: Mutex::default() });
        let relayed = worker.clone();
        let accept = move || {
            for client in listener.incoming().flatten() {
                let worker = relayed.clone();
                let serve = move || {
                    // An error is that of the client, which has closed its side.
                    let _ = Link::open(client, &worker).and_then(|mut link| link.serve());
                };
                if std::thread::Builder::new().name("rpc relay".into()).spawn(serve).is_err() {
                    relayed.lose("the relay has no thread left");
                }
            }
        };
        std::thread::Builder::new().name("rpc relay".into()).spawn(accept).map_err(bad)?;
        Ok(Relay { worker, address })
    }

    /// The worker's endpoint.
    pub(super) fn endpoint(&self) -> &str {
        &self.worker.endpoint
    }

    /// Where ggml is to connect.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// An error if the worker is lost.
    pub(super) fn check(&self) -> Result<()> {
        let Some(reason) = self.worker.lost().clone() else { return Ok(()) };
        let message = format!("RPC worker {} was lost: {reason}", self.worker.endpoint);
        Err(Error::device(message).hint("see its log and start it again"))
    }

    /// Takes a worker that was lost for there again. Connections of before have nothing of it: if one of them is used,
    /// it is lost again.
    pub(super) fn revive(&self) {
        *self.worker.lost() = None;
    }
}

impl Worker {
    fn lost(&self) -> MutexGuard<'_, Option<String>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lose(&self, reason: impl Into<String>) {
        let reason = reason.into();
        tracing::debug!("RPC worker {}: {reason}", self.endpoint);
        // Only the first reason is the cause.
        self.lost().get_or_insert(reason);
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
        for address in self.endpoint.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, PATIENCE) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    keep_alive(&stream)?;
                    return Ok(stream);
                }
                Err(e) => last = e,
            }
        }
        Err(last)
    }
}

/// Has the system ask the other one whether it is still there when nothing is sent, so that a network that fails without
/// a word ends the connection. A worker may compute as long as it wants to.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let keep = TcpKeepalive::new().with_time(SILENCE).with_interval(SILENCE / 6).with_retries(6);
    SockRef::from(stream).set_tcp_keepalive(&keep)
}

/// Both ends of a connection through the relay.
struct Link<'a> {
    worker: &'a Worker,
    from_client: BufReader<TcpStream>,
    to_client: BufWriter<TcpStream>,
    /// `None` before the greeting and once the worker is lost.
    remote: Option<(BufReader<TcpStream>, BufWriter<TcpStream>)>,
    chunk: Vec<u8>,
}

impl<'a> Link<'a> {
    fn open(client: TcpStream, worker: &'a Worker) -> io::Result<Link<'a>> {
        client.set_nodelay(true)?;
        let from_client = BufReader::new(client.try_clone()?);
        let to_client = BufWriter::new(client);
        Ok(Link { worker, from_client, to_client, remote: None, chunk: vec![0; CHUNK] })
    }

    /// Relays until the client closes the connection.
    fn serve(&mut self) -> io::Result<()> {
        let mut greeted = false;
        loop {
            // Request: command, u64 length, payload. Answer: u64 length, payload.
            let mut head = [0; 9];
            self.from_client.read_exact(&mut head)?;
            let [command, length @ ..] = head;
            if !greeted {
                if command != command::HELLO {
                    return Err(ErrorKind::InvalidData.into());
                }
                self.connect();
                greeted = true;
            }
            // Memory that is gone need not be freed.
            if self.remote.is_none() && command != command::FREE_BUFFER {
                self.worker.lose("what it had in memory is gone");
            }
            self.send(&head);
            let last = self.pass_request(u64::from_ne_bytes(length))?;
            self.flush();
            if let Some(length) = answer_length(command, last) {
                self.pass_answer(command, length)?;
                self.to_client.flush()?;
            }
        }
    }

    fn connect(&mut self) {
        if self.worker.lost().is_some() {
            return;
        }
        let connected = self.worker.connect().and_then(|stream| {
            let reader = BufReader::new(stream.try_clone()?);
            Ok((reader, BufWriter::new(stream)))
        });
        match connected {
            Ok(remote) => self.remote = Some(remote),
            Err(e) => self.worker.lose(e.to_string()),
        }
    }

    /// Passes a payload on and returns its last eight bytes, zeros before the first.
    fn pass_request(&mut self, length: u64) -> io::Result<[u8; 8]> {
        let mut last = [0; 8];
        let mut left = length;
        let mut chunk = std::mem::take(&mut self.chunk);
        while left > 0 {
            let part = &mut chunk[..left.min(CHUNK as u64) as usize];
            self.from_client.read_exact(part)?;
            self.send(part);
            for byte in part.iter().skip(part.len().saturating_sub(8)) {
                last.rotate_left(1);
                last[7] = *byte;
            }
            left -= part.len() as u64;
        }
        self.chunk = chunk;
        Ok(last)
    }

    /// Passes on the answer of `length` bytes to `command`, or gives one.
    fn pass_answer(&mut self, command: u8, length: u64) -> io::Result<()> {
        let mut head = [0; 8];
        if self.receive(&mut head) && u64::from_ne_bytes(head) != length {
            self.lose("it sent a malformed answer".into());
        }
        self.to_client.write_all(&length.to_ne_bytes())?;
        let mut left = length;
        let mut chunk = std::mem::take(&mut self.chunk);
        while left > 0 {
            let part = &mut chunk[..left.min(CHUNK as u64) as usize];
            if !self.receive(part) {
                part.fill(0);
                let answer = stand_in(command);
                part.iter_mut().zip(answer).for_each(|(to, byte)| *to = byte);
            }
            self.to_client.write_all(part)?;
            left -= part.len() as u64;
        }
        self.chunk = chunk;
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) {
        let result = self.remote.as_mut().map_or(Ok(()), |(_, to)| to.write_all(bytes));
        self.keep(result);
    }

    fn flush(&mut self) {
        let result = self.remote.as_mut().map_or(Ok(()), |(_, to)| to.flush());
        self.keep(result);
    }

    /// Whether the worker filled `bytes`.
    fn receive(&mut self, bytes: &mut [u8]) -> bool {
        let Some((from, _)) = &mut self.remote else { return false };
        let result = from.read_exact(bytes);
        self.keep(result)
    }

    fn keep(&mut self, result: io::Result<()>) -> bool {
        match result {
            Ok(()) => return true,
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => self.lose("it closed the connection".into()),
            Err(e) => self.lose(e.to_string()),
        }
        false
    }

    fn lose(&mut self, reason: String) {
        self.worker.lose(reason);
        if let Some((from, to)) = self.remote.take() {
            // What was buffered for the worker is of no use to it.
            let _ = to.into_parts();
            drop(from);
        }
    }
}

/// Bytes of the answer to `command`, whose request ends with `last`; `None` if there is no answer.
fn answer_length(command: u8, last: [u8; 8]) -> Option<u64> {
    match command {
        command::SET_TENSOR_HASH | command::COPY_TENSOR => Some(1),
        command::DEVICE_COUNT => Some(4),
        command::GET_ALIGNMENT | command::GET_MAX_SIZE | command::BUFFER_GET_BASE | command::GET_ALLOC_SIZE => {
            Some(8)
        }
        command::ALLOC_BUFFER | command::GET_DEVICE_MEMORY => Some(16),
        command::HELLO => Some(4 + CAPABILITIES as u64),
        // The request ends with the number of bytes it wants.
        command::GET_TENSOR => Some(u64::from_ne_bytes(last)),
        _ => None,
    }
}

/// The first bytes of an answer in place of a lost worker; the rest are zeros. No memory can be allocated, no device
/// is there, and what ggml asserts of the others holds.
fn stand_in(command: u8) -> Vec<u8> {
    match command {
        command::HELLO => vec![PROTOCOL.0, PROTOCOL.1],
        command::GET_ALIGNMENT => 128u64.to_ne_bytes().into(),
        command::GET_MAX_SIZE => (usize::MAX as u64).to_ne_bytes().into(),
        // Where a buffer begins is an address, which is not null and aligned.
        command::BUFFER_GET_BASE => (1u64 << 20).to_ne_bytes().into(),
        // The worker has that tensor already.
        command::SET_TENSOR_HASH => vec![1],
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_to_workers_are_watched() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let stream = Worker { endpoint, lost: Mutex::default() }.connect().unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), SILENCE);
        assert_eq!(socket.tcp_keepalive_retries().unwrap() * 10, 60);
    }
}
