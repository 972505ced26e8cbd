//! C++'s `default_random_engine` with `normal_distribution<float>`, which the standard leaves to the implementation:
//! libstdc++'s `minstd_rand0` (Lewis, Goodman and Miller 1969) and Marsaglia's polar method.

const MODULUS: u64 = (1 << 31) - 1;

#[derive(Debug, Clone)]
pub(super) struct MinStd {
    state: u64,
}

impl MinStd {
    /// Only the low 32 bits of the seed count.
    pub(super) fn new(seed: u64) -> MinStd {
        let state = u64::from(seed as u32) % MODULUS;
        MinStd { state: if state == 0 { 1 } else { state } }
    }

    /// Uniform in [0, 1), in the f32 arithmetic of `generate_canonical`.
    fn uniform(&mut self) -> f32 {
        self.state = self.state * 16_807 % MODULUS;
        let u = (self.state - 1) as f32 / (MODULUS - 1) as f32;
        if u < 1.0 { u } else { 1.0 - f32::EPSILON / 2.0 }
    }

    /// A call starts a new distribution: the second value of its last pair is lost.
    pub(super) fn randn(&mut self, n: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(n + 1);
        while values.len() < n {
            let (x, y) = (2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0);
            let square = x * x + y * y;
            if square > 0.0 && square <= 1.0 {
                let scale = (-2.0 * square.ln() / square).sqrt();
                values.extend([y * scale, x * scale]);
            }
        }
        values.truncate(n);
        values
    }
}
