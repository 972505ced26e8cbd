//! Which device computes and where weights are kept, from what there is and how large the parts of a model are. A pure
//! function: it asks no device.

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// What is left of a device's free memory where the user sets no limit.
const MARGIN: u64 = 512 * MIB;
/// What is left of main memory, at least; and which share of it.
const RAM_MARGIN: u64 = 2 * GIB;
const RAM_SHARE: u64 = 10;

/// A part of a model, in the order in which they get their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Component {
    /// The diffusion network.
    Diffusion,
    /// The text encoders.
    Te,
    /// The autoencoder.
    Vae,
}

impl Component {
    /// Device memory that is kept free for its intermediate values, in bytes.
    pub fn reserve(self) -> u64 {
        match self {
            Component::Diffusion | Component::Te => 2 * GIB,
            Component::Vae => GIB,
        }
    }
}

/// How large a part is, in bytes, in the types that its tensors have in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Which part.
    pub component: Component,
    /// All its tensors.
    pub size: u64,
    /// Its largest tensor, which is what is on the device while weights pass through it.
    pub largest: u64,
}

/// What a user lets a device hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// What is free.
    #[default]
    None,
    /// So many bytes.
    Most(u64),
    /// What is free but for so many bytes.
    Leave(u64),
}

impl Limit {
    /// Bytes that may be used of `free`.
    pub fn budget(self, free: u64) -> u64 {
        match self {
            Limit::None => free.saturating_sub(MARGIN),
            Limit::Most(most) => most.min(free),
            Limit::Leave(left) => free.saturating_sub(left),
        }
    }
}

/// A graphics processor with memory of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its device's name.
    pub name: String,
    /// Bytes free now.
    pub free: u64,
    /// What of it may be used.
    pub limit: Limit,
}

/// Where the weights of a part are between uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// On the device that computes.
    Main,
    /// In main memory.
    Ram,
    /// On another device, by its index.
    Gpu(usize),
    /// In the file.
    Disk,
}

/// What becomes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fitted {
    /// Which, and how large.
    pub demand: Demand,
    /// Bytes that had to be left beside it on the device that computes.
    pub headroom: u64,
    /// Where it is.
    pub target: Target,
}

/// The places of all parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Bytes that may be used of each device.
    pub budgets: Vec<u64>,
    /// Bytes that may be used of main memory; `None` where the system does not say what is free.
    pub ram: Option<u64>,
    /// The device that computes all parts, by its index; `None` if none may be used.
    pub main: Option<usize>,
    /// The parts in their order; empty without a device that computes.
    pub parts: Vec<Fitted>,
}

/// Finds a place for every part. All parts compute on the device with the largest budget, the first of equals. In the
/// order of [`Component`] each one's weights go to the first place with room: that device, if beside the weights there
/// is room for what any part needs while it computes; main memory; the other device with most room; the file.
pub fn fit(gpus: &[Gpu], ram_free: Option<u64>, demands: &[Demand]) -> Fit {
    let budgets: Vec<u64> = gpus.iter().map(|gpu| gpu.limit.budget(gpu.free)).collect();
    let ram = ram_free.map(|free| free.saturating_sub(RAM_MARGIN.max(free / RAM_SHARE)));
    let main = first_largest(budgets.iter().copied().enumerate());
    let mut fit = Fit { budgets, ram, main, parts: Vec::new() };
    let Some(main) = main else { return fit };
    let mut demands = demands.to_vec();
    demands.sort_by_key(|d| d.component);
    let mut left = fit.budgets.clone();
    let mut ram_left = ram.unwrap_or(0);
    for demand in &demands {
        let headroom = headroom(demand.component, &demands, &fit.parts);
        let size = demand.size;
        let others = left.iter().copied().enumerate().filter(|(i, room)| *i != main && *room >= size);
        let target = if left.get(main).is_some_and(|room| size.saturating_add(headroom) <= *room) {
            Target::Main
        } else if ram.is_some() && size <= ram_left {
            Target::Ram
        } else {
            first_largest(others).map_or(Target::Disk, Target::Gpu)
        };
        let room = match target {
            Target::Main => left.get_mut(main),
            Target::Ram => Some(&mut ram_left),
            Target::Gpu(i) => left.get_mut(i),
            Target::Disk => None,
        };
        if let Some(room) = room {
            *room = room.saturating_sub(size);
        }
        fit.parts.push(Fitted { demand: *demand, headroom, target });
    }
    fit
}

