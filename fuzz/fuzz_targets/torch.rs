//! Files of `torch.save`: the input is a pickle, an archive of one, or a row of pickles; what opens gives the bytes of
//! every tensor, as long as shape and type say.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sd_core::WeightSource;
use sd_io::Checkpoint;

/// Before the pickle of the object in the layout of PyTorch before 1.6.
const LEGACY: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let file = match kind % 3 {
        0 => rest.to_vec(),
        1 => [LEGACY, rest].concat(),
        _ => zip(&[("m/data.pkl", rest), ("m/data/0", &[1; 64])]),
    };
    match Checkpoint::from_bytes("fuzz", file.into()) {
        Ok(checkpoint) => {
            for name in checkpoint.names() {
                let meta = checkpoint.meta(name).expect("a listed tensor has a shape");
                let got = checkpoint.bytes(name).expect("a listed tensor has bytes").len();
                let elements = meta.shape.elements();
                assert_eq!(meta.dtype.bytes(elements, elements), Some(got), "{name}");
            }
        }
        Err(e) => {
            let message = e.to_string();
            assert!(message.contains("fuzz: ") && message.len() < 16384, "{message}");
        }
    }
});

/// A zip archive of these members, none of them compressed.
fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in members {
        let size = (data.len() as u32).to_le_bytes();
        let name_len = (name.len() as u16).to_le_bytes();
        let common = [&[0; 12][..], &size, &size, &name_len, &[0; 2]].concat();
        directory.extend([b"PK\x01\x02", &[20, 0, 20, 0][..], &common, &[0; 10]].concat());
        directory.extend((out.len() as u32).to_le_bytes());
        directory.extend(name.as_bytes());
        out.extend([b"PK\x03\x04", &[20, 0][..], &common, name.as_bytes(), data].concat());
    }
    let (start, len, count) = (out.len() as u32, directory.len() as u32, members.len() as u16);
    out.extend(directory);
    out.extend([b"PK\x05\x06", &[0; 4][..], &count.to_le_bytes(), &count.to_le_bytes()].concat());
    out.extend([&len.to_le_bytes()[..], &start.to_le_bytes(), &[0; 2]].concat());
    out
}
