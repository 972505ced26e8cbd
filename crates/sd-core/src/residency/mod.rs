//! Where weights are, and what is let go when memory is short.
//!
//! Every module's weights have a [`Home`] where they are between uses. A device that computes has at most one copy of
//! each, made when a segment first needs it and kept as long as memory allows. A [`Manager`] keeps the accounts of all
//! runners on a device; its documentation has the order in which things go. [`Cuts::Auto`](crate::Cuts) runs what does
//! not fit in segments, whose weights then move to the device one segment ahead of the computation.

pub mod autofit;
mod load;
mod manager;
mod prefetch;
mod report;
mod space;
mod store;

use std::sync::Arc;

use crate::device::Device;

pub(crate) use load::NotLoaded;
pub use manager::{Manager, ManagerOptions};
pub(crate) use manager::{Pins, Refusal, RoomKind};
pub(crate) use prefetch::{Loader, Pending};
pub(crate) use report::shown;
pub use report::{DeviceMemory, MemoryReport, ModuleMemory};
pub(crate) use space::{Place, Space};
pub(crate) use store::{Store, Want, WeightId};

/// Where the weights of a module are between uses.
#[derive(Clone, Debug)]
pub enum Home {
    /// In the memory of a device, from which they go only when memory is short, and are read from their file again. A
    /// device that computes and is another one gets copies.
    Device(Arc<Device>),
    /// In main memory, in the type they are computed with, from their first use on.
    Ram,
    /// In their file, from which they are read again whenever they are not on the device that computes.
    File,
}

impl Home {
    /// As reports call it.
    pub(crate) fn name(&self) -> String {
        match self {
            Home::Device(d) => d.name().to_owned(),
            Home::Ram => "ram".to_owned(),
            Home::File => "disk".to_owned(),
        }
    }
}
