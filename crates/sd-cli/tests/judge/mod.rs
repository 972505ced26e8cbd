//! Says what a picture of the demo model shows, from its pixels alone. The rules are those of
//! `tools/demo-model/README.md`; the prompt plays no part in them.

/// Colours by name, RGB.
pub(crate) const PALETTE: [(&str, [f64; 3]); 12] = [
    ("red", [220.0, 40.0, 40.0]),
    ("green", [40.0, 165.0, 70.0]),
    ("blue", [45.0, 85.0, 215.0]),
    ("yellow", [245.0, 215.0, 50.0]),
    ("orange", [245.0, 135.0, 30.0]),
    ("purple", [135.0, 55.0, 185.0]),
    ("pink", [245.0, 145.0, 190.0]),
    ("cyan", [60.0, 205.0, 225.0]),
    ("brown", [125.0, 75.0, 40.0]),
    ("white", [248.0, 248.0, 248.0]),
    ("black", [20.0, 20.0, 24.0]),
    ("gray", [130.0, 132.0, 136.0]),
];

pub(crate) const SHAPES: [&str; 8] = ["circle", "square", "triangle", "star", "heart", "diamond", "cross", "ring"];

/// Width of the border whose median is the background.
const FRAME: usize = 6;
/// The least distance from the background, in RGB, at which there is an object.
const CONTRAST: f64 = 40.0;
/// Shapes are compared on a grid of this many cells a side over the object's bounding box.
const GRID: usize = 32;
/// The least intersection over union of an object with the shape it is taken for.
const OVERLAP: f64 = 0.7;
/// All shapes are about as wide as high; a bounding box further from a square holds none of them.
const ASPECT: f64 = 1.45;
/// Pixels from the middle, for a picture 128 pixels wide, at which an object is at a side.
const OFF_CENTER: f64 = 12.0;

/// What a picture shows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Seen {
    pub(crate) shape: &'static str,
    pub(crate) color: &'static str,
    pub(crate) background: &'static str,
    pub(crate) position: String,
}

/// Looks at a picture of `width` x `height` pixels, three bytes each. `None` when it shows no object.
pub(crate) fn look(width: usize, height: usize, rgb: &[u8]) -> Option<Seen> {
    let pixels: Vec<[f64; 3]> = rgb.chunks_exact(3).map(|p| [p[0], p[1], p[2]].map(f64::from)).collect();
    assert_eq!(pixels.len(), width * height);
    let in_frame = |i: usize| {
        let (x, y) = (i % width, i / width);
        x < FRAME || y < FRAME || x >= width - FRAME || y >= height - FRAME
    };
    let background = median((0..pixels.len()).filter(|i| in_frame(*i)).map(|i| pixels[i]));

    let distance: Vec<f64> = pixels.iter().map(|p| dot(sub(*p, background), sub(*p, background)).sqrt()).collect();
    let mut sorted = distance.clone();
    sorted.sort_by(f64::total_cmp);
    let peak = sorted[(sorted.len() - 1) * 99 / 100];
    if peak < CONTRAST {
        return None;
    }
    let fill = median(pixels.iter().zip(&distance).filter(|(_, d)| **d > 0.75 * peak).map(|(p, _)| *p));
    let axis = sub(fill, background);
    let covered = |p: &[f64; 3]| dot(sub(*p, background), axis) / dot(axis, axis) > 0.5;
    let object = largest_part(width, height, pixels.iter().map(covered).collect())?;

    let (x0, x1) = bounds((0..width).filter(|x| (0..height).any(|y| object[y * width + x])));
    let (y0, y1) = bounds((0..height).filter(|y| (0..width).any(|x| object[y * width + x])));
    let aspect = (x1 - x0) as f64 / (y1 - y0) as f64;
    let cell =
        |from: usize, to: usize, k: usize| from + ((k as f64 + 0.5) / GRID as f64 * (to - from) as f64) as usize;
    let grid: Vec<bool> =
        (0..GRID * GRID).map(|i| object[cell(y0, y1, i / GRID) * width + cell(x0, x1, i % GRID)]).collect();
    let overlap = |shape: &&'static str| overlap(&grid, &template(shape));
    let best = SHAPES.iter().copied().max_by(|a, b| overlap(a).total_cmp(&overlap(b)))?;
    let clear = overlap(&best) >= OVERLAP && (1.0 / ASPECT..ASPECT).contains(&aspect);

    let side = |from: usize, to: usize, size: usize, before: &'static str, after: &'static str| {
        let off = ((from + to) as f64 - size as f64) / 2.0;
        let limit = OFF_CENTER * size as f64 / 128.0;
        if off < -limit {
            before
        } else if off > limit {
            after
        } else {
            ""
        }
    };
    let words = [side(y0, y1, height, "top", "bottom"), side(x0, x1, width, "left", "right")];
    let position = words.into_iter().filter(|w| !w.is_empty()).collect::<Vec<_>>().join(" ");
    Some(Seen {
        shape: if clear { best } else { "unclear" },
        color: nearest(fill),
        background: nearest(background),
        position: if position.is_empty() { "center".into() } else { position },
    })
}

