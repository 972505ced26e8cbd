//! The JSON index of a sharded checkpoint.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = sd_io::parse_index(Path::new("fuzz"), bytes);
});
