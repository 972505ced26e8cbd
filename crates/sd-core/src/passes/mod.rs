//! Passes: programs made of programs.

pub mod adapters;
