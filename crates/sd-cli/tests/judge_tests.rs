//! The judge of the demo pictures recognises shapes that are drawn by formula, and nothing in what is none.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod judge;

use judge::{PALETTE, SHAPES, Seen, look};

const SIZE: usize = 128;
const BLUE: [f64; 3] = [45.0, 85.0, 215.0];
const WHITE: [f64; 3] = [248.0, 248.0, 248.0];

/// A picture with `color` where `covers(x, y)` of the distance from (cx, cy) in units of `r`.
fn picture(color: [f64; 3], back: [f64; 3], at: [f64; 3], covers: impl Fn(f64, f64) -> bool) -> Vec<u8> {
    let [cx, cy, r] = at;
    let pixel = |i: usize| {
        let (x, y) = ((i % SIZE) as f64 + 0.5, (i / SIZE) as f64 + 0.5);
        if covers((x - cx) / r, (y - cy) / r) { color } else { back }
    };
    (0..SIZE * SIZE).flat_map(pixel).map(|v| v as u8).collect()
}

fn seen(rgb: &[u8]) -> Seen {
    look(SIZE, SIZE, rgb).unwrap()
}

/// Shapes by inequality, not by the outlines that the judge compares with.
fn covers(shape: &str, x: f64, y: f64) -> bool {
    let radius = x.hypot(y);
    match shape {
        "circle" => radius < 1.0,
        "ring" => radius < 1.0 && radius > 0.55,
        "square" => x.abs().max(y.abs()) < 0.92,
        "diamond" => x.abs() + y.abs() < 1.0,
        "triangle" => y < 0.9 && y > 2.0 * x.abs() - 1.0,
        "cross" => x.abs().max(y.abs()) < 1.0 && x.abs().min(y.abs()) < 0.36,
        // Five copies of a spike: half-planes through the tips of a pentagram.
        "star" => {
            let sides = (0..5).filter(|k| {
                let a = std::f64::consts::TAU * *k as f64 / 5.0 - std::f64::consts::FRAC_PI_2;
                x * a.cos() + y * a.sin() < 0.38
            });
            sides.count() >= 4 && radius < 1.2
        }
        // The sextic heart curve.
        "heart" => {
            let (x, y) = (1.2 * x, 0.15 - 1.2 * y);
            let a = x * x + y * y - 1.0;
            a.powi(3) - x * x * y.powi(3) < 0.0
        }
        other => panic!("{other}"),
    }
}

#[test]
fn every_shape_in_two_sizes_and_three_places() {
    for shape in SHAPES {
        for (at, position) in
            [([64.0, 64.0, 25.0], "center"), ([36.0, 36.0, 16.0], "top left"), ([64.0, 88.0, 30.0], "bottom")]
        {
            let got = seen(&picture(BLUE, WHITE, at, |x, y| covers(shape, x, y)));
            let want = Seen { shape, color: "blue", background: "white", position: position.into() };
            assert_eq!(got, want, "{at:?}");
        }
    }
}

#[test]
fn every_colour() {
    for (name, rgb) in PALETTE {
        let (back, background) = if name == "white" { (BLUE, "blue") } else { (WHITE, "white") };
        let got = seen(&picture(rgb, back, [64.0, 64.0, 30.0], |x, y| covers("circle", x, y)));
        assert_eq!((got.color, got.background), (name, background));
    }
}

#[test]
fn no_object_and_no_shape() {
    let empty = picture(BLUE, WHITE, [64.0, 64.0, 25.0], |_, _| false);
    assert_eq!(look(SIZE, SIZE, &empty), None);
    let faint = picture([230.0, 230.0, 230.0], WHITE, [64.0, 64.0, 25.0], |x, y| covers("circle", x, y));
    assert_eq!(look(SIZE, SIZE, &faint), None);
    let others: [fn(f64, f64) -> bool; 4] = [
        |x, y| x.abs() < 2.0 && y.abs() < 0.5,                          // a bar
        |x, y| (x.abs() - y.abs()).abs() < 0.15 && x.abs() < 1.0,       // an X
        |x, y| x.abs() < 1.0 && y.abs() < 1.0 && (x < -0.6 || y > 0.6), // an L
        |x, y| (0.8..1.0).contains(&x.hypot(y)),                        // a thin hoop
    ];
    for (i, covers) in others.into_iter().enumerate() {
        let got = seen(&picture(BLUE, WHITE, [64.0, 64.0, 25.0], covers));
        assert_eq!(got.shape, "unclear", "{i}: {got:?}");
    }
}
