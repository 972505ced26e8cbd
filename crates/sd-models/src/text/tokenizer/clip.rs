//! The CLIP tokenizer: lower-cased byte-level BPE whose words end in `</w>`.
//! Ids are those of OpenAI's vocabulary; text is cut as `transformers.CLIPTokenizer` cuts it.

use std::collections::HashMap;
use std::io::Read;
use std::sync::OnceLock;

use sd_core::{Error, Result};
use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;

use super::bpe::Merges;
use super::special;

/// Merges of OpenAI's CLIP vocabulary, one pair a line after a version line.
static MERGES: &[u8] = include_bytes!("../../../assets/clip_merges.txt.gz");

const BYTES: u32 = 256;
const MERGE_COUNT: u32 = 48_894;
const START: &str = "<|startoftext|>";
const END: &str = "<|endoftext|>";

/// The tokenizer of every CLIP text encoder.
pub struct ClipTokenizer {
    merges: Merges,
    /// Symbol of a byte inside a word; the one of a word's last byte is 256 higher.
    byte_symbol: [u32; 256],
}

/// The tokenizer, decoded on first use.
///
/// # Errors
/// The vocabulary compiled into the program is damaged.
pub fn clip() -> Result<&'static ClipTokenizer> {
    static CLIP: OnceLock<Result<ClipTokenizer, String>> = OnceLock::new();
    CLIP.get_or_init(ClipTokenizer::load).as_ref().map_err(|e| Error::internal(format!("CLIP vocabulary: {e}")))
}

impl ClipTokenizer {
    /// The id that starts a window.
    pub const START: u32 = 2 * BYTES + MERGE_COUNT;
    /// The id that ends a window, and that fills SD 1.x windows.
    pub const END: u32 = Self::START + 1;

    fn load() -> Result<ClipTokenizer, String> {
        let mut text = String::new();
        flate2::read::GzDecoder::new(MERGES).read_to_string(&mut text).map_err(|e| e.to_string())?;

        let mut byte_symbol = [0; 256];
        let mut symbols: HashMap<String, u32> = HashMap::with_capacity((2 * BYTES + MERGE_COUNT) as usize);
        for (symbol, (byte, spelling)) in byte_spellings().enumerate() {
            let symbol = symbol as u32;
            if let Some(s) = byte_symbol.get_mut(usize::from(byte)) {
                *s = symbol;
            }
            symbols.insert(spelling.to_string(), symbol);
            symbols.insert(format!("{spelling}</w>"), symbol + BYTES);
        }

        let mut merges = Merges::new(2 * BYTES, MERGE_COUNT as usize);
        for line in text.lines().skip(1).filter(|l| !l.is_empty()) {
            let known = |s: &str| symbols.get(s).copied().ok_or_else(|| format!("unknown symbol in `{line}`"));
            let (left, right) = line.split_once(' ').ok_or_else(|| format!("`{line}` is no pair"))?;
            let symbol = merges.push(known(left)?, known(right)?);
            symbols.insert(format!("{left}{right}"), symbol);
        }
        let count = symbols.len() as u32;
        if count != Self::START {
            return Err(format!("{count} symbols, want {}", Self::START));
        }
        Ok(ClipTokenizer { merges, byte_symbol })
    }

    /// The ids of `text`, without start and end. The literal `<|startoftext|>` and `<|endoftext|>` give their ids.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let marks = [(START, Self::START), (END, Self::END)];
        let special = |rest: &str| marks.iter().find(|m| rest.starts_with(m.0)).map(|m| (m.0.len(), m.1));
        special::encode(text, special, |text, out| self.encode_plain(text, out))
    }

    fn encode_plain(&self, text: &str, out: &mut Vec<u32>) {
        let text: String = text.nfc().flat_map(char::to_lowercase).collect();
        for piece in Pieces(&text) {
            // A mark that was not written in lower case is no special token; it is read as three words.
            match piece.strip_prefix("<|").and_then(|p| p.strip_suffix("|>")).filter(|p| p.starts_with(is_letter)) {
                Some(name) => ["<|", name, "|>"].iter().for_each(|word| self.encode_word(word, out)),
                None => self.encode_word(piece, out),
            }
        }
    }

    fn encode_word(&self, word: &str, out: &mut Vec<u32>) {
        let mut symbols: Vec<u32> =
            word.bytes().filter_map(|b| self.byte_symbol.get(usize::from(b)).copied()).collect();
        if let Some(last) = symbols.last_mut() {
            *last += BYTES;
        }
        self.merges.apply(&symbols, out);
    }
}

/// Bytes with the character that spells each in the vocabulary, in vocabulary order: those that print as
/// themselves in Latin-1 first, the others as U+0100 and up (GPT-2's byte table).
fn byte_spellings() -> impl Iterator<Item = (u8, char)> {
    let prints = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255u8).filter(move |&b| !prints(b)).zip('\u{100}'..);
    (0..=255u8).filter(move |&b| prints(b)).map(|b| (b, char::from(b))).chain(others)
}

/// `\p{L}`. `char::is_alphabetic` also has letter numbers, vowel signs and enclosed letters.
fn is_letter(c: char) -> bool {
    let enclosed = matches!(c, '\u{24b6}'..='\u{24e9}' | '\u{1f130}'..='\u{1f149}' | '\u{1f150}'..='\u{1f169}' | '\u{1f170}'..='\u{1f189}');
    c.is_alphabetic() && !c.is_numeric() && !is_combining_mark(c) && !enclosed
}

fn is_other(c: char) -> bool {
    !c.is_whitespace() && !is_letter(c) && !c.is_numeric()
}

/// Words of lower-cased text: contractions, runs of letters, single digits, runs of anything else.
struct Pieces<'a>(&'a str);

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let text = self.0.trim_start();
        let first = text.chars().next()?;
        let fixed = [START, END, "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"];
        let len = if let Some(f) = fixed.iter().find(|f| text.starts_with(**f)) {
            f.len()
        } else if is_letter(first) {
            text.find(|c| !is_letter(c)).unwrap_or(text.len())
        } else if first.is_numeric() {
            first.len_utf8()
        } else {
            text.find(|c| !is_other(c)).unwrap_or(text.len())
        };
        let (piece, rest) = text.split_at_checked(len)?;
        self.0 = rest;
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(text: &str) -> Vec<u32> {
        clip().unwrap().encode(text)
    }

    #[test]
    fn ids_agree_with_transformers() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../../oracle/fixtures/clip_tokens.json")).unwrap();
        let cases = fixture["cases"].as_array().unwrap();
        assert!(cases.len() >= 300);
        for case in cases {
            let text = case[0].as_str().unwrap();
            let want: Vec<u32> = serde_json::from_value(case[1].clone()).unwrap();
            assert_eq!(ids(text), want, "{text:?}");
        }
    }

    #[test]
    fn a_megabyte_is_encoded_without_delay() {
        assert_eq!(ids(&"\0".repeat(1 << 20)).len(), 1 << 20);
        assert!(ids(&"a".repeat(1 << 20)).len() < 1 << 19);
        assert!(ids(&"ab1 !\u{301}é猫".repeat(1 << 16)).len() > 1 << 16);
        assert_eq!(ids(&START.repeat(1 << 16)), vec![ClipTokenizer::START; 1 << 16]);
    }
}
