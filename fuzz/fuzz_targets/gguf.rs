//! The GGUF header: ranges lie in the file, and arrays read as what they say they are.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sd_io::{ArrayType, EmbeddedTokenizer, parse_gguf};

fuzz_target!(|bytes: &[u8]| {
    let Ok(listing) = parse_gguf(Path::new("fuzz"), bytes) else { return };
    for t in &listing.tensors {
        // A shape restored from the metadata need not be whole blocks per row; all its elements still are.
        let elements = t.meta.shape.elements();
        let want = t.meta.dtype.bytes(elements, elements);
        assert_eq!(want.map(|n| n as u64), Some(t.range.end - t.range.start));
        assert!(t.range.end <= bytes.len() as u64);
    }
    for (_, value) in listing.metadata.iter() {
        if let Some(array) = value.as_array().filter(|a| a.kind() == ArrayType::String) {
            assert_eq!(array.byte_strings().count() as u64, array.len());
        }
        if let Some(values) = value.as_array().and_then(|a| a.to_f32s()) {
            assert_eq!(Some(values.len() as u64), value.as_array().map(|a| a.len()));
        }
    }
    let _ = EmbeddedTokenizer::read(&listing.metadata);
});
