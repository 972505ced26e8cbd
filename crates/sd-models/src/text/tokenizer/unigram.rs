//! The unigram tokenizer of SentencePiece (Kudo 2018): of all ways to cut a word into pieces, the one with the greatest
//! sum of scores. Text is prepared and cut as `tokenizers` does it for T5.

use std::io::Read;
use std::sync::OnceLock;

use sd_core::{Error, Result};

use super::charsmap::Charsmap;
use super::special;
use super::trie::Trie;

/// Lines of score, tab, piece; a line's number is the id.
static T5_PIECES: &[u8] = include_bytes!("../../../assets/t5_pieces.txt.gz");
static NMT_NFKC: &[u8] = include_bytes!("../../../assets/nmt_nfkc.bin.gz");

/// Stands for a space; starts every word.
const SPACE: char = '\u{2581}';
/// How much worse than the worst piece a character is that no piece covers.
const UNKNOWN_PENALTY: f64 = 10.0;

/// A unigram tokenizer.
pub struct Unigram {
    scores: Vec<f64>,
    pieces: Trie,
    /// Pieces that are found in the text as it is written, before anything else.
    special: Trie,
    charsmap: Option<Charsmap>,
    unknown: u32,
    unknown_score: f64,
}

/// The tokenizer of T5, decoded on first use.
///
/// # Errors
/// The vocabulary compiled into the program is damaged.
pub fn t5() -> Result<&'static Unigram> {
    static T5: OnceLock<Result<Unigram, String>> = OnceLock::new();
    T5.get_or_init(load_t5).as_ref().map_err(|e| Error::internal(format!("T5 vocabulary: {e}")))
}

fn load_t5() -> Result<Unigram, String> {
    let inflate = |data: &[u8]| {
        let mut out = Vec::new();
        flate2::read::GzDecoder::new(data).read_to_end(&mut out).map(|_| out).map_err(|e| e.to_string())
    };
    let text = String::from_utf8(inflate(T5_PIECES)?).map_err(|e| e.to_string())?;
    let mut pieces = Vec::new();
    for line in text.lines() {
        let (score, piece) = line.split_once('\t').ok_or_else(|| format!("`{line}` has no tab"))?;
        pieces.push((piece, score.parse::<f32>().map_err(|e| format!("`{line}`: {e}"))?));
    }
    let special = |piece: &str| matches!(piece, "<pad>" | "</s>" | "<unk>") || piece.starts_with("<extra_id_");
    let charsmap = Charsmap::parse(&inflate(NMT_NFKC)?)?;
    Unigram::new(&pieces, Unigram::T5_UNKNOWN, special, Some(charsmap))
}

impl Unigram {
    /// The id that fills up, in T5's vocabularies.
    pub const PAD: u32 = 0;
    /// The id that ends a text, in T5's vocabularies.
    pub const END: u32 = 1;
    const T5_UNKNOWN: u32 = 2;

    /// The tokenizer whose piece `i` with its score is `pieces[i]`. `unknown` is the id of what no piece covers; pieces
    /// that are `special` are taken out of the text before `charsmap` is applied to it.
    ///
    /// # Errors
    /// There is no piece `unknown`, or a score is not finite.
    pub(super) fn new(
        pieces: &[(&str, f32)],
        unknown: u32,
        special: impl Fn(&str) -> bool,
        charsmap: Option<Charsmap>,
    ) -> Result<Unigram, String> {
        if unknown as usize >= pieces.len() {
            return Err(format!("unknown token is {unknown}, the vocabulary has {} pieces", pieces.len()));
        }
        if let Some((piece, score)) = pieces.iter().find(|p| !p.1.is_finite()) {
            return Err(format!("piece `{piece}` of the vocabulary has score {score}"));
        }
        let ids = || pieces.iter().zip(0..).map(|(p, id)| (p.0, id));
        let worst = pieces.iter().map(|p| f64::from(p.1)).fold(f64::INFINITY, f64::min);
        Ok(Unigram {
            scores: pieces.iter().map(|p| f64::from(p.1)).collect(),
            pieces: Trie::new(ids()),
            special: Trie::new(ids().filter(|(p, _)| special(p))),
            charsmap,
            unknown,
            unknown_score: worst - UNKNOWN_PENALTY,
        })
    }

    /// How many pieces there are.
    pub fn size(&self) -> usize {
        self.scores.len()
    }

