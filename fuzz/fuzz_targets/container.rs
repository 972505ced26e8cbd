//! The structure of picture files, and the same bytes after each signature.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sd_io::Container;

fuzz_target!(|bytes: &[u8]| {
    let heads: [&[u8]; 4] = [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"RIFF\x40\0\0\0WEBP"];
    for head in heads {
        match Container::read(&[head, bytes].concat()) {
            Ok(container) => {
                serde_json::to_string(&container).expect("a report is JSON");
            }
            Err(e) => assert!(e.to_string().len() < 16384, "{e}"),
        }
    }
});
