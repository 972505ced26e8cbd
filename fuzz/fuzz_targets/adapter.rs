//! Adapter files: any names and shapes against the demo model, in every spelling.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use sd_core::WeightSource;
use sd_io::Checkpoint;
use sd_models::adapter::Lora;

static DEMO: LazyLock<Arc<dyn WeightSource>> = LazyLock::new(|| {
    let bytes = include_bytes!("../../assets/demo.safetensors").to_vec();
    Arc::new(Checkpoint::from_bytes("demo", bytes.into()).expect("the demo model opens"))
});

fuzz_target!(|text: &str| {
    let Some(file) = sd_fuzz::checkpoint(text) else { return };
    match Lora::fit(file, &DEMO) {
        Ok(lora) => assert!(!lora.report().to_string().is_empty()),
        Err(e) => assert!(e.to_string().len() < 16384, "{e}"),
    }
});
