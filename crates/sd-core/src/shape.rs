//! Row-major shapes of up to five axes, in PyTorch order: the last axis is contiguous.

use std::fmt;

use crate::error::{Error, Result};

/// The most axes a shape can have.
pub const MAX_RANK: usize = 5;

/// The size of each axis, outermost first. A scalar has no axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// A shape from its axes.
    ///
    /// # Errors
    /// More than [`MAX_RANK`] axes, or a product that does not fit in an `isize`.
    pub fn new(dims: &[usize]) -> Result<Shape> {
        if dims.len() > MAX_RANK {
            return Err(Error::shape(format!(
                "{dims:?} has {} axes, at most {MAX_RANK} are supported",
                dims.len()
            )));
        }
        let mut shape = Shape { dims: [1; MAX_RANK], rank: dims.len() as u8 };
        shape.dims[..dims.len()].copy_from_slice(dims);
        let product = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        match product {
            Some(n) if n <= isize::MAX as usize => Ok(shape),
            _ => Err(Error::shape(format!("the product of {dims:?} does not fit in memory"))),
        }
    }

    /// The axes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// How many axes there are.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// The size of axis `i` counted from the front; 1 past the end.
    pub fn dim(&self, i: usize) -> usize {
        self.dims.get(i).copied().unwrap_or(1)
    }

    /// The size of the last axis; 1 for a scalar.
    pub fn last(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// The axes as an array, if there are exactly `N`.
    pub fn array<const N: usize>(&self) -> Option<[usize; N]> {
        self.dims().try_into().ok()
    }

    /// The same shape with another last axis.
    ///
    /// # Errors
    /// A scalar, or a product that does not fit.
    pub fn with_last(&self, last: usize) -> Result<Shape> {
        self.with_dim(self.rank().wrapping_sub(1), last)
    }

    /// The same shape with axis `i` set to `size`.
    ///
    /// # Errors
    /// There is no axis `i`, or the product does not fit.
    pub fn with_dim(&self, i: usize, size: usize) -> Result<Shape> {
        let mut dims = self.dims().to_vec();
        match dims.get_mut(i) {
            Some(d) => *d = size,
            None => return Err(Error::shape(format!("{self} has no axis {i}"))),
        }
        Shape::new(&dims)
    }

    /// The shape both operands take when axes are aligned at the end and axes of size 1 repeat, as in NumPy.
    pub fn broadcast(&self, other: &Shape) -> Option<Shape> {
        let rank = self.rank().max(other.rank());
        let mut dims = [1; MAX_RANK];
        for (i, d) in dims.iter_mut().enumerate().take(rank) {
            let at = |s: &Shape| (i + s.rank()).checked_sub(rank).map_or(1, |j| s.dim(j));
            *d = match (at(self), at(other)) {
                (a, b) if a == b => a,
                (1, b) => b,
                (a, 1) => a,
                _ => return None,
            };
        }
        Shape::new(&dims[..rank]).ok()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(dims: &[usize]) -> Shape {
        Shape::new(dims).unwrap()
    }

    #[test]
    fn limits() {
        assert!(Shape::new(&[1; 6]).is_err());
        assert!(Shape::new(&[1 << 33, 1 << 33]).is_err());
        assert_eq!(s(&[]).elements(), 1);
        assert_eq!(s(&[0, 4]).elements(), 0);
        assert!(s(&[]).with_last(2).is_err());
    }

    #[test]
    fn broadcasting_aligns_at_the_end() {
        assert_eq!(s(&[2, 3, 4]).broadcast(&s(&[4])), Some(s(&[2, 3, 4])));
        assert_eq!(s(&[2, 1, 4]).broadcast(&s(&[3, 1])), Some(s(&[2, 3, 4])));
        assert_eq!(s(&[2, 3]).broadcast(&s(&[2])), None);
    }
}
