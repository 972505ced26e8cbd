//! Checkpoints written again in other types and formats.

mod rules;

pub use rules::{Choice, TypeRules};
