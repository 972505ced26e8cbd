//! ggml's remote devices, reached through a [`Relay`] each. The bindings lack these functions, so they are declared
//! here as in `ggml-rpc.h`, and found by name, as the driver may be a library of its own.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError, RwLock};

use ggml_sys as sys;

use super::device::Dev;
use super::relay::{CAPABILITIES, PATIENCE, PROTOCOL, Relay, command::HELLO};
use crate::error::{Error, Result};

type AddServer = unsafe extern "C" fn(endpoint: *const c_char) -> sys::ggml_backend_reg_t;
type StartServer = unsafe extern "C" fn(
    endpoint: *const c_char,
    cache_dir: *const c_char,
    n_threads: usize,
    n_devices: usize,
    devices: *mut sys::ggml_backend_dev_t,
);

/// The workers of this process, with their devices.
static WORKERS: RwLock<Vec<(Relay, Vec<Dev>)>> = RwLock::new(Vec::new());

/// Registers the devices of the server at `endpoint`, `host:port`, and returns them. Again for the same endpoint, it
/// returns the same devices, and connects to a worker that was lost if it is there again.
pub(crate) fn add_server(endpoint: &str) -> Result<Vec<Dev>> {
    static ADDING: Mutex<()> = Mutex::new(());
    super::init();
    let _one_at_a_time = ADDING.lock().unwrap_or_else(PoisonError::into_inner);
    let workers = WORKERS.read().unwrap_or_else(PoisonError::into_inner);
    if let Some((relay, devices)) = workers.iter().find(|(relay, _)| relay.endpoint() == endpoint) {
        if relay.check().is_err() {
            probe(endpoint)?;
            relay.revive();
        }
        return Ok(devices.clone());
    }
    drop(workers);
    probe(endpoint)?;
    let relay = Relay::start(endpoint)?;
    let devices = register(&relay.address().to_string())?;
    // What ggml asks a device once and keeps must come from the worker itself.
    devices.iter().try_for_each(|d| d.buffer_type().map(|_| ()))?;
    relay.check()?;
    if devices.is_empty() {
        return Err(Error::device(format!("RPC server {endpoint}: it offers no devices")));
    }
    let mut workers = WORKERS.write().unwrap_or_else(PoisonError::into_inner);
    workers.push((relay, devices.clone()));
    Ok(devices)
}

/// Registers the devices behind a relay; none if its worker offers none.
fn register(address: &str) -> Result<Vec<Dev>> {
    let name = CString::new(address).map_err(|_| Error::internal("a relay's address"))?;
    // SAFETY: the driver's function of this name has this type.
    let add = unsafe {
        std::mem::transmute::<*mut c_void, AddServer>(function(c"ggml_backend_rpc_add_server")?.as_ptr())
    };
    // SAFETY: the name is NUL-terminated. ggml ends the process when it cannot connect or greet; a relay accepts and
    // greets whatever its worker does.
    let reg = unsafe { add(name.as_ptr()) };
    let Some(reg) = NonNull::new(reg) else { return Ok(Vec::new()) };
    // SAFETY: registries live as long as the process; this one is new, as every relay has an address of its own.
    unsafe {
        sys::ggml_backend_register(reg.as_ptr());
        let devices: Vec<_> = (0..sys::ggml_backend_reg_dev_count(reg.as_ptr()))
            .map(|i| sys::ggml_backend_reg_dev_get(reg.as_ptr(), i))
            .collect();
        Ok(Dev::all().into_iter().filter(|d| devices.contains(&d.raw())).collect())
    }
}

/// A function of ggml's driver for remote devices.
fn function(name: &CStr) -> Result<NonNull<c_void>> {
    super::init();
    // SAFETY: both names are NUL-terminated; a registry lives as long as the process.
    let found = unsafe {
        let reg = sys::ggml_backend_reg_by_name(c"RPC".as_ptr());
        NonNull::new(reg)
            .and_then(|reg| NonNull::new(sys::ggml_backend_reg_get_proc_address(reg.as_ptr(), name.as_ptr())))
    };
    found.ok_or_else(|| Error::device("ggml's driver for remote devices is not there"))
}

