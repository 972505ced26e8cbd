//! Textual inversion: vectors that a word of the prompt stands for, trained for the tables of CLIP's text encoders
//! (Gal et al. 2022).
//!
//! ```text
//! let embeddings = Embeddings::new(list);            // those that the prompts may name
//! let conditioning = model.condition_with(&prompt, &embeddings, run)?;
//! // `run` needs the vectors too: `adapter::adapted` puts them after the tables.
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use sd_core::{Error, Result, WeightSource, convert};
use sd_io::Checkpoint;

use crate::model::Model;
use crate::names::Part;
use crate::text::prompt::Piece;

/// The table that the vectors of a text encoder follow.
pub const TOKEN_TABLE: &str = "text_model.embeddings.token_embedding.weight";
/// The text encoders that can have vectors, with their names in files for more than one.
const ENCODERS: [(Part, &str); 2] = [(Part::ClipL, "clip_l"), (Part::ClipG, "clip_g")];

/// The vectors of a word.
#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    /// The word, usually the file's name without its extension.
    pub name: String,
    /// How many vectors it has in each encoder.
    pub count: usize,
    /// Row by row.
    vectors: BTreeMap<Part, Vec<f32>>,
}

impl Embedding {
    /// The vectors in `file` for the text encoders of `model`, under the name `name`.
    ///
    /// # Errors
    /// The file holds no vectors, those of another family, or not of every encoder; the message has their shapes.
    pub fn open(file: &Arc<Checkpoint>, name: &str, model: &Model) -> Result<Embedding> {
        let width = |part: Part| {
            let meta = model.component(part).ok()?.source().meta(TOKEN_TABLE)?;
            meta.shape.array::<2>().map(|[_, c]| (part, c))
        };
        let widths: Vec<(Part, usize)> = ENCODERS.iter().filter_map(|(part, _)| width(*part)).collect();
        read(&**file, &file.path().display().to_string(), name, &widths)
    }
}

fn read(file: &dyn WeightSource, path: &str, name: &str, widths: &[(Part, usize)]) -> Result<Embedding> {
    let mut vectors: BTreeMap<Part, Vec<f32>> = BTreeMap::new();
    let mut counts: Vec<usize> = Vec::new();
    let mut found: Vec<String> = Vec::new();
    for tensor in file.names() {
        let Some(meta) = file.meta(tensor).filter(|m| m.dtype.is_float()) else { continue };
        let (n, c) = match *meta.shape.dims() {
            [c] => (1, c),
            [n, c] => (n, c),
            _ => continue,
        };
        found.push(format!("{tensor} {}", meta.shape));
        let named = ENCODERS.iter().find(|(_, name)| tensor == *name).map(|(part, _)| *part);
        let fits = |(part, width): &&(Part, usize)| {
            *width == c && named.is_none_or(|p| p == *part) && !vectors.contains_key(part)
        };
        if let Some((part, _)) = widths.iter().find(fits) {
            let values = convert::to_f32(meta.dtype, &file.bytes(tensor)?.read()?, meta.shape.elements())?;
            vectors.insert(*part, values);
            counts.push(n);
        }
    }
    let wrong = |what: String| {
        let list = if found.is_empty() { "no vectors".to_owned() } else { found.join(", ") };
        let want: Vec<String> = widths.iter().map(|(p, c)| format!("[n, {c}] for the {}", p.name())).collect();
        Error::bad_file(path, format!("{what}: it holds {list}, the model reads {}", want.join(" and ")))
            .hint("the embedding was made for another family")
    };
    let count = counts.first().copied().unwrap_or(0);
    if vectors.is_empty() || count == 0 {
        return Err(wrong("no embedding for this model".to_owned()));
    }
    if let Some((part, _)) = widths.iter().find(|(p, _)| !vectors.contains_key(p)) {
        return Err(wrong(format!("the embedding has no vectors for the {}", part.name())));
    }
    if counts.iter().any(|n| *n != count) {
        return Err(wrong("the embedding has another number of vectors for each text encoder".to_owned()));
    }
    Ok(Embedding { name: name.to_owned(), count, vectors })
}

