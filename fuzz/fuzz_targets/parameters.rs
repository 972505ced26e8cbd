//! Generation parameters: reading any file, and reading back any text that was written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sd_io::{Image, read_parameters};

fuzz_target!(|bytes: &[u8]| {
    let _ = read_parameters(bytes);
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let image = Image::new(1, 1, vec![0; 3]).expect("a picture of one pixel");
    if let Ok(png) = image.to_png(Some(text)) {
        assert_eq!(read_parameters(&png).as_deref(), Some(text));
    }
    if let Ok(webp) = image.to_webp(Some(text)) {
        assert_eq!(read_parameters(&webp).as_deref(), Some(text));
    }
    if text.len() < 20_000
        && let Ok(jpeg) = image.to_jpeg(90, Some(text))
    {
        assert_eq!(read_parameters(&jpeg).as_deref(), Some(text));
    }
});
