//! What the tests of this crate share: fixtures of `oracle/`, and one way to compare a graph with them.

mod check;
mod fixture;
mod names;

pub(crate) use check::{Case, check, check_circular, check_cuts};
pub(crate) use fixture::{Fixture, Tensors, real_checkpoint, real_names};
pub(crate) use names::{Place, check_places};
