//! How a program is executed: which cuts are taken, and what each segment reads, makes and hands on.

mod segments;

pub use segments::{Cuts, Segment, segments};
