//! Places on invented machines.

use super::*;

const GIB: usize = 1 << 30;

fn machine(devices: &[(&str, DeviceKind, usize)], ram: Option<usize>) -> Machine {
    let device = |(name, kind, gib): &(&str, DeviceKind, usize)| {
        let driver = name.trim_end_matches(|c: char| c.is_ascii_digit());
        Device::pretend(name, driver, *kind, gib * GIB)
    };
    Machine { devices: devices.iter().map(device).collect(), ram: ram.map(|gib| (gib * GIB) as u64), vulkan: None }
}

fn two_gpus() -> Machine {
    let (gpu, igpu, cpu) = (DeviceKind::Gpu, DeviceKind::IntegratedGpu, DeviceKind::Cpu);
    let devices =
        [("CPU", cpu, 64), ("CUDA0", gpu, 8), ("CUDA1", gpu, 24), ("Vulkan0", igpu, 32), ("Vulkan1", gpu, 8)];
    machine(&devices, Some(32))
}

fn written(backend: &str, params: &str) -> Written {
    Written { backend: backend.into(), params_backend: params.into(), ..Written::default() }
}

fn plan(written: &Written, machine: &Machine, sizes: [usize; 3]) -> Result<Plan> {
    let modules = [Module::Diffusion, Module::Te, Module::Vae];
    let components = [Component::Diffusion, Component::Te, Component::Vae];
    let demands: Vec<Demand> = components
        .into_iter()
        .zip(sizes)
        .map(|(component, gib)| Demand { component, size: (gib * GIB) as u64, largest: 1 << 20 })
        .collect();
    place(&written.read()?, machine, &modules, &demands)
}

/// `devices>home` of each module.
fn places(plan: &Plan) -> Vec<String> {
    let show = |p: &Place| {
        let names: Vec<&str> = p.devices.iter().map(|d| d.name()).collect();
        let home = match &p.home {
            None => "own",
            Some(Home::Ram) => "ram",
            Some(Home::File) => "disk",
            Some(Home::Device(d)) => d.name(),
        };
        format!("{}>{home}", names.join("&"))
    };
    plan.places.values().map(show).collect()
}

#[test]
fn what_is_written_is_followed() {
    for (backend, params, want) in [
        ("cuda1", "", ["CUDA1>own"; 3]),
        ("cpu", "", ["CPU>own"; 3]),
        ("", "cpu", ["CUDA0>ram"; 3]),
        ("", "*=cpu,te=disk", ["CUDA0>ram", "CUDA0>disk", "CUDA0>ram"]),
        ("te=cpu", "", ["CUDA0>own", "CPU>own", "CUDA0>own"]),
        ("te=cpu", "cpu", ["CUDA0>ram", "CPU>own", "CUDA0>ram"]),
        ("vae=vulkan,cuda1", "te=cuda0", ["CUDA1>own", "CUDA1>CUDA0", "Vulkan0>own"]),
        ("gpu", "cuda0", ["CUDA0>own"; 3]),
        ("dit=cuda0&cuda1&CUDA0", "", ["CUDA0&CUDA1>own", "CUDA0>own", "CUDA0>own"]),
        ("dit=cuda0&cuda1,te=cuda1&cuda0", "cpu", ["CUDA0&CUDA1>ram", "CUDA1&CUDA0>ram", "CUDA0>ram"]),
        ("dit=cuda0&cuda1", "cuda0", ["CUDA0&CUDA1>CUDA0", "CUDA0>own", "CUDA0>own"]),
        // What may not be divided computes on the first.
        ("cuda1&cuda0", "", ["CUDA1&CUDA0>own", "CUDA1&CUDA0>own", "CUDA1>own"]),
        ("dit=cuda1&cpu", "", ["CUDA1>own", "CUDA0>own", "CUDA0>own"]),
    ] {
        let plan = plan(&written(backend, params), &two_gpus(), [1; 3]).unwrap();
        assert_eq!(places(&plan), want, "{backend} {params}");
        assert!(!plan.fitted);
        let divided = backend == "cuda1&cuda0" || backend.ends_with("&cpu");
        assert_eq!(plan.warnings.len(), usize::from(divided), "{:?}", plan.warnings);
    }
}

#[test]
fn what_is_divided_is_divided_by_layers() {
    for (backend, split, want) in [
        ("dit=cuda0&cuda1", "", 0),
        ("dit=cuda0&cuda1", "layer", 0),
        ("dit=cuda0&cuda1", "te=row", 0),
        ("dit=cuda0", "row", 0),
        ("dit=cuda0&cuda1", "row", 1),
    ] {
        let written = Written { split_mode: split.into(), ..written(backend, "") };
        let plan = plan(&written, &two_gpus(), [1; 3]).unwrap();
        let said = plan.table.iter().any(|line| line.contains("computes on CUDA0 and CUDA1 by layers"));
        assert_eq!(said, backend.contains('&'), "{:?}", plan.table);
        let warned = plan.warnings.iter().filter(|w| w.contains("row: no device here divides")).count();
        assert_eq!((warned, plan.warnings.len()), (want, want), "{backend} {split}: {:?}", plan.warnings);
    }
}

#[test]
fn devices_that_are_not_there_are_named() {
    for (backend, params, limit, want) in [
        ("heron", "", "", "--backend: there is no device \"heron\""),
        ("vae=cuda7", "", "", "--backend: there is no device \"cuda7\""),
        ("", "te=cuda7", "", "--params-backend: there is no device \"cuda7\""),
        ("", "", "cuda7=1", "--max-vram: there is no device \"cuda7\""),
    ] {
        let written = Written { max_vram: limit.into(), ..written(backend, params) };
        let e = plan(&written, &two_gpus(), [1; 3]).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
        assert!(e.to_string().contains("CPU, CUDA0, CUDA1"), "{e}");
    }
}

