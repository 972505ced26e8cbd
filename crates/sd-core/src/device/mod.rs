//! Devices: what ggml drives, and a pretend one for plans and tests.

mod noop;
pub(crate) mod ram;
mod registry;

pub(crate) use noop::{Cells, number};
pub use noop::{Noop, NoopOptions};
pub use ram::available_ram;
pub use registry::{Device, DeviceKind, Memory, add_rpc_server, serve_rpc};
