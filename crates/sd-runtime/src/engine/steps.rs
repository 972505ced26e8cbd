//! An autoencoder's steps, each computed piece by piece over the whole picture before the next begins, so that a device
//! holds no more than a piece while means and variances are those of the picture. The picture itself is in the memory
//! of the process.

use std::ops::Range;

use sd_core::exec::Runner;
use sd_core::graph::Program;
use sd_core::{CancelToken, Error, Result, Tensor};
use sd_models::{Model, Piece, STEP_EPS, STEP_GROUPS, Step, StepValue};

use super::networks::{dims, only};
use crate::tiling::cut;

/// Computes steps.
pub(super) struct Steps<'a> {
    pub(super) model: &'a Model,
    pub(super) runner: &'a mut Runner,
    /// The most rows and columns of a result's piece.
    pub(super) piece: [usize; 2],
    pub(super) circular: [bool; 2],
}

impl Steps<'_> {
    /// What `steps` make of `x [1, c, h, w]`.
    pub(super) fn run(&mut self, steps: &[Step], x: Tensor, cancel: &CancelToken) -> Result<Tensor> {
        let (mut x, mut y) = (x, None);
        for step in steps {
            let made = self.step(step, &x, y.as_ref(), cancel)?;
            match step.makes() {
                StepValue::Picture => (x, y) = (made, None),
                StepValue::Branch => y = Some(made),
            }
        }
        Ok(x)
    }

    /// Shows `see` the program of each step for the largest piece of a picture `[1, c, h, w]`; the size of what the steps
    /// make.
    pub(super) fn check(
        &mut self,
        steps: &[Step],
        x: [usize; 4],
        mut see: impl FnMut(&mut Runner, &Program) -> Result<()>,
    ) -> Result<[usize; 4]> {
        let (mut x, mut y) = (x, None);
        for step in steps {
            let [_, x_channels, h, w] = x;
            let y_channels = y.filter(|_| step.reads_branch()).map_or(0, |[_, c, _, _]: [usize; 4]| c);
            let spans = self.spans(step, [h, w]).map(|spans| spans.into_iter().max_by_key(Span::read));
            let [Some(r), Some(c)] = spans else { return Err(Error::internal("a picture without pieces")) };
            let piece = Piece { size: [r.read(), c.read()], last: [r.ends, c.ends] };
            let program = self.model.step_program(step, piece, [x_channels, y_channels])?;
            see(self.runner, &program)?;
            let [_, k, ..] = made(&program)?;
            let [values, per] = step.scale();
            let made = [1, k, h * values / per, w * values / per];
            match step.makes() {
                StepValue::Picture => (x, y) = (made, None),
                StepValue::Branch => y = Some(made),
            }
        }
        Ok(x)
    }

    /// The pieces of rows and columns in which a step reads a picture `[h, w]`.
    fn spans(&self, step: &Step, size: [usize; 2]) -> [Vec<Span>; 2] {
        let [values, per] = step.scale();
        let spans = |axis: usize, side: usize| {
            let most = self.piece.get(axis).copied().unwrap_or(side);
            let most = (most * per / values).max(per).next_multiple_of(per);
            Span::all(side, most, step.margins(), self.circular.get(axis).copied().unwrap_or(false))
        };
        let [h, w] = size;
        [spans(0, h), spans(1, w)]
    }

    fn step(&mut self, step: &Step, x: &Tensor, y: Option<&Tensor>, cancel: &CancelToken) -> Result<Tensor> {
        let y = y.filter(|_| step.reads_branch());
        let [_, x_channels, h, w] = dims(x)?;
        let y_channels = y.map(dims).transpose()?.map_or(0, |[_, c, _, _]| c);
        let normalised = match step.normalises() {
            Some(StepValue::Picture) => Some(statistics(x)?),
            Some(StepValue::Branch) => {
                Some(statistics(y.ok_or_else(|| Error::internal("a step without a branch"))?)?)
            }
            None => None,
        };
        let [values, per] = step.scale();
        let [rows, columns] = [h, w].map(|side| side * values / per);
        let mut out: Option<Tensor> = None;
        let [down, across] = self.spans(step, [h, w]);
        for r in &down {
            for c in &across {
                cancel.check()?;
                let piece = Piece { size: [r.read(), c.read()], last: [r.ends, c.ends] };
                let program = self.model.step_program(step, piece, [x_channels, y_channels])?;
                let part = |t: &Tensor| cut(t, [r.begin(h), c.begin(w)], piece.size);
                let (x, y) = (part(x)?, y.map(part).transpose()?);
                let mut inputs = vec![("x", &x)];
                inputs.extend(y.iter().map(|y| ("y", y)));
                if let Some((factor, offset)) = &normalised {
                    inputs.extend([("factor", factor), ("offset", offset)]);
                }
                let made = only(self.runner.run(&program, &inputs, cancel)?)?;
                let [_, k, _, _] = dims(&made)?;
                let out = match &mut out {
                    Some(out) => out,
                    None => out.insert(Tensor::zeros(&[1, k, rows, columns])?),
                };
                let scaled = |n: usize| n * values / per;
                let to = [scaled(r.inner.start), scaled(c.inner.start)];
                let from = [scaled(r.margins[0]), scaled(c.margins[0])];
                place(out, &made, to, from, [scaled(r.inner.len()), scaled(c.inner.len())])?;
            }
        }
        out.ok_or_else(|| Error::internal("a picture without pieces"))
    }
}

