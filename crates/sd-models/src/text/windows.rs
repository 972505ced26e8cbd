//! Windows of tokens for CLIP: any prompt is cut into runs of 75, each between a start and an end token.
//! Golden values: `oracle/prompts.py`.

use sd_core::{Error, Result, Tensor};

use super::prompt::Piece;
use super::tokenizer::ClipTokenizer;

/// Tokens of a window between its start and its end.
pub const WINDOW: usize = 75;
/// Tokens of a window with its start and end: the number of positions CLIP has.
pub const CONTEXT: usize = WINDOW + 2;

/// What one run of the text encoder reads, [`CONTEXT`] tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Window {
    /// Token ids.
    pub ids: Vec<i32>,
    /// A weight per token; 1 for start, end and fillers.
    pub weights: Vec<f32>,
    /// Where the first end token stands after the prompt's own: the state that a pooled output is taken from.
    pub end: usize,
}

/// Cuts weighted text into windows. `filler` follows the end token in a window that is not full: the end token
/// itself for SD 1.x, 0 for OpenCLIP. [`Piece::Break`] ends a window early; there is at least one window. Vector `i`
/// after the vocabulary is id `END + 1 + i`; vectors of one piece stay in one window if they fit into any.
pub fn windows(tokenizer: &ClipTokenizer, pieces: &[Piece], filler: u32) -> Vec<Window> {
    let mut done = Vec::new();
    let mut open: Vec<(u32, f32)> = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Break => done.push(close(&mut open, filler)),
            Piece::Vectors(numbers, weight) => {
                if open.len() + numbers.len() > WINDOW && numbers.len() <= WINDOW {
                    done.push(close(&mut open, filler));
                }
                for number in numbers.clone() {
                    if open.len() == WINDOW {
                        done.push(close(&mut open, filler));
                    }
                    open.push((ClipTokenizer::END.saturating_add(1).saturating_add(number as u32), *weight as f32));
                }
            }
            Piece::Text(text, weight) => {
                for id in tokenizer.encode(text) {
                    if open.len() == WINDOW {
                        done.push(close(&mut open, filler));
                    }
                    open.push((id, *weight as f32));
                }
            }
        }
    }
    if !open.is_empty() || done.is_empty() {
        done.push(close(&mut open, filler));
    }
    done
}

fn close(open: &mut Vec<(u32, f32)>, filler: u32) -> Window {
    let end = open.len() + 1;
    let mut tokens = vec![(ClipTokenizer::START, 1.0)];
    tokens.append(open);
    tokens.push((ClipTokenizer::END, 1.0));
    tokens.resize(CONTEXT, (filler, 1.0));
    Window { ids: tokens.iter().map(|t| t.0 as i32).collect(), weights: tokens.iter().map(|t| t.1).collect(), end }
}

/// Multiplies each token state of `states` `[tokens, c]` or `[1, tokens, c]` by its weight, then rescales all of
/// them so that their mean is what it was. Weights that are all 1 change nothing.
///
/// # Errors
/// There is not one weight per token, or weights are so large that states become infinite.
pub fn weigh(states: &mut Tensor, weights: &[f32]) -> Result<()> {
    let shape = states.shape();
    let width = shape.last();
    if width == 0 || shape.elements() != weights.len() * width {
        return Err(Error::internal(format!("{} token weights for states {shape}", weights.len())));
    }
    if weights.iter().all(|&w| w == 1.0) {
        return Ok(());
    }
    let finite = states.is_finite();
    let mean = |v: &[f32]| v.iter().map(|&x| f64::from(x)).sum::<f64>() / v.len() as f64;
    let values = states.values_mut();
    let before = mean(values);
    for (state, &weight) in values.chunks_exact_mut(width).zip(weights) {
        state.iter_mut().for_each(|x| *x *= weight);
    }
    let scale = before / mean(values);
    // A mean of zero leaves nothing to rescale to.
    if scale.is_finite() {
        values.iter_mut().for_each(|x| *x = (f64::from(*x) * scale) as f32);
    }
    if finite && !states.is_finite() {
        let most = weights.iter().map(|w| w.abs()).fold(0.0, f32::max);
        return Err(Error::request(format!("prompt: a weight of {most:e} makes its values infinite"))
            .hint("weights from 0.5 to 1.5 are usual"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::prompt::{parse, tests::piece};
    use super::super::tokenizer::clip;
    use super::*;

    #[test]
    fn windows_agree_with_the_reference() {
        let fixture: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/prompts.json")).unwrap();
        let cases = fixture["windows"].as_array().unwrap();
        assert!(cases.len() >= 15);
        for case in cases {
            let pieces: Vec<Piece> = case["pieces"].as_array().unwrap().iter().map(piece).collect();
            let got = windows(clip().unwrap(), &pieces, ClipTokenizer::END);
            let ids: Vec<Vec<i32>> = serde_json::from_value(case["ids"].clone()).unwrap();
            let weights: Vec<Vec<f32>> = serde_json::from_value(case["weights"].clone()).unwrap();
            assert_eq!(got.iter().map(|w| w.ids.clone()).collect::<Vec<_>>(), ids, "{pieces:?}");
            assert_eq!(got.iter().map(|w| w.weights.clone()).collect::<Vec<_>>(), weights, "{pieces:?}");
        }
    }

    #[test]
    fn the_end_token_comes_before_other_fillers() {
        let [w] = windows(clip().unwrap(), &parse("cat"), 0).try_into().unwrap();
        assert_eq!(w.end, 2);
        assert_eq!(w.ids[..5], [49406, 2368, 49407, 0, 0]);
        assert_eq!(w.ids.len(), CONTEXT);
    }

    #[test]
    fn weighing_keeps_the_mean() {
        let mut t = Tensor::f32(&[1, 2, 2], vec![1.0, 2.0, 3.0, 6.0]).unwrap();
        weigh(&mut t, &[1.0, 1.0]).unwrap();
        assert_eq!(t.values(), [1.0, 2.0, 3.0, 6.0]);
        // Weighted 1 2 6 12 have mean 5.25; the mean was 3.
        weigh(&mut t, &[1.0, 2.0]).unwrap();
        let want = [1.0, 2.0, 6.0, 12.0].map(|x| x * 3.0 / 5.25);
        assert!(t.values().iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{t:?}");
        assert!(weigh(&mut t, &[1.0]).is_err());
        let e = weigh(&mut t, &[1.0, f32::INFINITY]).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with("prompt: a weight of inf"), "{e}");
        let mut zero = Tensor::f32(&[2, 1], vec![1.0, 1.0]).unwrap();
        weigh(&mut zero, &[0.0, 0.0]).unwrap();
        assert_eq!(zero.values(), [0.0, 0.0]);
    }
}
