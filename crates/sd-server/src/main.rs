//! `sd-server`: the HTTP front end.
#![forbid(unsafe_code)]

fn main() {}
