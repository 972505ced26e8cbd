//! Edges of a picture (Canny 1986), for ControlNets that follow them. Everything but the thresholds is computed in whole
//! numbers. Golden values: `oracle/canny.py`.

/// A Gaussian of deviation 1.4, times 159.
const GAUSS: [[i64; 5]; 5] =
    [[2, 4, 5, 4, 2], [4, 9, 12, 9, 4], [5, 12, 15, 12, 5], [4, 9, 12, 9, 4], [2, 4, 5, 4, 2]];
/// Gradients across and down.
const SOBEL: [[[i64; 3]; 3]; 2] = [[[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], [[-1, -2, -1], [0, 0, 0], [1, 2, 1]]];
/// The strongest gradient times this begins an edge, and what begins one times this goes on with it: the thresholds of
/// stable-diffusion.cpp's `preprocess_canny`, whose lower one is a share of the higher one. In OpenCV's and ComfyUI's
/// Canny both are gradients.
const THRESHOLD: f64 = 0.08;
/// The tangent of 22.5 degrees, where the nearest neighbour in a direction becomes a diagonal one.
const DIAGONAL: f64 = std::f64::consts::SQRT_2 - 1.0;

/// White edges on black, three bytes a pixel, of a picture of that width.
pub(crate) fn edges(rgb: &[u8], width: usize) -> Vec<u8> {
    let luma: Vec<i64> = rgb
        .as_chunks::<3>()
        .0
        .iter()
        .map(|[r, g, b]| (19_595 * i64::from(*r) + 38_470 * i64::from(*g) + 7_471 * i64::from(*b) + 0x8000) >> 16)
        .collect();
    let grid = Grid { width, values: luma };
    let smooth = grid.filter(&GAUSS);
    let [gx, gy] = SOBEL.map(|kernel| smooth.filter(&kernel));
    let squares = gx.values.iter().zip(&gy.values).map(|(x, y)| x * x + y * y).collect();
    let strength = Grid { width, values: squares };
    let most = strength.values.iter().copied().max().unwrap_or(0) as f64;
    let begins = THRESHOLD * THRESHOLD * most;
    let goes_on = THRESHOLD * THRESHOLD * begins;

    let mut kept = vec![false; strength.values.len()];
    let mut open = Vec::new();
    for (i, ((&s, &x), &y)) in strength.values.iter().zip(&gx.values).zip(&gy.values).enumerate() {
        let step = toward(x, y);
        let beside = [step, step.map(|d| -d)].map(|d| strength.beside(i, d).map_or(0, |(_, s)| s));
        if s > 0 && s as f64 >= goes_on && beside.iter().all(|b| *b <= s) {
            if let Some(kept) = kept.get_mut(i) {
                *kept = true;
            }
            if s as f64 >= begins {
                open.push(i);
            }
        }
    }
    let mut out = vec![0; 3 * kept.len()];
    while let Some(i) = open.pop() {
        let Some(kept) = kept.get_mut(i).filter(|kept| **kept) else { continue };
        *kept = false;
        if let Some(pixel) = out.get_mut(3 * i..3 * i + 3) {
            pixel.fill(255);
        }
        let around = (-1..=1).flat_map(|dy| (-1..=1).map(move |dx| [dy, dx]));
        open.extend(around.filter_map(|d| strength.beside(i, d)).map(|(at, _)| at));
    }
    out
}

/// The neighbour, down and across, that a gradient points to.
fn toward(x: i64, y: i64) -> [isize; 2] {
    let (across, down) = (x.abs() as f64, y.abs() as f64);
    if down < DIAGONAL * across {
        [0, 1]
    } else if across < DIAGONAL * down {
        [1, 0]
    } else if (x > 0) == (y > 0) {
        [1, 1]
    } else {
        [1, -1]
    }
}

struct Grid {
    width: usize,
    values: Vec<i64>,
}

impl Grid {
    fn height(&self) -> usize {
        self.values.len() / self.width.max(1)
    }

    /// The place and value of a neighbour inside of the picture.
    fn beside(&self, i: usize, [dy, dx]: [isize; 2]) -> Option<(usize, i64)> {
        let y = (i / self.width.max(1)).checked_add_signed(dy)?;
        let x = (i % self.width.max(1)).checked_add_signed(dx).filter(|x| *x < self.width)?;
        let at = y * self.width + x;
        Some((at, *self.values.get(at)?))
    }

    /// The sum of a cell's neighbours times `kernel`; beyond the edge the picture goes on as at it.
    fn filter<const N: usize>(&self, kernel: &[[i64; N]; N]) -> Grid {
        let (width, height) = (self.width, self.height());
        let near = |at: usize, k: usize, side: usize| (at + k).saturating_sub(N / 2).min(side.saturating_sub(1));
        let value = |i: usize| {
            let (y, x) = (i / width.max(1), i % width.max(1));
            let mut sum = 0;
            for (ky, row) in kernel.iter().enumerate() {
                let line = near(y, ky, height) * width;
                for (kx, k) in row.iter().enumerate() {
                    sum += k * self.values.get(line + near(x, kx, width)).copied().unwrap_or(0);
                }
            }
            sum
        };
        Grid { width, values: (0..self.values.len()).map(value).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Fixture;

    #[test]
    fn edges_agree_with_scipy() {
        let fixture = Fixture::open("canny.safetensors");
        let sizes = fixture.metadata("config")["sizes"].as_object().unwrap().clone();
        for (name, size) in sizes {
            let width = size[0].as_u64().unwrap() as usize;
            let got = edges(fixture.u8s(&format!("input.{name}")), width);
            let want: Vec<u8> = fixture.u8s(&format!("output.{name}")).iter().flat_map(|v| [*v; 3]).collect();
            let off = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            assert!(got.len() == want.len() && off == 0, "{name}: {off} of {}", want.len());
        }
    }

    #[test]
    fn a_plain_picture_has_no_edges() {
        assert_eq!(edges(&[90; 3 * 20], 5), [0; 3 * 20]);
        assert_eq!(edges(&[7, 8, 9], 1), [0; 3]);
        assert_eq!(edges(&[], 0), [0; 0]);
    }
}