/// The embeddings that prompts may name.
#[derive(Debug, Clone, Default)]
pub struct Embeddings {
    list: Vec<Arc<Embedding>>,
}

impl Embeddings {
    /// Those in `list`. Of two with the same name, the first counts.
    pub fn new(list: Vec<Arc<Embedding>>) -> Embeddings {
        Embeddings { list }
    }

    /// Whether a prompt names none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The vectors of all, row by row, for the table of a text encoder.
    pub fn rows(&self, part: Part) -> Vec<f32> {
        self.list.iter().filter_map(|e| e.vectors.get(&part)).flatten().copied().collect()
    }

    /// The names that stand in a prompt as words, whatever their case.
    pub fn named_in(prompt: &str, names: &[&str]) -> Vec<usize> {
        let mut found: Vec<usize> = split(prompt, names).into_iter().filter_map(|s| s.err()).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// `pieces` with vectors where their names stood.
    pub(crate) fn apply(&self, pieces: Vec<Piece>) -> Vec<Piece> {
        if self.list.is_empty() {
            return pieces;
        }
        let names: Vec<&str> = self.list.iter().map(|e| e.name.as_str()).collect();
        let first = |i: usize| self.list.iter().take(i).map(|e| e.count).sum::<usize>();
        let mut out = Vec::new();
        for piece in pieces {
            let Piece::Text(text, weight) = piece else {
                out.push(piece);
                continue;
            };
            for part in split(&text, &names) {
                match part {
                    Ok(text) => out.push(Piece::Text(text.to_owned(), weight)),
                    Err(i) => {
                        let count = self.list.get(i).map_or(0, |e| e.count);
                        out.push(Piece::Vectors(first(i)..first(i) + count, weight));
                    }
                }
            }
        }
        out
    }
}

/// Text and numbers of the names in it, in order; one empty text if there is nothing. Of names that begin at one place
/// the longest counts.
fn split<'a>(text: &'a str, names: &[&str]) -> Vec<Result<&'a str, usize>> {
    let (mut out, mut start, mut at) = (Vec::new(), 0, 0);
    let mut before = ' ';
    while let Some(rest) = text.get(at..).filter(|r| !r.is_empty()) {
        let found = names.iter().enumerate().filter_map(|(i, n)| Some((begins(rest, n, before)?, i)));
        // The first of equals: the key is the length, then the place from the end.
        match found.max_by_key(|(len, i)| (*len, usize::MAX - i)) {
            Some((len, i)) => {
                out.extend(text.get(start..at).filter(|t| !t.is_empty()).map(Ok));
                out.push(Err(i));
                before = rest.get(..len).and_then(|r| r.chars().last()).unwrap_or(' ');
                at += len;
                start = at;
            }
            None => {
                before = rest.chars().next().unwrap_or(' ');
                at += before.len_utf8();
            }
        }
    }
    let rest = text.get(start..).filter(|t| !t.is_empty() || out.is_empty());
    out.extend(rest.map(Ok));
    out
}

