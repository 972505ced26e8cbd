//! From a prompt to what a network is conditioned on.

pub mod clip;
pub mod prompt;
pub mod similar;
pub mod t5;
pub mod tokenizer;
pub mod windows;