/// The index of the first of the largest values above 0.
fn first_largest(values: impl Iterator<Item = (usize, u64)>) -> Option<usize> {
    let best =
        values.filter(|(_, value)| *value > 0).reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map(|(index, _)| index)
}

/// The most that any part needs beside the weights that are on the device to stay, if those of `of` are: its reserve, and
/// what of its own weights comes to the device while it computes. Those placed before `of` found no room there and want
/// to be kept whole; those after it may pass through tensor by tensor.
fn headroom(of: Component, demands: &[Demand], placed: &[Fitted]) -> u64 {
    let coming = |d: &Demand| match placed.iter().find(|p| p.demand.component == d.component) {
        _ if d.component == of => 0,
        Some(p) if p.target == Target::Main => 0,
        Some(_) => d.size,
        None => d.largest,
    };
    demands.iter().map(|d| d.component.reserve().saturating_add(coming(d))).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn gib(n: u64) -> u64 {
        n * GIB
    }

    fn demand(component: Component, size: u64, largest: u64) -> Demand {
        Demand { component, size, largest }
    }

    fn gpu(free: u64, limit: Limit) -> Gpu {
        Gpu { name: "GPU".into(), free, limit }
    }

    /// Targets by hand from the rules in the documentation of [`fit`].
    fn targets(gpus: &[(u64, Limit)], ram: Option<u64>, sizes: [(u64, u64); 3]) -> (Option<usize>, Vec<Target>) {
        let gpus: Vec<Gpu> = gpus.iter().map(|(free, limit)| gpu(*free, *limit)).collect();
        let all = [Component::Diffusion, Component::Te, Component::Vae];
        let demands: Vec<Demand> = all
            .into_iter()
            .zip(sizes)
            .filter(|(_, (size, _))| *size > 0)
            .map(|(c, (s, l))| demand(c, s, l))
            .collect();
        let fit = fit(&gpus, ram, &demands);
        (fit.main, fit.parts.iter().map(|p| p.target).collect())
    }

    #[test]
    fn budgets_follow_limits() {
        for (limit, free, want) in [
            (Limit::None, gib(8), gib(8) - 512 * MIB),
            (Limit::None, 100 * MIB, 0),
            (Limit::Most(gib(4)), gib(8), gib(4)),
            (Limit::Most(gib(9)), gib(8), gib(8)),
            (Limit::Leave(gib(1)), gib(8), gib(7)),
            (Limit::Leave(gib(9)), gib(8), 0),
        ] {
            assert_eq!(limit.budget(free), want, "{limit:?} of {free}");
        }
    }

    #[test]
    fn main_memory_has_a_margin() {
        for (free, want) in [(None, None), (Some(gib(1)), Some(0)), (Some(gib(16)), Some(gib(14)))] {
            assert_eq!(fit(&[], free, &[]).ram, want);
        }
        assert_eq!(fit(&[], Some(gib(100)), &[]).ram, Some(gib(90)));
    }

    #[test]
    fn places_on_invented_machines() {
        use Target::{Disk, Gpu as On, Main, Ram};
        let exactly = Limit::Most(u64::MAX);
        // Of SD 1.5's kind: all of it in 8 GiB.
        let small = [(gib(2), MIB), (MIB * 250, MIB), (MIB * 160, MIB)];
        // Of Flux's kind: network, T5, autoencoder.
        let large = [(gib(12), 108 * MIB), (gib(9), gib(1)), (MIB * 160, 4 * MIB)];
        for (gpus, ram, sizes, main, want) in [
            (&[(gib(8), Limit::None)][..], Some(gib(32)), small, Some(0), &[Main, Main, Main][..]),
            // 12 + 3 (2 reserved for text encoders, 1 for their largest tensor) fit into 24. Text encoders want 9 + 2
            // of the 12 that are left, the autoencoder 160 MiB + 2 of the remaining 3.
            (&[(gib(24), exactly)], Some(gib(32)), large, Some(0), &[Main, Main, Main]),
            // 23 - 12 leaves 11, which is 9 + 2; the 2 that are left then are too few for the autoencoder and 2 beside it.
            (&[(gib(24), Limit::Leave(gib(1)))], Some(gib(32)), large, Some(0), &[Main, Main, Ram]),
            // 12 + 3 do not fit into 14. The network needs 12 + 2 when it runs, so that nothing else fits either.
            (&[(gib(14), exactly)], Some(gib(32)), large, Some(0), &[Ram, Ram, Ram]),
            // 12 + 3 fit into 16; 4 are left, too few for 9, and the autoencoder must leave 9 + 2.
            (&[(gib(16), exactly)], Some(gib(32)), large, Some(0), &[Main, Ram, Ram]),
            // 16 - 2 of RAM hold the network; then 2 are left: text encoders go to disk, the autoencoder fits.
            (&[(gib(8), exactly)], Some(gib(16)), large, Some(0), &[Ram, Disk, Ram]),
            // Nobody says what RAM is free.
            (&[(gib(8), exactly)], None, large, Some(0), &[Disk, Disk, Disk]),
            // No RAM: the other device takes the text encoders.
            (&[(gib(16), exactly), (gib(10), exactly)], Some(gib(2)), large, Some(0), &[Main, On(1), On(1)]),
            // The one with most room of two others.
            (
                &[(gib(10), exactly), (gib(16), exactly), (gib(11), exactly)],
                Some(0),
                large,
                Some(1),
                &[Main, On(2), On(0)],
            ),
            // RAM comes before another device.
            (&[(gib(16), exactly), (gib(16), exactly)], Some(gib(32)), large, Some(0), &[Main, Ram, Ram]),
            // The largest budget counts, not the largest memory.
            (&[(gib(24), Limit::Most(gib(6))), (gib(8), Limit::None)], None, small, Some(1), &[Main, Main, Main]),
            // None may be used.
            (&[(gib(8), Limit::Leave(gib(9)))], Some(gib(32)), small, None, &[]),
            (&[], Some(gib(32)), small, None, &[]),
            // Parts that are absent need nothing: 12 + 2 fit into 14.
            (&[(gib(14), exactly)], None, [(gib(12), MIB), (0, 0), (0, 0)], Some(0), &[Main]),
            // The reserve of the others counts even for the smallest: 160 MiB + 1 GiB fit into 2 GiB alone, not
            // beside text encoders, which need 2 GiB.
            (&[(gib(2), exactly)], None, [(0, 0), (0, 0), (MIB * 160, MIB)], Some(0), &[Main]),
            (&[(gib(2), exactly)], None, [(0, 0), (MIB, MIB), (MIB * 160, MIB)], Some(0), &[Disk, Disk]),
        ] {
            let got = targets(gpus, ram, sizes);
            assert_eq!((got.0, got.1.as_slice()), (main, want), "{gpus:?} {ram:?} {sizes:?}");
        }
    }

    #[test]
    fn headroom_is_the_need_of_the_neediest() {
        let demands = [
            demand(Component::Vae, 1, 1),
            demand(Component::Te, gib(9), gib(1)),
            demand(Component::Diffusion, gib(12), MIB),
        ];
        let fit = fit(&[gpu(gib(14), Limit::Most(gib(14)))], Some(gib(64)), &demands);
        let got: Vec<_> = fit.parts.iter().map(|p| (p.demand.component, p.headroom)).collect();
        // Text encoders need 2 + 1 beside the network; the network, which is not there, 2 + 12 beside the others.
        let want = [(Component::Diffusion, gib(3)), (Component::Te, gib(14)), (Component::Vae, gib(14))];
        assert_eq!(got, want);
    }

    #[test]
    fn sizes_beyond_reason_overflow_nothing() {
        let demands = [demand(Component::Diffusion, u64::MAX, u64::MAX), demand(Component::Te, u64::MAX, u64::MAX)];
        let fit = fit(&[gpu(u64::MAX, Limit::None)], Some(u64::MAX), &demands);
        assert!(fit.parts.iter().all(|p| p.target == Target::Disk));
    }
}
