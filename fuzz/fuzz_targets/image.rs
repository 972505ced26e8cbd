//! Picture decoding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sd_io::Image;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(image) = Image::decode(bytes) {
        assert_eq!(image.rgb().len() as u64, 3 * u64::from(image.width()) * u64::from(image.height()));
    }
});
