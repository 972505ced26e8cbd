//! The renamers: any names and shapes are surveyed, and what is a model is put together under the names used here.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use sd_core::WeightSource;
use sd_models::{Bundle, Files, Part, Survey};

fuzz_target!(|text: &str| {
    let Some(file) = sd_fuzz::checkpoint(text) else { return };
    let mut all = vec![Files { model: Some(file.clone()), ..Files::default() }];
    all.extend(Part::ALL.map(|part| Files { parts: BTreeMap::from([(part, file.clone())]), ..Files::default() }));
    for files in all {
        let _ = Survey::new(&files);
        for rename in [false, true] {
            let Ok(bundle) = Bundle::new(&files, rename) else { continue };
            for name in bundle.names() {
                let meta = bundle.meta(name).expect("a listed tensor has a shape");
                if let Ok(bytes) = bundle.bytes(name) {
                    assert_eq!(Some(bytes.len()), meta.dtype.bytes(meta.shape.elements(), meta.shape.last()), "{name}");
                }
            }
        }
    }
});
