//! Where weights are.

mod store;

pub(crate) use store::Store;
