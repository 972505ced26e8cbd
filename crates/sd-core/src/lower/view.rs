//! Values as the kernels see them: sizes with steps, over memory that another value may own.

use crate::dtype::DType;
use crate::graph::Var;

/// What memory a value lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Root {
    /// The result of a call.
    Temp(usize),
    /// A leaf, or a value of an earlier segment.
    Outside(Var),
}

/// Elements in memory, counted from its start; row-major.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct View {
    pub(super) root: Root,
    pub(super) dtype: DType,
    pub(super) offset: usize,
    pub(super) dims: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

/// Steps of neighbours without gaps.
pub(super) fn dense(dims: &[usize]) -> Vec<usize> {
    let mut step = 1;
    let mut out: Vec<usize> = dims
        .iter()
        .rev()
        .map(|&n| {
            let this = step;
            step *= n;
            this
        })
        .collect();
    out.reverse();
    out
}

impl View {
    /// All of a memory, without gaps.
    pub(super) fn whole(root: Root, dtype: DType, dims: &[usize]) -> View {
        View { root, dtype, offset: 0, dims: dims.to_vec(), strides: dense(dims) }
    }

    pub(super) fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    /// Whether elements follow each other without gaps.
    pub(super) fn is_dense(&self) -> bool {
        let dense = dense(&self.dims);
        self.dims.iter().zip(&self.strides).zip(dense).all(|((&n, &s), d)| n == 1 || s == d)
    }

    /// The same elements in other sizes, if steps can say so.
    pub(super) fn reshaped(&self, dims: &[usize]) -> Option<View> {
        // Axes that are walked through as one, innermost first: size and step.
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (&n, &step) in self.dims.iter().zip(&self.strides).rev().filter(|d| *d.0 != 1) {
            match runs.last_mut() {
                Some(r) if r.1 * r.0 == step => r.0 *= n,
                _ => runs.push((n, step)),
            }
        }
        let mut runs = runs.into_iter();
        let (mut left, mut step) = (1, 0);
        let mut strides = Vec::with_capacity(dims.len());
        for &n in dims.iter().rev() {
            if n == 1 {
                strides.push(0);
                continue;
            }
            if left == 1 {
                (left, step) = runs.next()?;
            }
            if !left.is_multiple_of(n) {
                return None;
            }
            strides.push(step);
            (left, step) = (left / n, step * n);
        }
        strides.reverse();
        Some(View { dims: dims.to_vec(), strides, ..self.clone() })
    }

    /// Repeated to `dims`, as in NumPy.
    pub(super) fn broadcast(&self, dims: &[usize]) -> View {
        let skip = dims.len() - self.dims.len();
        let mut strides = vec![0; dims.len()];
        for (i, (&n, &step)) in self.dims.iter().zip(&self.strides).enumerate() {
            strides[skip + i] = if n == 1 { 0 } else { step };
        }
        View { dims: dims.to_vec(), strides, ..self.clone() }
    }

    /// Whether its rows are neighbours, or one element repeated.
    pub(super) fn has_rows(&self) -> bool {
        let last = self.dims.iter().zip(&self.strides).rev().find(|d| *d.0 != 1);
        last.is_none_or(|(_, &step)| step <= 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshapes_keep_steps_where_they_can() {
        let part = View {
            root: Root::Temp(0),
            dtype: DType::F32,
            offset: 4,
            dims: vec![2, 3, 4],
            strides: vec![36, 12, 1],
        };
        assert_eq!(part.reshaped(&[6, 2, 1, 2]).unwrap().strides, [12, 2, 0, 1]);
        assert!(part.reshaped(&[24]).is_none() && part.reshaped(&[2, 12]).is_none());
        let repeated = View { dims: vec![2, 3], strides: vec![0, 1], ..part.clone() };
        assert_eq!(repeated.reshaped(&[2, 3, 1]).unwrap().strides, [0, 1, 0]);
        assert!(repeated.reshaped(&[6]).is_none());
        assert_eq!(View::whole(Root::Temp(0), DType::F32, &[3, 1]).broadcast(&[2, 3, 5]).strides, [0, 1, 0]);
    }
}
