//! Prompt weights as the AUTOMATIC1111 web UI reads them. Golden values: `oracle/prompts.py`.
//!
//! `(x)` multiplies the weight of `x` by 1.1, `[x]` divides it by 1.1, `(x:1.3)` multiplies it by 1.3. They nest; a
//! bracket left open reaches to the end, and a closing one alone is text. After a backslash a bracket or a backslash
//! is text; before anything else the backslash vanishes. `BREAK`, as a word in capitals, ends a window of tokens.

const ROUND: f64 = 1.1;
const SQUARE: f64 = 1.0 / 1.1;
const BREAK: &str = "BREAK";

/// Part of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum Piece {
    /// Text and its weight: 1 for plain text, else the product of the brackets around it.
    Text(String, f64),
    /// The window of tokens ends here.
    Break,
    /// Vectors after those of the vocabulary, by number, and their weight: an embedding. [`parse`] makes none.
    Vectors(std::ops::Range<usize>, f64),
}

/// The pieces of a prompt, in order; neighbours of equal weight are one piece. An empty prompt is one empty piece.
pub fn parse(prompt: &str) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut round, mut square) = (Vec::new(), Vec::new());
    let mut rest = prompt;
    while let Some((token, text, after)) = next_token(rest) {
        rest = after;
        match token {
            Token::OpenRound => round.push(pieces.len()),
            Token::OpenSquare => square.push(pieces.len()),
            Token::Escaped => pieces.push(Piece::Text(text.into(), 1.0)),
            Token::CloseRound(weight) => match round.pop() {
                Some(from) => multiply(&mut pieces, from, weight),
                None => push_text(&mut pieces, text),
            },
            Token::CloseSquare => match square.pop() {
                Some(from) => multiply(&mut pieces, from, SQUARE),
                None => push_text(&mut pieces, text),
            },
            Token::Text => push_text(&mut pieces, text),
        }
    }
    round.into_iter().for_each(|from| multiply(&mut pieces, from, ROUND));
    square.into_iter().for_each(|from| multiply(&mut pieces, from, SQUARE));

    let mut merged: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (merged.last_mut(), piece) {
            (Some(Piece::Text(text, w)), Piece::Text(more, v)) if *w == v => text.push_str(&more),
            (_, piece) => merged.push(piece),
        }
    }
    if merged.is_empty() {
        merged.push(Piece::Text(String::new(), 1.0));
    }
    merged
}

enum Token {
    OpenRound,
    OpenSquare,
    CloseRound(f64),
    CloseSquare,
    Escaped,
    Text,
}

/// The first token of `s`, its text, and what follows. The text of an escape lacks the backslash.
fn next_token(s: &str) -> Option<(Token, &str, &str)> {
    let first = s.chars().next()?;
    let (token, len) = match first {
        '\\' => {
            let rest = s.get(1..)?;
            let len = usize::from(rest.starts_with(['(', ')', '[', ']', '\\']));
            let (text, rest) = rest.split_at_checked(len)?;
            return Some((Token::Escaped, text, rest));
        }
        '(' => (Token::OpenRound, 1),
        '[' => (Token::OpenSquare, 1),
        ')' => (Token::CloseRound(ROUND), 1),
        ']' => (Token::CloseSquare, 1),
        ':' => match closing_weight(s) {
            Some((weight, len)) => (Token::CloseRound(weight), len),
            None => (Token::Text, 1),
        },
        _ => (Token::Text, s.find(['\\', '(', ')', '[', ']', ':']).unwrap_or(s.len())),
    };
    let (text, rest) = s.split_at_checked(len)?;
    Some((token, text, rest))
}

/// The weight of a leading `:1.3)` and the length of that text. What is no finite number is plain text.
fn closing_weight(s: &str) -> Option<(f64, usize)> {
    let number = s.strip_prefix(':')?.trim_start();
    let end = number.find(|c: char| !matches!(c, '+' | '-' | '.' | '0'..='9'))?;
    let (number, rest) = number.split_at_checked(end)?;
    let rest = rest.trim_start().strip_prefix(')')?;
    let weight: f64 = number.parse().ok()?;
    weight.is_finite().then_some((weight, s.len() - rest.len()))
}

fn multiply(pieces: &mut [Piece], from: usize, by: f64) {
    for piece in pieces.iter_mut().skip(from) {
        if let Piece::Text(_, weight) = piece {
            *weight *= by;
        }
    }
}

/// Appends text of weight 1, in which the word `BREAK` with the blanks around it becomes a break.
fn push_text(pieces: &mut Vec<Piece>, text: &str) {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut start, mut searched) = (0, 0);
    while let Some(at) = text.get(searched..).and_then(|t| t.find(BREAK)).map(|i| searched + i) {
        let end = at + BREAK.len();
        searched = end;
        let (before, after) = (text.get(start..at).unwrap_or_default(), text.get(end..).unwrap_or_default());
        if text.get(..at).is_some_and(|t| t.ends_with(is_word)) || after.starts_with(is_word) {
            continue;
        }
        pieces.push(Piece::Text(before.trim_end().into(), 1.0));
        pieces.push(Piece::Break);
        start = text.len() - after.trim_start().len();
        searched = start;
    }
    pieces.push(Piece::Text(text.get(start..).unwrap_or_default().into(), 1.0));
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn pieces_agree_with_the_rules_of_the_web_ui() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/prompts.json")).unwrap();
        let cases = fixture["attention"].as_array().unwrap();
        assert!(cases.len() >= 60);
        for case in cases {
            let (text, want) = (case[0].as_str().unwrap(), case[1].as_array().unwrap());
            let want: Vec<Piece> = want.iter().map(piece).collect();
            let got = parse(text);
            let close = got.len() == want.len()
                && got.iter().zip(&want).all(|pair| match pair {
                    (Piece::Text(a, v), Piece::Text(b, w)) => a == b && (v - w).abs() < 1e-12,
                    (a, b) => a == b,
                });
            assert!(close, "{text:?}: got {got:?}, want {want:?}");
        }
    }

    pub(in super::super) fn piece(json: &serde_json::Value) -> Piece {
        match (json[0].as_str().unwrap(), json[1].as_f64().unwrap()) {
            (BREAK, -1.0) => Piece::Break,
            (text, weight) => Piece::Text(text.into(), weight),
        }
    }

    #[test]
    fn a_break_inside_brackets_is_a_break() {
        let text = |t: &str, w| Piece::Text(t.into(), w);
        assert_eq!(parse("(a BREAK b:2)"), [text("a", 2.0), Piece::Break, text("b", 2.0)]);
    }

    #[test]
    fn what_is_no_number_is_text() {
        for prompt in ["(a:1.2.3)", "(a:+-1)", "(a:.)", &format!("(a:{})", "9".repeat(400))] {
            let inside = &prompt[1..prompt.len() - 1];
            assert_eq!(parse(prompt), [Piece::Text(inside.into(), 1.1)], "{prompt}");
        }
    }

    #[test]
    fn a_megabyte_of_brackets_takes_no_time() {
        for prompt in
            ["(".repeat(1 << 20), ")]".repeat(1 << 19), "\\(BREAK ".repeat(1 << 17), "BREAK".repeat(1 << 18)]
        {
            assert!(!parse(&prompt).is_empty());
        }
    }
}
