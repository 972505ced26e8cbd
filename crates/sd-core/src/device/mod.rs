//! Devices: what ggml drives, and a pretend one for planning.

mod registry;

pub use registry::{Device, DeviceKind, Memory, add_rpc_server, serve_rpc};
