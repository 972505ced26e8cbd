//! Whole files of any kind: what opens also gives the bytes of every tensor.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sd_core::WeightSource;
use sd_io::Checkpoint;

fuzz_target!(|bytes: &[u8]| {
    match Checkpoint::from_bytes("fuzz", bytes.to_vec().into()) {
        Ok(checkpoint) => {
            for name in checkpoint.names() {
                checkpoint.bytes(name).expect("a listed tensor has bytes");
            }
        }
        Err(e) => {
            let message = e.to_string();
            assert!(message.contains("fuzz: ") && message.len() < 16384, "{message}");
        }
    }
});