fn sub(a: [f64; 3], b: [f64; 3]) -> [f64; 3] {
    [a[0] - b[0], a[1] - b[1], a[2] - b[2]]
}

fn dot(a: [f64; 3], b: [f64; 3]) -> f64 {
    a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
}

/// The median of each channel.
fn median(colors: impl Iterator<Item = [f64; 3]>) -> [f64; 3] {
    let colors: Vec<[f64; 3]> = colors.collect();
    [0, 1, 2].map(|channel| {
        let mut values: Vec<f64> = colors.iter().map(|c| c[channel]).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    })
}

fn nearest(color: [f64; 3]) -> &'static str {
    let distance = |c: [f64; 3]| dot(sub(c, color), sub(c, color));
    PALETTE.iter().min_by(|a, b| distance(a.1).total_cmp(&distance(b.1))).unwrap().0
}

/// The first index, and one past the last.
fn bounds(indices: impl Iterator<Item = usize>) -> (usize, usize) {
    indices.fold((usize::MAX, 0), |(low, high), i| (low.min(i), high.max(i + 1)))
}

/// The pixels of the largest part of `mask` whose pixels touch with their sides.
fn largest_part(width: usize, height: usize, mut mask: Vec<bool>) -> Option<Vec<bool>> {
    let mut best: Vec<usize> = Vec::new();
    for start in 0..mask.len() {
        let mut part = Vec::new();
        let mut open = vec![start];
        while let Some(i) = open.pop() {
            if !std::mem::take(&mut mask[i]) {
                continue;
            }
            part.push(i);
            let (x, y) = (i % width, i / width);
            open.extend((x > 0).then(|| i - 1));
            open.extend((x + 1 < width).then_some(i + 1));
            open.extend((y > 0).then(|| i - width));
            open.extend((y + 1 < height).then_some(i + width));
        }
        if part.len() > best.len() {
            best = part;
        }
    }
    let mut object = vec![false; mask.len()];
    best.iter().for_each(|i| object[*i] = true);
    (!best.is_empty()).then_some(object)
}

fn overlap(a: &[bool], b: &[bool]) -> f64 {
    let count = |both: fn(bool, bool) -> bool| a.iter().zip(b).filter(|(a, b)| both(**a, **b)).count() as f64;
    count(|a, b| a && b) / count(|a, b| a || b)
}

/// A shape scaled to fill the grid.
fn template(shape: &str) -> Vec<bool> {
    let outline = outline(shape);
    let low = |axis: usize| outline.iter().map(|p| p[axis]).fold(f64::INFINITY, f64::min);
    let high = |axis: usize| outline.iter().map(|p| p[axis]).fold(f64::NEG_INFINITY, f64::max);
    let hole = if shape == "ring" { outline.iter().map(|p| p.map(|v| 0.55 * v)).collect() } else { Vec::new() };
    let at = |axis: usize, k: usize| low(axis) + (k as f64 + 0.5) / GRID as f64 * (high(axis) - low(axis));
    (0..GRID * GRID)
        .map(|i| [at(0, i % GRID), at(1, i / GRID)])
        .map(|point| inside(point, &outline) && !inside(point, &hole))
        .collect()
}

/// Whether a ray from `point` crosses the polygon an odd number of times.
fn inside(point: [f64; 2], polygon: &[[f64; 2]]) -> bool {
    let next = polygon.iter().cycle().skip(1);
    let crossings = polygon.iter().zip(next).filter(|(a, b)| {
        (a[1] > point[1]) != (b[1] > point[1])
            && point[0] < a[0] + (point[1] - a[1]) / (b[1] - a[1]) * (b[0] - a[0])
    });
    crossings.count() % 2 == 1
}

/// Corners of a shape, x to the right and y down.
fn outline(shape: &str) -> Vec<[f64; 2]> {
    use std::f64::consts::{FRAC_PI_2, TAU};
    let turn = |k: usize, n: usize| TAU * k as f64 / n as f64;
    match shape {
        "circle" | "ring" => (0..96).map(|k| turn(k, 96)).map(|a| [a.cos(), a.sin()]).collect(),
        "square" => vec![[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]],
        "diamond" => vec![[0.0, -1.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]],
        "triangle" => vec![[0.0, -1.0], [1.0, 1.0], [-1.0, 1.0]],
        "cross" => {
            let w = 0.36;
            let quarter = [[w, -1.0], [w, -w], [1.0, -w]];
            let turned = |q: usize| quarter.map(|[x, y]| [[x, y], [-y, x], [-x, -y], [y, -x]][q]);
            (0..4).flat_map(turned).collect()
        }
        "star" => (0..10)
            .map(|k| (turn(k, 10) - FRAC_PI_2, if k % 2 == 0 { 1.14 } else { 0.48 }))
            .map(|(a, r)| [r * a.cos(), r * a.sin()])
            .collect(),
        "heart" => (0..96)
            .map(|k| turn(k, 96))
            .map(|t| {
                let y = 13.0 * t.cos() - 5.0 * (2.0 * t).cos() - 2.0 * (3.0 * t).cos() - (4.0 * t).cos();
                [16.0 * t.sin().powi(3), -y]
            })
            .collect(),
        other => panic!("no shape {other}"),
    }
}
