//! Large convolutions, computed in bands of rows.
//!
//! What makes the operand of such a convolution makes it for one band after the other, so that there is never all of it. If
//! nobody reads the operand afterwards, results take its place: those of a band when the next one has read the rows
//! that both see. Every element is the same as without bands.

use std::collections::HashMap;

use super::host::{Call, Kernel, temp};
use super::view::{Root, View};
use crate::dtype::DType;
use crate::ffi::HostOp;
use crate::graph::Var;
use crate::kernels::{Conv, Moments, Norm, Put, Rows};

/// What is computed in bands.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Bytes of images from which on they are.
    pub(super) large: usize,
    /// About how many of them are in a band.
    pub(super) band: usize,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes { large: 32 << 20, band: 12 << 20 }
    }
}

/// Calls that are computed together.
pub(super) struct Unit {
    /// A norm, or what repeats values, that makes the operand of the first call.
    source: Option<Call>,
    /// One; or with `bands` also a convolution of what the norm reads.
    pub(super) calls: Vec<Call>,
    bands: Option<Bands>,
}

/// How a unit is computed in bands.
struct Bands {
    /// Of a band, an even number.
    rows: usize,
    /// Whether results take the place of what is read.
    in_place: bool,
    /// Temporaries: the moments of the norm, the operand of a band, results of one or two bands of each call.
    moments: usize,
    operand: usize,
    results: Vec<Vec<usize>>,
}

/// An operation with what it reads, and the temporary and offset in bytes that it writes to.
pub(super) type Planned = (Box<dyn HostOp>, Vec<View>, usize, usize);

/// `calls` with those together that are computed in bands. Temporaries in `bound` are results of the segment.
pub(super) fn units(
    calls: Vec<Call>,
    temps: &mut Vec<usize>,
    bound: &HashMap<usize, Var>,
    sizes: Sizes,
) -> Vec<Unit> {
    let mut readers: HashMap<usize, Vec<usize>> = HashMap::new();
    let mut makers: HashMap<usize, usize> = HashMap::new();
    for (i, call) in calls.iter().enumerate() {
        call.operands.iter().filter_map(|v| temp(v.root)).for_each(|t| readers.entry(t).or_default().push(i));
        makers.insert(call.out, i);
    }
    let mut parts: HashMap<usize, (Option<usize>, Option<usize>)> = HashMap::new();
    for (i, call) in calls.iter().enumerate() {
        let Some(conv) = large(call, sizes) else { continue };
        let source = call.operands.first().and_then(|x| temp(x.root)).filter(|t| !bound.contains_key(t));
        let source = source.filter(|t| readers.get(t).is_some_and(|r| r.len() == 1));
        let source = source.and_then(|t| makers.get(&t).copied());
        let source = source.filter(|&s| calls[s].region == call.region && makes_planes(&calls[s].kernel, conv));
        let beside = source.and_then(|s| {
            let x = calls[s].operands.first().filter(|_| matches!(calls[s].kernel, Kernel::Norm(_)))?;
            let read = readers.get(&temp(x.root).filter(|t| !bound.contains_key(t))?)?;
            let &[a, b] = read.as_slice() else { return None };
            let other = if a == s { b } else { a };
            let Kernel::Conv(c) = &calls[other].kernel else { return None };
            let (g, main) = (c.geometry(), conv.geometry());
            let alike =
                c.has_bands() && g.image == main.image && [g.batch, g.channels] == [main.batch, main.channels];
            let first = calls[other].operands.first().is_some_and(|v| v.root == x.root && v.offset == x.offset);
            let read = readers.get(&calls[other].out).is_some_and(|r| r.iter().all(|&r| r > i));
            let unread = read || bound.contains_key(&calls[other].out);
            let here = other < i && calls[other].region == call.region;
            (alike && first && unread && here).then_some(other)
        });
        parts.insert(i, (source, beside));
    }
    // What a unit takes is not computed alone.
    for (source, beside) in parts.values().copied().collect::<Vec<_>>() {
        for part in [source, beside].into_iter().flatten() {
            parts.remove(&part);
        }
    }
    let mut calls: Vec<Option<Call>> = calls.into_iter().map(Some).collect();
    let mut out = Vec::with_capacity(calls.len());
    let taken: Vec<usize> = parts.values().flat_map(|&(s, b)| [s, b]).flatten().collect();
    for i in 0..calls.len() {
        if taken.contains(&i) {
            continue;
        }
        let Some(call) = calls[i].take() else { continue };
        let mut unit = Unit { source: None, calls: vec![call], bands: None };
        if let Some(&(source, beside)) = parts.get(&i) {
            unit.source = source.and_then(|s| calls[s].take());
            unit.calls.extend(beside.and_then(|b| calls[b].take()));
            unit.bands = Some(Bands::new(&unit, temps, sizes));
        }
        out.push(unit);
    }
    out
}

