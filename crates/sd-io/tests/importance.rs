//! Importance matrices: both layouts, what is merged, and broken files.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers outside of test functions

use std::path::PathBuf;

use sd_core::{DType, Shape};
use sd_io::{Importance, TensorSpec, write_gguf};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// The bytes of a file as the layout says.
fn file(entries: &[(&str, u32, &[f32])]) -> Vec<u8> {
    let mut out = (entries.len() as u32).to_le_bytes().to_vec();
    for (name, calls, values) in entries {
        out.extend((name.len() as u32).to_le_bytes());
        out.extend(name.as_bytes());
        out.extend(calls.to_le_bytes());
        out.extend((values.len() as u32).to_le_bytes());
        out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    out.extend(7u32.to_le_bytes());
    out
}

#[test]
fn means_are_values_by_calls() {
    let at = path("importance-a.dat");
    std::fs::write(&at, file(&[("a.weight", 4, &[8.0, 2.0]), ("unused", 0, &[0.0]), ("zero", 3, &[0.0])])).unwrap();
    let mut all = Importance::open(&at).unwrap();
    assert_eq!(
        (all.columns("a.weight"), all.columns("unused"), all.columns("zero")),
        (Some(vec![2.0, 0.5]), None, None)
    );
    // Calls count: one of mean [12, 0.5] with four of mean [2, 0.5].
    std::fs::write(&at, file(&[("a.weight", 1, &[12.0, 0.5]), ("b.weight", 2, &[6.0])])).unwrap();
    all.merge(Importance::open(&at).unwrap()).unwrap();
    assert_eq!((all.columns("a.weight"), all.columns("b.weight")), (Some(vec![4.0, 0.5]), Some(vec![3.0])));
    // Two rows: sums of squares 8 and 2.
    let mut one = Importance::default();
    one.add("b.weight", &[8.0], 2).unwrap();
    all.merge(one).unwrap();
    assert_eq!(all.columns("b.weight"), Some(vec![10.0 / 3.0]));
    let mut other = Importance::default();
    other.add("b.weight", &[8.0, 1.0], 2).unwrap();
    assert!(all.merge(other).unwrap_err().to_string().contains("b.weight: 1 columns in one file, 2 in another"));
}

#[test]
fn what_is_written_has_the_layout() {
    let mut one = Importance::default();
    one.add("x.weight", &[3.0, 5.0], 1).unwrap();
    one.add("x.weight", &[1.0, 0.0], 1).unwrap();
    let at = path("importance-b.dat");
    one.save(&at).unwrap();
    let mut want = file(&[("x.weight", 2, &[4.0, 5.0])]);
    let end = want.len() - 4;
    want[end..].copy_from_slice(&2u32.to_le_bytes()); // the last call
    assert_eq!(std::fs::read(&at).unwrap(), want);
    assert_eq!(Importance::open(&at).unwrap(), one);
    assert!(Importance::default().save(&at).is_err());
}

#[test]
fn gguf_files_hold_sums_and_counts() {
    let at = path("importance.gguf");
    let spec = |name: &str, dims: &[usize]| TensorSpec {
        name: name.into(),
        dtype: DType::F32,
        shape: Shape::new(dims).unwrap(),
    };
    let specs = [spec("a.weight.in_sum2", &[1, 2]), spec("a.weight.counts", &[1, 1])];
    write_gguf(&at, &[], &specs, |s| {
        let values: &[f32] = if s.name.ends_with("counts") { &[4.0] } else { &[8.0, 2.0] };
        Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    })
    .unwrap();
    assert_eq!(Importance::open(&at).unwrap().columns("a.weight"), Some(vec![2.0, 0.5]));
    write_gguf(&at, &[], &specs[..1], |_| Ok(vec![0u8; 8])).unwrap();
    assert!(Importance::open(&at).unwrap_err().to_string().contains("a.weight.counts is missing"));
}

#[test]
fn broken_files_are_errors() {
    let good = file(&[("a.weight", 4, &[8.0, 2.0])]);
    let at = path("importance-c.dat");
    for end in 0..good.len() - 4 {
        std::fs::write(&at, &good[..end]).unwrap();
        let e = Importance::open(&at).unwrap_err().to_string();
        assert!(e.contains("importance-c.dat"), "{end}: {e}");
    }
    for (bytes, want) in [
        (file(&[]), "claims 0 weights"),
        ([u32::MAX.to_le_bytes().to_vec(), good[4..].to_vec()].concat(), "claims 4294967295 weights"),
        (file(&[("", 1, &[1.0])]), "a name of 0 bytes"),
        (file(&[("a", 1, &[f32::NAN])]), "a has the value NaN"),
        (file(&[("a", 1, &[-1.0])]), "a has the value -1"),
        (file(&[("a", 1, &[1.0]), ("a", 1, &[1.0])]), "a is there twice"),
        (b"not an importance matrix at all".to_vec(), "claims"),
    ] {
        std::fs::write(&at, bytes).unwrap();
        let e = Importance::open(&at).unwrap_err().to_string();
        assert!(e.contains(want), "{want}: {e}");
    }
    assert!(Importance::open(path("absent.dat")).is_err());
}