    /// The ids of `text`, without an end. Special pieces written out give their ids. Takes time linear in the text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let special = |rest: &str| self.special.prefixes(rest.as_bytes()).last();
        special::encode(text, special, |text, out| self.encode_plain(text, out))
    }

    fn encode_plain(&self, text: &str, out: &mut Vec<u32>) {
        let mapped = self.charsmap.as_ref().map(|map| map.apply(text));
        let text = mapped.as_deref().unwrap_or(text);
        if text.is_empty() {
            return;
        }
        // Spaces become marks, runs of them one; there is always a mark at the start.
        let mut marked = String::with_capacity(text.len() + SPACE.len_utf8());
        if !text.starts_with([' ', SPACE]) {
            marked.push(SPACE);
        }
        let mut last = None;
        for c in text.chars() {
            match c {
                ' ' if last == Some(' ') => {}
                ' ' => marked.push(SPACE),
                c => marked.push(c),
            }
            last = Some(c);
        }
        let mut best = Vec::new();
        let starts = marked.match_indices(SPACE).map(|m| m.0);
        let ends = starts.clone().skip(1).chain([marked.len()]);
        for (start, end) in starts.zip(ends) {
            self.encode_word(marked.get(start..end).unwrap_or_default(), &mut best, out);
        }
    }

    /// Appends the pieces of one word. `best` is scratch space.
    fn encode_word(&self, word: &str, best: &mut Vec<Ending>, out: &mut Vec<u32>) {
        best.clear();
        best.resize(word.len() + 1, Ending { score: 0.0, start: None, id: 0 });
        for (start, c) in word.char_indices() {
            let Some(before) = best.get(start).map(|b| b.score) else { continue };
            let mut covered = false;
            let mut offer = |len: usize, id: u32, score: f64| {
                let score = before + score;
                if let Some(b) = best.get_mut(start + len).filter(|b| b.start.is_none() || score > b.score) {
                    *b = Ending { score, start: Some(start), id };
                }
            };
            for (len, id) in self.pieces.prefixes(word.as_bytes().get(start..).unwrap_or_default()) {
                covered |= len == c.len_utf8();
                offer(len, id, self.scores.get(id as usize).copied().unwrap_or(self.unknown_score));
            }
            if !covered {
                offer(c.len_utf8(), self.unknown, self.unknown_score);
            }
        }

        let first = out.len();
        let mut end = word.len();
        while let Some(Ending { start: Some(start), id, .. }) = best.get(end).copied() {
            // Neighbours that are unknown are one.
            if id != self.unknown || end == word.len() || out.last() != Some(&id) {
                out.push(id);
            }
            end = start;
        }
        if let Some(word) = out.get_mut(first..) {
            word.reverse();
        }
    }
}

/// The best pieces up to a place in a word: their sum, and the last of them.
#[derive(Clone, Copy)]
struct Ending {
    score: f64,
    start: Option<usize>,
    id: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(text: &str) -> Vec<u32> {
        t5().unwrap().encode(text)
    }

    #[test]
    fn ids_agree_with_tokenizers() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../../oracle/fixtures/t5_tokens.json")).unwrap();
        assert_eq!(fixture["vocab_size"], t5().unwrap().scores.len());
        let cases = ["cases", "special"].into_iter().flat_map(|k| fixture[k].as_array().unwrap());
        assert!(cases.clone().count() > 2000);
        for case in cases {
            let text = case[0].as_str().unwrap();
            let want: Vec<u32> = serde_json::from_value(case[1].clone()).unwrap();
            assert_eq!(ids(text), want, "{text:?}");
        }
    }

    #[test]
    fn a_megabyte_is_encoded_without_delay() {
        let count = |unit: &str| ids(&unit.repeat((1 << 20) / unit.len())).len();
        assert!(count("a") > 1 << 16);
        assert_eq!(count(" "), 1);
        assert_eq!(count("\0"), 2);
        assert_eq!(count("猫"), 2);
        assert_eq!(count("</s>"), 1 << 18);
        assert!(count("<extra_id_") > 1 << 16);
        assert!(count("e\u{301}\u{327}🏳\u{200d}🇩") > 1 << 14);
    }

    #[test]
    fn any_vocabulary_will_do() {
        // The example of `tokenizers`' own documentation of its Unigram model.
        let scores = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 5.0, 10.0];
        let names = ["<unk>", "a", "b", "c", "d", "cd", "ab", "abc", "abcd"];
        let pieces: Vec<(&str, f32)> = names.into_iter().zip(scores).collect();
        let new = |unknown, pieces: &[(&str, f32)]| Unigram::new(pieces, unknown, |p| p == "<unk>", None);
        let model = new(0, &pieces).unwrap();
        assert_eq!(model.encode("abcdacdxx"), [0, 8, 1, 5, 0]);
        assert_eq!(model.encode("a<unk>"), [0, 1, 0]);
        assert!(new(9, &pieces).is_err() && new(0, &[]).is_err());
        assert!(new(0, &[("a", f32::NAN)]).is_err());
    }
}