/// How many bytes `name` takes at the beginning of `text`, if it stands there as a word after `before`.
fn begins(text: &str, name: &str, before: char) -> Option<usize> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut letters = text.chars();
    let mut len = 0;
    for want in name.chars() {
        let c = letters.next()?;
        if !c.to_lowercase().eq(want.to_lowercase()) {
            return None;
        }
        len += c.len_utf8();
    }
    let (first, last) = (name.chars().next()?, name.chars().last()?);
    let apart = |inside: char, outside: Option<char>| !word(inside) || !outside.is_some_and(word);
    (apart(first, Some(before)) && apart(last, letters.next())).then_some(len)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Tensors, noise};
    use super::*;
    use crate::text::tokenizer::{self, ClipTokenizer};
    use crate::text::windows::windows;
    use sd_core::DType;

    #[test]
    fn names_are_words() {
        let names = ["neg", "easy-neg", "<cat toy>", "Äpfel"];
        let split = |t| split(t, &names);
        assert_eq!(split("neg, a NEG"), [Err(0), Ok(", a "), Err(0)]);
        assert_eq!(split("negative neg_ 1neg easy-neg."), [Ok("negative neg_ 1neg "), Err(1), Ok(".")]);
        assert_eq!(split("a<cat toy>b äpfel"), [Ok("a"), Err(2), Ok("b "), Err(3)]);
        assert_eq!((split(""), split("x")), (vec![Ok("")], vec![Ok("x")]));
        assert_eq!(Embeddings::named_in("(EASY-NEG:1.2) neg, neg", &names), [0, 1]);
    }

    fn file(list: &[(&str, &[usize])]) -> Tensors {
        let mut file = Tensors::default();
        for (i, (name, dims)) in list.iter().enumerate() {
            file.put(name, dims, DType::F32, &noise(dims.iter().product(), i as u32));
        }
        file
    }

    #[test]
    fn vectors_are_found_by_name_or_width() {
        let (one, two): (&[_], &[_]) = (&[(Part::ClipL, 8)], &[(Part::ClipL, 8), (Part::ClipG, 12)]);
        let open = |list: &[(&str, &[usize])], widths| read(&file(list), "x.pt", "x", widths);
        for name in ["emb_params", "string_to_param.*", "<token>"] {
            assert_eq!(open(&[(name, &[3, 8])], one).unwrap().count, 3);
        }
        assert_eq!(open(&[("<token>", &[8])], one).unwrap().count, 1);
        let both = open(&[("clip_g", &[2, 12]), ("clip_l", &[2, 8])], two).unwrap();
        let set = Embeddings::new(vec![Arc::new(both)]);
        assert_eq!((set.rows(Part::ClipG), set.rows(Part::ClipL)), (noise(24, 0), noise(16, 1)));
        let e = |list: &[(&str, &[usize])], widths| open(list, widths).unwrap_err().to_string();
        let hint = "   hint: the embedding was made for another family";
        assert_eq!(
            e(&[("emb_params", &[3, 7])], one),
            format!(
                "x.pt: no embedding for this model: it holds emb_params [3, 7], the model reads [n, 8] for the CLIP \
                 text encoder{hint}"
            )
        );
        assert!(
            e(&[("emb_params", &[3, 8])], two).starts_with("x.pt: the embedding has no vectors for the second")
        );
        assert!(e(&[("clip_l", &[1, 8]), ("clip_g", &[2, 12])], two).contains("another number of vectors"));
        assert!(e(&[("a.b.c", &[1, 1, 8])], one).contains("it holds no vectors"));
    }

    #[test]
    fn vectors_stand_where_their_names_stood() {
        let embedding = |name: &str, n: usize| {
            Arc::new(read(&file(&[("emb_params", &[n, 8])]), "x.pt", name, &[(Part::ClipL, 8)]).unwrap())
        };
        let set = Embeddings::new(vec![embedding("ink", 2), embedding("wash", 3)]);
        let text = |t: &str, w| Piece::Text(t.into(), w);
        let pieces = vec![text("wash of ink", 1.0), Piece::Break, text("x", 1.5)];
        let want =
            [Piece::Vectors(2..5, 1.0), text(" of ", 1.0), Piece::Vectors(0..2, 1.0), Piece::Break, text("x", 1.5)];
        assert_eq!(set.apply(pieces), want);
    }

    #[test]
    fn vectors_of_a_word_stay_in_one_window() {
        let cats = Piece::Text("cat ".repeat(73), 1.0);
        let windows = windows(tokenizer::clip().unwrap(), &[cats, Piece::Vectors(1..4, 1.5)], ClipTokenizer::END);
        let [first, second] = &windows[..] else { panic!("{} windows", windows.len()) };
        assert_eq!((first.end, first.ids[73], first.ids[74]), (74, 2368, 49407));
        assert_eq!(
            (&second.ids[..5], &second.weights[..3]),
            (&[49406, 49409, 49410, 49411, 49407][..], &[1.0, 1.5, 1.5][..])
        );
    }
}
