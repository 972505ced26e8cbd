//! How a picture was made: any file, and any text where other programs put theirs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sd_io::image::{PictureText, generation};
use sd_io::{read_generation, read_texts};

const KEYWORDS: [&str; 7] =
    ["parameters", "prompt", "sd-metadata", "invokeai_metadata", "Comment", "stealth", "Make"];

fuzz_target!(|bytes: &[u8]| {
    let _ = read_generation(bytes);
    let _ = read_texts(bytes);
    let Some((kind, text)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let Some(keyword) = KEYWORDS.get(usize::from(*kind) % KEYWORDS.len()) else { return };
    let mut texts = vec![PictureText { keyword: (*keyword).to_owned(), text: text.to_owned() }];
    if *keyword == "Comment" {
        texts.push(PictureText { keyword: "Software".to_owned(), text: "NovelAI".to_owned() });
    }
    let _ = generation(&texts);
});
