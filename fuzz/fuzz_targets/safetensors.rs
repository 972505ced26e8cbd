//! The safetensors header: a listing's ranges lie in the file and have the length that shape and type need.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sd_io::parse_safetensors;

fuzz_target!(|bytes: &[u8]| {
    let len = bytes.len() as u64;
    if let Ok(listing) = parse_safetensors(Path::new("fuzz"), bytes, len) {
        for t in &listing.tensors {
            let want = t.meta.dtype.bytes(t.meta.shape.elements(), t.meta.shape.last());
            assert_eq!(want.map(|n| n as u64), Some(t.range.end - t.range.start));
            assert!(t.range.end <= len);
        }
    }
});