/// The convolution of a call that is computed in bands.
fn large(call: &Call, sizes: Sizes) -> Option<&Conv> {
    let Kernel::Conv(conv) = &call.kernel else { return None };
    let g = conv.geometry();
    let bytes =
        g.batch.saturating_mul(g.channels.max(g.n)).saturating_mul(g.image[0] * g.image[1]).saturating_mul(4);
    let many = g.image[0] > rows(conv, sizes) && g.padding[0] <= rows(conv, sizes);
    (conv.has_bands() && bytes >= sizes.large && many).then_some(conv)
}

/// Rows of a band.
fn rows(conv: &Conv, sizes: Sizes) -> usize {
    let g = conv.geometry();
    let row = g.batch * g.channels.max(g.n) * g.image[1] * 4;
    (sizes.band / row.max(1)).max(2).next_multiple_of(2)
}

/// Whether `kernel` makes the images that `conv` reads plane by plane.
fn makes_planes(kernel: &Kernel, conv: &Conv) -> bool {
    let g = conv.geometry();
    let planes = g.batch * g.channels;
    match kernel {
        Kernel::Norm(n) => n.rows * n.channels == planes && n.positions == g.image[0] * g.image[1],
        Kernel::Upsample(u) => u.planes == planes && u.image.map(|n| n * u.factor) == g.image,
        _ => false,
    }
}

impl Bands {
    fn new(unit: &Unit, temps: &mut Vec<usize>, sizes: Sizes) -> Bands {
        let mut new = |elements: usize| {
            temps.push(elements);
            temps.len() - 1
        };
        let convs: Vec<&Conv> = unit.convs().collect();
        let rows = convs.iter().map(|c| rows(c, sizes)).min().unwrap_or(2);
        let operand = convs.iter().map(|c| {
            let g = c.geometry();
            g.batch * g.channels * (rows + 2 * g.padding[0]) * g.image[1]
        });
        let moments = match unit.source.as_ref().map(|s| &s.kernel) {
            Some(Kernel::Norm(n)) => 2 * n.rows,
            _ => 1,
        };
        let (moments, operand) = (new(moments), new(operand.max().unwrap_or(1)));
        let result = |c: &&Conv| c.geometry().batch * c.geometry().n * rows * c.geometry().out[1];
        let results = convs.iter().map(|c| vec![new(result(c))]).collect();
        Bands { rows, in_place: false, moments, operand, results }
    }
}

impl Unit {
    fn convs(&self) -> impl Iterator<Item = &Conv> {
        self.calls.iter().filter_map(|c| if let Kernel::Conv(conv) = &c.kernel { Some(conv) } else { None })
    }

    /// What it reads from outside.
    pub(super) fn operands(&self) -> impl Iterator<Item = &View> {
        let inner = usize::from(self.source.is_some());
        let rest = self
            .calls
            .iter()
            .enumerate()
            .flat_map(move |(i, c)| c.operands.iter().skip(if i == 0 { inner } else { 0 }));
        self.source.iter().flat_map(|s| &s.operands).chain(rest)
    }

    /// Temporaries that live while it is computed only.
    pub(super) fn scratch(&self) -> impl Iterator<Item = usize> {
        self.bands
            .iter()
            .flat_map(|b| [b.moments, b.operand].into_iter().chain(b.results.iter().flatten().copied()))
    }