#[test]
fn places_are_found() {
    let (gpu, igpu, cpu) = (DeviceKind::Gpu, DeviceKind::IntegratedGpu, DeviceKind::Cpu);
    for (devices, ram, sizes, want) in [
        // The largest GPU computes; 24 GiB less the margin hold everything.
        (two_gpus(), Some(32), [12, 5, 1], ["CUDA1>own"; 3]),
        // 14 + 9 do not leave 2 for computation.
        (two_gpus(), Some(32), [14, 9, 0], ["CUDA1>own", "CUDA1>ram", "CUDA1>ram"]),
        // Integrated GPUs do not count.
        (machine(&[("Vulkan0", igpu, 32), ("CPU", cpu, 8)], Some(8)), Some(8), [1; 3], ["Vulkan0>own"; 3]),
        (machine(&[("CPU", cpu, 8)], Some(8)), Some(8), [1; 3], ["CPU>own"; 3]),
        // Nothing is left of a GPU of 0 bytes: it does not say what it has, so it is not limited.
        (machine(&[("CPU", cpu, 8), ("RPC0", gpu, 0)], None), None, [90, 90, 1], ["RPC0>own"; 3]),
    ] {
        let machine = Machine { ram: ram.map(|gib| (gib * GIB) as u64), ..devices };
        let plan = plan(&written("", ""), &machine, sizes).unwrap();
        assert_eq!(places(&plan), want, "{sizes:?}");
    }
    let none = Written { auto_fit: false, ..written("", "") };
    assert_eq!(places(&plan(&none, &two_gpus(), [50, 50, 50]).unwrap()), ["CUDA0>own"; 3]);
    let limited = Written { max_vram: "-100".into(), ..written("", "") };
    let plan = plan(&limited, &two_gpus(), [1; 3]).unwrap();
    assert_eq!(places(&plan), ["CPU>own"; 3]);
    assert!(plan.warnings.iter().any(|w| w.contains("the CPU computes")), "{:?}", plan.warnings);
}

#[test]
fn limits_become_budgets() {
    let budgets = |backend: &str, limit: &str| {
        let written = Written { max_vram: limit.into(), ..written(backend, "") };
        let plan = plan(&written, &two_gpus(), [1; 3]).unwrap();
        let mut out: Vec<String> =
            plan.budgets.iter().map(|(d, b)| format!("{}={}", d.name(), *b / (1 << 20))).collect();
        out.sort();
        (out.join(" "), plan.warnings.len())
    };
    for (backend, limit, want, warnings) in [
        ("cuda0", "", "", 0),
        ("cuda0", "0", "", 0),
        ("cuda0", "4", "CUDA0=4096 CUDA1=4096 Vulkan0=4096 Vulkan1=4096", 0),
        ("cuda0", "4,cuda1=0,CPU=2", "CPU=2048 CUDA0=4096 Vulkan0=4096 Vulkan1=4096", 0),
        ("cuda0", "cuda0=-1", "CUDA0=7168", 0),
        ("cuda0", "cuda0=-9", "", 1),
        ("cuda0", "cpu=-1", "", 1),
        // Found places have the margin too.
        ("", "", "CUDA0=7680 CUDA1=24064 Vulkan1=7680", 0),
        ("", "cuda1=6", "CUDA0=7680 CUDA1=6144 Vulkan1=7680", 0),
        ("", "30", "CUDA0=8192 CUDA1=24576 Vulkan0=30720 Vulkan1=8192", 0),
    ] {
        assert_eq!(budgets(backend, limit), (want.to_owned(), warnings), "{backend} {limit}");
    }
}

#[test]
fn a_vulkan_device_may_stand_for_the_default() {
    for (number, want, warnings) in [("1", ["Vulkan1>own"; 3], 0), ("7", ["CUDA0>own"; 3], 1)] {
        let machine = Machine { vulkan: Some(number.into()), ..two_gpus() };
        for backend in ["auto", "default"] {
            let plan = plan(&written(backend, ""), &machine, [1; 3]).unwrap();
            assert_eq!((places(&plan), plan.warnings.len()), (want.map(String::from).to_vec(), warnings));
        }
        let plan = plan(&written("gpu", ""), &machine, [1; 3]).unwrap();
        assert_eq!(places(&plan), ["CUDA0>own"; 3]);
    }
}

#[test]
fn the_table_says_what_was_decided() {
    let found = plan(&written("", ""), &two_gpus(), [12, 5, 1]).unwrap();
    let table = found.table.join("\n");
    for part in [
        "CUDA1: free 24576 MiB, to use 24064 MiB",
        "main memory: free 32768 MiB, to use 29491 MiB",
        "diffusion: weights 12288 MiB, reserve 2048 MiB, headroom 2049 MiB",
        "te: computes on CUDA1, weights are there",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let divided = plan(&written("dit=cuda0&cuda1", "te=disk"), &two_gpus(), [1; 3]).unwrap();
    let want = [
        "diffusion: computes on CUDA0 and CUDA1 by layers, weights are there",
        "te: computes on CUDA0, weights are on disk",
        "vae: computes on CUDA0, weights are there",
    ];
    assert_eq!(divided.table, want);
}
