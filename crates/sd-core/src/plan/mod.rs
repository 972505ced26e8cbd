//! How a program is executed: which cuts are taken, and what each segment reads, makes and hands on.

mod budget;
mod segments;

pub(crate) use budget::{Crossing, Sizes, Unit};
pub use segments::{Cuts, Segment, segments};
