//! `sd-cli`: parses the command line, asks the engine, writes files.
#![forbid(unsafe_code)]

fn main() {}