/// The size `[1, c, h, w]` of what a program makes.
pub(super) fn made(program: &Program) -> Result<[usize; 4]> {
    let shape = program.outputs().first().map(|&v| program.node(v).shape);
    shape.and_then(|s| s.array()).ok_or_else(|| Error::internal("a program that makes no picture"))
}

/// A part of an axis with what it needs on either side.
struct Span {
    inner: Range<usize>,
    /// Positions read before and after it.
    margins: [usize; 2],
    /// Whether nothing follows.
    ends: bool,
}

impl Span {
    /// Parts of at most `most` positions.
    fn all(side: usize, most: usize, [before, after]: [usize; 2], circular: bool) -> Vec<Span> {
        let one = |start: usize| {
            let inner = start..(start + most).min(side);
            let ends = inner.end == side && !circular;
            let margins = [
                if start > 0 || circular { before } else { 0 },
                if inner.end < side || circular { after } else { 0 },
            ];
            Span { inner, margins, ends }
        };
        (0..side).step_by(most.max(1)).map(one).collect()
    }

    fn read(&self) -> usize {
        self.inner.len() + self.margins[0] + self.margins[1]
    }

    /// Where it begins to be read, on an axis of `side` that may go around.
    fn begin(&self, side: usize) -> usize {
        (self.inner.start + side - self.margins[0]) % side.max(1)
    }
}

/// Copies `size` rows and columns of `from`, beginning at `at`, to `to` in `out`.
fn place(out: &mut Tensor, from: &Tensor, to: [usize; 2], at: [usize; 2], size: [usize; 2]) -> Result<()> {
    let ([_, _, oh, ow], [_, _, fh, fw]) = (dims(out)?, dims(from)?);
    let planes = from.values().chunks_exact((fh * fw).max(1));
    for (source, target) in planes.zip(out.values_mut().chunks_exact_mut((oh * ow).max(1))) {
        for row in 0..size[0] {
            let s = (at[0] + row) * fw + at[1];
            let t = (to[0] + row) * ow + to[1];
            match (source.get(s..s + size[1]), target.get_mut(t..t + size[1])) {
                (Some(source), Some(target)) => target.copy_from_slice(source),
                _ => return Err(Error::internal(format!("a piece became {}", from.shape()))),
            }
        }
    }
    Ok(())
}

/// For each channel, the reciprocal of the deviation of its group, and the mean times that with a minus.
fn statistics(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let [_, c, h, w] = dims(x)?;
    let channels = c / STEP_GROUPS.min(c.max(1));
    let (mut factor, mut offset) = (Vec::with_capacity(c), Vec::with_capacity(c));
    for group in x.values().chunks_exact((channels * h * w).max(1)) {
        let n = group.len() as f64;
        let mean = group.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = group.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
        let scale = (variance + f64::from(STEP_EPS)).sqrt().recip();
        factor.resize(factor.len() + channels, scale as f32);
        offset.resize(offset.len() + channels, (-mean * scale) as f32);
    }
    let shape = [1, c, 1, 1];
    Ok((Tensor::f32(&shape, factor)?, Tensor::f32(&shape, offset)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_an_axis_with_their_margins() {
        let spans = Span::all(10, 4, [1, 1], false);
        let all: Vec<_> = spans.iter().map(|s| (s.inner.clone(), s.margins, s.ends)).collect();
        assert_eq!(all, [(0..4, [0, 1], false), (4..8, [1, 1], false), (8..10, [1, 0], true)]);
        let around = Span::all(10, 16, [1, 1], true);
        assert_eq!((around.len(), around[0].read(), around[0].begin(10), around[0].ends), (1, 12, 9, false));
    }

    #[test]
    fn statistics_are_those_of_groups() {
        let x = Tensor::f32(&[1, 64, 1, 2], (0..128).map(|i| (i % 4) as f32 * 2.0).collect()).unwrap();
        let (factor, offset) = statistics(&x).unwrap();
        // 0, 2, 4, 6: the mean is 3, the variance 5.
        assert_eq!(factor.dims(), [1, 64, 1, 1]);
        let want = 5.000001f64.sqrt().recip() as f32;
        assert!(factor.values().iter().all(|f| (f - want).abs() < 1e-7));
        assert!(offset.values().iter().all(|o| (o + 3.0 * want).abs() < 1e-6));
    }
}
