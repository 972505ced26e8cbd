//! Devices: what ggml drives, and a pretend one for planning.

mod ram;
mod registry;

pub use ram::available_ram;
pub use registry::{Device, DeviceKind, Memory, add_rpc_server, serve_rpc};