    /// The temporary whose place results may take, if nobody else reads it.
    pub(super) fn replaces(&self, temps: &[usize]) -> Option<usize> {
        let x = self.operands().next()?;
        let t = temp(x.root)?;
        let [call, ..] = self.calls.as_slice() else { return None };
        let reads = self.operands().filter(|v| v.root == x.root).count();
        let as_large = match (&self.bands, self.source.as_ref().map(|s| &s.kernel)) {
            (Some(_), Some(Kernel::Upsample(_))) => false,
            (Some(_), _) => true,
            (None, _) => {
                matches!(call.kernel, Kernel::Chain { .. } | Kernel::Norm(_)) && temps[t] == temps[call.out]
            }
        };
        let whole = x.offset == 0 && x.is_dense() && x.elements() == temps[t];
        (as_large && whole && reads == self.calls.len()).then_some(t)
    }

    /// Whether it is computed in bands.
    pub(super) fn in_bands(&self) -> bool {
        self.bands.is_some()
    }

    /// Says whether results take the place of what is read. If not, bands only pay where something makes the operand.
    pub(super) fn replace(&mut self, in_place: bool, temps: &mut Vec<usize>) {
        if !in_place {
            self.bands = self.bands.take().filter(|_| self.source.is_some());
            return;
        }
        let Some(bands) = &mut self.bands else { return };
        bands.in_place = true;
        for each in &mut bands.results {
            if let &[first] = each.as_slice() {
                each.push(temps.len());
                temps.push(temps[first]);
            }
        }
    }

    /// The operations of a unit in bands.
    pub(super) fn plan(self) -> Vec<Planned> {
        let mut out: Vec<Planned> = Vec::new();
        let Some(bands) = &self.bands else { return out };
        let view = |t: usize, elements: usize| View::whole(Root::Temp(t), DType::F32, &[elements]);
        let norm = match self.source.as_ref().map(|s| &s.kernel) {
            Some(Kernel::Norm(n)) => Some(n),
            _ => None,
        };
        if let (Some(norm), Some(source)) = (norm, &self.source) {
            out.push((Box::new(Moments(norm.clone())), source.operands[..1].to_vec(), bands.moments, 0));
        }
        let height = self.convs().map(|c| c.geometry().image[0]).next().unwrap_or(0);
        let mut waiting: Vec<Planned> = Vec::new();
        for (band, first) in (0..height).step_by(bands.rows).enumerate() {
            let count = bands.rows.min(height - first);
            let mut puts = Vec::new();
            for (i, ((conv, call), results)) in self.convs().zip(&self.calls).zip(&bands.results).enumerate() {
                let source = self.source.as_ref().filter(|_| i == 0);
                let norm = norm.filter(|_| i == 0);
                let rows = self.rows(conv, source, norm, first, count);
                let mut reads = source.unwrap_or(call).operands.clone();
                match norm {
                    Some(n) => reads.insert(1, view(bands.moments, 2 * n.rows)),
                    None => reads.truncate(1),
                }
                let operand = view(bands.operand, rows.elements());
                out.push((Box::new(rows), reads, bands.operand, 0));
                let result = results[band % results.len()];
                let computed = conv.band(count);
                let operands = std::iter::once(operand).chain(call.operands.iter().skip(1).cloned()).collect();
                let g = conv.geometry();
                let put = Put { planes: g.batch * g.n, run: count * g.out[1], step: g.out[0] * g.out[1] };
                puts.push((
                    Box::new(put) as Box<dyn HostOp>,
                    vec![view(result, computed.elements())],
                    call.out,
                    first * g.out[1] * 4,
                ));
                out.push((computed, operands, result, 0));
            }
            // The next band sees rows of this one.
            let ready = if bands.in_place { std::mem::replace(&mut waiting, puts) } else { puts };
            out.extend(ready);
        }
        out.extend(waiting);
        out
    }

    /// What makes the operand of `conv` for `count` rows of its result.
    fn rows(&self, conv: &Conv, source: Option<&Call>, norm: Option<&Norm>, first: usize, count: usize) -> Rows {
        let g = conv.geometry();
        let factor = match source.map(|s| &s.kernel) {
            Some(Kernel::Upsample(u)) => u.factor,
            _ => 1,
        };
        Rows {
            planes: g.batch * g.channels,
            image: g.image.map(|n| n / factor),
            factor,
            first: first as isize - g.padding[0] as isize,
            count: count + 2 * g.padding[0],
            norm: norm.cloned(),
        }
    }
}