/// An error if `dev` belongs to a worker that is lost: what was read from it since is not what it computed.
pub(super) fn check(dev: Dev) -> Result<()> {
    let workers = WORKERS.read().unwrap_or_else(PoisonError::into_inner);
    workers.iter().find(|(_, devices)| devices.contains(&dev)).map_or(Ok(()), |(relay, _)| relay.check())
}

/// The endpoint of the worker that `dev` belongs to.
pub(super) fn endpoint(dev: Dev) -> Option<String> {
    let workers = WORKERS.read().unwrap_or_else(PoisonError::into_inner);
    let worker = workers.iter().find(|(_, devices)| devices.contains(&dev));
    worker.map(|(relay, _)| relay.endpoint().to_owned())
}

/// Connects and greets as ggml does, so that a wrong endpoint is told apart from a lost worker.
fn probe(endpoint: &str) -> Result<()> {
    let bad = |why: String| Error::device(format!("RPC server {endpoint}: {why}"));
    if endpoint.matches(':').count() != 1 {
        return Err(Error::request(format!("RPC server {endpoint:?} is not host:port")));
    }
    let addresses = endpoint.to_socket_addrs().map_err(|e| bad(e.to_string()))?;
    let mut refused = "no address".to_string();
    for address in addresses {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return greet(stream).map_err(bad),
            Err(e) => refused = e.to_string(),
        }
    }
    Err(bad(refused))
}

fn greet(mut stream: TcpStream) -> std::result::Result<(), String> {
    let mut talk = || -> std::io::Result<[u8; 8 + 4 + CAPABILITIES]> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut hello = vec![HELLO];
        hello.extend((CAPABILITIES as u64).to_ne_bytes());
        hello.extend([0; CAPABILITIES]);
        stream.write_all(&hello)?;
        let mut answer = [0; 8 + 4 + CAPABILITIES];
        stream.read_exact(&mut answer)?;
        Ok(answer)
    };
    let answer = talk().map_err(|e| match e.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            "does not answer; it serves one client at a time, or is not an RPC server".to_string()
        }
        _ => format!("does not speak ggml's protocol ({e})"),
    })?;
    let [length @ .., major, minor, _, _] = &answer[..12] else { return Err("short answer".into()) };
    if length != ((4 + CAPABILITIES) as u64).to_ne_bytes() {
        return Err("does not speak ggml's protocol".into());
    }
    if *major != PROTOCOL.0 || *minor > PROTOCOL.1 {
        return Err(format!("speaks protocol {major}.{minor}, want {}.{}", PROTOCOL.0, PROTOCOL.1));
    }
    Ok(())
}

/// Serves `devices` at `endpoint` until the socket fails; blocks. ggml prints to standard output.
pub(crate) fn serve(endpoint: &str, threads: usize, devices: &[Dev]) -> Result<()> {
    super::init();
    let bad = || Error::request(format!("{endpoint:?} is not host:port"));
    let name = CString::new(endpoint).map_err(|_| bad())?;
    if endpoint.matches(':').count() != 1 {
        return Err(bad());
    }
    if devices.is_empty() {
        return Err(Error::request("there is no device to serve"));
    }
    let mut devices: Vec<_> = devices.iter().map(|d| d.raw()).collect();
    let start = function(c"ggml_backend_rpc_start_server")?;
    // SAFETY: the driver's function of this name has this type.
    let start = unsafe { std::mem::transmute::<*mut c_void, StartServer>(start.as_ptr()) };
    // SAFETY: the name is NUL-terminated, the device array has the given length and outlives the call.
    unsafe {
        start(name.as_ptr(), std::ptr::null(), threads.max(1), devices.len(), devices.as_mut_ptr());
    }
    Err(Error::device(format!("cannot serve at {endpoint}: is the port taken?")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_server_is_an_error() {
        assert!(add_server("nonsense").unwrap_err().is_request());
        // A port that was free a moment ago refuses.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        assert!(add_server(&format!("127.0.0.1:{port}")).is_err());
        // A listener that answers something else.
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = other.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut s, _) = other.accept().unwrap();
            s.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").unwrap();
        });
        let e = add_server(&at).unwrap_err().to_string();
        assert!(e.contains("protocol"), "{e}");
        server.join().unwrap();
    }
}
