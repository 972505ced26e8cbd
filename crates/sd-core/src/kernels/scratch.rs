//! Memory that a thread computes in, kept for its next computation, and how work is shared out.

use std::cell::RefCell;
use std::ops::Range;

/// One cache line, so that panels begin at one.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// Elements of a cache line.
const LINE: usize = 16;

/// Calls `f` with one pointer for each of `sizes`, valid for as many elements. What they hold is left from before.
pub(super) fn with<const N: usize>(sizes: [usize; N], f: impl FnOnce([*mut f32; N])) {
    thread_local! {
        static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }
    let lines = sizes.map(|n| n.div_ceil(LINE));
    let total = lines.iter().sum();
    let work = |all: &mut Vec<Line>| {
        if all.len() < total {
            all.resize(total, Line([0.0; LINE]));
        }
        let mut at: *mut f32 = all.as_mut_ptr().cast();
        f(lines.map(|n| {
            let this = at;
            at = at.wrapping_add(n * LINE);
            this
        }));
    };
    LINES.with(|l| match l.try_borrow_mut() {
        Ok(mut all) => work(&mut all),
        Err(_) => work(&mut Vec::new()),
    });
}

/// The share of thread `part` of `parts`.
pub(super) fn share(total: usize, part: usize, parts: usize) -> Range<usize> {
    let at = |i: usize| (total as u128 * i as u128 / parts.max(1) as u128) as usize;
    at(part)..at(part + 1)
}
