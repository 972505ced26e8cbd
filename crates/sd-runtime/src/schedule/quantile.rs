//! Quantiles: the value below which a share of a distribution lies.

/// Enough halvings for every bit of an f64.
const HALVINGS: usize = 200;

/// The quantile of the standard normal distribution; infinite at 0 and 1.
pub(super) fn normal(p: f64) -> f64 {
    if p <= 0.0 || p >= 1.0 {
        return if p <= 0.0 { f64::NEG_INFINITY } else { f64::INFINITY };
    }
    if p > 0.5 {
        return -normal(1.0 - p);
    }
    bisect(-40.0, 0.0, |x| below(x) < p)
}

/// The share of the normal distribution below `x`, at most 0, from the continued fraction of its tail (Abramowitz and
/// Stegun 26.2.14) or the series around 0 (26.2.11).
fn below(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    if x < -3.0 {
        return density / (1..=200).rev().fold(-x, |tail, k| -x + f64::from(k) / tail);
    }
    let (mut term, mut sum) = (x, x);
    for k in 1..200 {
        term *= x * x / f64::from(2 * k + 1);
        sum += term;
    }
    0.5 + density * sum
}

/// The quantile of the beta distribution with parameters `a` and `b` above 0.
pub(super) fn beta(p: f64, a: f64, b: f64) -> f64 {
    if p <= 0.0 || p >= 1.0 {
        return p.clamp(0.0, 1.0);
    }
    bisect(0.0, 1.0, |x| incomplete_beta(x, a, b) < p)
}

/// The share of the beta distribution below `x`: the continued fraction of Abramowitz and Stegun 26.5.8 by Lentz's
/// method, on the side where it converges fast.
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(1.0 - x, b, a);
    }
    let held = |v: f64| if v.abs() < 1e-300 { 1e-300 } else { v };
    let (mut c, mut d) = (1.0, 1.0 / held(1.0 - (a + b) * x / (a + 1.0)));
    let mut fraction = d;
    for m in 1..500 {
        let m = f64::from(m);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let before = fraction;
        for term in [even, odd] {
            d = 1.0 / held(1.0 + term * d);
            c = held(1.0 + term / c);
            fraction *= c * d;
        }
        if (fraction / before - 1.0).abs() < 1e-16 {
            break;
        }
    }
    let front = a * x.ln() + b * (1.0 - x).ln() + ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b);
    (front.exp() * fraction / a).clamp(0.0, 1.0)
}

/// The logarithm of the gamma function above 0: Stirling's series (Abramowitz and Stegun 6.1.41), after steps up to
/// where it converges.
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut steps) = (x, 0.0);
    while x < 15.0 {
        steps += x.ln();
        x += 1.0;
    }
    let r = 1.0 / (x * x);
    let series = (1.0 / 12.0 - r * (1.0 / 360.0 - r * (1.0 / 1260.0 - r * (1.0 / 1680.0 - r / 1188.0)))) / x;
    (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series - steps
}

/// Where a rising condition stops to hold between two values.
fn bisect(mut low: f64, mut high: f64, still_below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..HALVINGS {
        let middle = 0.5 * (low + high);
        if middle <= low || middle >= high {
            break;
        }
        if still_below(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_quantiles() {
        // Published to 15 places: the quantiles of 0.975, 0.9, 0.99, and by symmetry.
        for (p, want) in [
            (0.975, 1.959_963_984_540_054),
            (0.9, 1.281_551_565_544_601),
            (0.99, 2.326_347_874_040_841),
            (0.5, 0.0),
        ] {
            assert!(
                (normal(p) - want).abs() < 1e-12 && (normal(1.0 - p) + want).abs() < 1e-12,
                "{p} {}",
                normal(p)
            );
        }
        assert!((normal(1e-9) + 5.997_807_015_008_182).abs() < 1e-9);
    }

    #[test]
    fn beta_quantiles() {
        // beta(1, 1) is uniform; of beta(a, 1) the quantile is p^(1/a); of beta(1/2, 1/2) sin^2(pi p / 2).
        for p in [0.001, 0.1, 0.5, 0.77, 0.999] {
            assert!((beta(p, 1.0, 1.0) - p).abs() < 1e-12);
            assert!((beta(p, 3.0, 1.0) - f64::powf(p, 1.0 / 3.0)).abs() < 1e-12);
            let arcsine = (std::f64::consts::FRAC_PI_2 * p).sin().powi(2);
            assert!((beta(p, 0.5, 0.5) - arcsine).abs() < 1e-11, "{p} {} {arcsine}", beta(p, 0.5, 0.5));
        }
    }
}
