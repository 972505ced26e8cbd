//! Passes: programs made of programs.

pub mod adapters;
pub mod taps;
