//! Broken GGUF files.

use crate::check;
use crate::common::Gguf;

#[test]
fn gguf_headers() {
    let g = Gguf::new;
    let swapped = |version: u32, tensors: u64| {
        let mut f = b"GGUF".to_vec();
        f.extend_from_slice(&version.to_be_bytes());
        f.extend_from_slice(&tensors.to_be_bytes());
        f.extend_from_slice(&[0; 8]);
        f
    };
    let narrow = |tensors: u32, pairs: u32| Gguf(b"GGUF".to_vec()).u32(1).u32(tensors).u32(pairs);
    let nested = |depth: usize| {
        let mut f = g(3, 0, 1).str("k").u32(9);
        for _ in 0..depth {
            f = f.u32(9).u64(1);
        }
        f.u32(0).u64(1).u8(1).0
    };
    check(vec![
        ("only magic", b"GGUF".to_vec(), &["version takes 4 bytes at byte 4, the file has 0 more"]),
        ("version 0", g(0, 0, 0).0, &["GGUF version 0 is not known, only 1 to 3"]),
        ("version 1 tensor count", narrow(5, 0).0, &["5 tensors do not fit in the 0 bytes"]),
        ("version 1 key", narrow(0, 1).u32(u32::MAX).bytes(&[0; 20]).0, &["takes 4294967295 bytes at byte 20"]),
        ("version 4", g(4, 0, 0).0, &["GGUF version 4 is not known"]),
        ("big endian version 9", swapped(9, 0), &["GGUF version 9 is not known"]),
        ("big endian count", swapped(3, 7), &["7 tensors do not fit in the 0 bytes"]),
        ("tensor count", g(3, u64::MAX, 0).0, &["18446744073709551615 tensors do not fit in the 0 bytes"]),
        ("tensor count just too large", g(3, 3, 0).bytes(&[0; 71]).0, &["3 tensors do not fit in the 71 bytes"]),
        ("metadata count", g(3, 0, 1 << 40).0, &["1099511627776 metadata entries do not fit"]),
        (
            "more tensors than any model",
            g(3, 2_000_000, 0).bytes(&vec![0; 48_000_000]).0,
            &["2000000 tensors, at most 1048576"],
        ),
        ("empty key", g(3, 0, 1).str("").u32(4).u32(1).bytes(&[0; 8]).0, &["metadata entry 0 has an empty key"]),
        (
            "key length",
            g(3, 0, 1).u64(u64::MAX).bytes(&[0; 40]).0,
            &["key of metadata entry 0 takes 18446744073709551615 bytes"],
        ),
        ("key not UTF-8", g(3, 0, 1).u64(1).u8(0xff).bytes(&[0; 40]).0, &["key of metadata entry 0 is not UTF-8"]),
        ("key twice", g(3, 0, 2).pair_u32("a", 1).pair_u32("a", 2).0, &["metadata key a appears twice"]),
        ("value type", g(3, 0, 1).str("k").u32(13).u64(0).0, &["metadata k has unknown value type 13"]),
        ("truth value", g(3, 0, 1).str("k").u32(7).u8(2).0, &["metadata k is a truth value of 2"]),
        (
            "string length",
            g(3, 0, 1).str("k").u32(8).u64(1 << 60).0,
            &["metadata k takes 1152921504606846976 bytes"],
        ),
        ("array length", g(3, 0, 1).str("k").u32(9).u32(4).u64(1 << 62).0, &["metadata k takes"]),
        (
            "array length wraps",
            g(3, 0, 1).str("k").u32(9).u32(10).u64((1 << 61) + 1).0,
            &["metadata k takes 18446744073709551615 bytes"],
        ),
        ("strings", g(3, 0, 1).str("k").u32(9).u32(8).u64(1 << 50).0, &["elements of metadata k do not fit"]),
        (
            "array type",
            g(3, 0, 1).str("k").u32(9).u32(77).u64(1).u8(0).0,
            &["metadata k has unknown value type 77"],
        ),
        ("nested arrays", nested(10_000), &["metadata k nests arrays deeper than 4"]),
        ("alignment 0", g(3, 0, 1).pair_u32("general.alignment", 0).0, &["general.alignment is 0", "power of two"]),
        ("alignment 24", g(3, 0, 1).pair_u32("general.alignment", 24).0, &["general.alignment is 24"]),
        (
            "alignment text",
            g(3, 0, 1).str("general.alignment").u32(8).str("32").0,
            &["general.alignment is not an unsigned"],
        ),
    ]);
}

#[test]
fn gguf_tensors() {
    let one = |ne: &[u64], id: u32, offset: u64| {
        Gguf::new(3, 1, 0).tensor("blk.w", ne, id, offset).align(32).bytes(&[0; 64]).0
    };
    let two = |a: u64, b: u64| {
        Gguf::new(3, 2, 0).tensor("a", &[16], 0, a).tensor("b", &[16], 0, b).align(32).bytes(&[0; 160]).0
    };
    let axes = |n: u32| Gguf::new(3, 1, 0).str("blk.w").u32(n).bytes(&[1; 64]).0;
    let orig = |array: Gguf| array.tensor("w", &[4], 0, 0).align(32).bytes(&[0; 16]).0;
    let orig_key = || Gguf::new(3, 1, 1).str("comfy.gguf.orig_shape.w");
    check(vec![
        ("all axes", axes(u32::MAX), &["tensor blk.w: 4294967295 axes, at most 5"]),
        ("six axes", axes(6), &["tensor blk.w: 6 axes"]),
        (
            "product wraps",
            one(&[1 << 33, 1 << 33], 0, 0),
            &["tensor blk.w: the product of [8589934592, 8589934592] does not fit"],
        ),
        ("product wraps to zero", one(&[1 << 32, 1 << 32], 0, 0), &["tensor blk.w: the product of"]),
        (
            "axis of 2^32",
            one(&[1 << 32], 0, 0),
            &["tensor blk.w: [4294967296] f32 takes 17179869184 bytes", "cut off"],
        ),
        ("axis of all ones", one(&[u64::MAX], 0, 0), &["tensor blk.w: "]),
        ("negative axis", one(&[1 << 63], 0, 0), &["tensor blk.w: "]),
        ("unknown type", one(&[16], 1234, 0), &["tensor blk.w: unknown type 1234"]),
        ("withdrawn type", one(&[32], 31, 0), &["tensor blk.w: type q4_0_4_4 was withdrawn"]),
        (
            "rows that are not blocks",
            one(&[48, 2], 8, 0),
            &["tensor blk.w: rows of [2, 48] are not whole q8_0 blocks of 32"],
        ),
        ("offset not aligned", one(&[4], 0, 8), &["tensor blk.w: offset 8 is not a multiple of the alignment 32"]),
        (
            "offset past the end",
            one(&[4], 0, 64),
            &["tensor blk.w: [4] f32 takes 16 bytes at offset 64 of the data, which has 64"],
        ),
        ("offset wraps", one(&[4], 0, u64::MAX - 31), &["tensor blk.w: [4] f32 takes 16 bytes at offset"]),
        (
            "data cut off",
            one(&[32], 0, 0),
            &["tensor blk.w: [32] f32 takes 128 bytes at offset 0 of the data, which has 64"],
        ),
        ("overlap", two(0, 32), &["tensor b at bytes", "overlaps tensor a"]),
        ("same bytes", two(64, 64), &["overlaps tensor"]),
        (
            "name twice",
            Gguf::new(3, 2, 0).tensor("a", &[1], 0, 0).tensor("a", &[1], 1, 32).align(32).bytes(&[0; 64]).0,
            &["tensor a appears twice: [1] f32 and [1] f16"],
        ),
        (
            "name not UTF-8",
            Gguf::new(3, 1, 0).u64(2).bytes(&[0xc3, 0x28]).bytes(&[0; 64]).0,
            &["name of tensor 0 is not UTF-8"],
        ),
        (
            "name length",
            Gguf::new(3, 1, 0).u64(1 << 63).bytes(&[0; 64]).0,
            &["name of tensor 0 takes 9223372036854775808 bytes"],
        ),
        (
            "original shape of another size",
            orig(orig_key().u32(9).u32(5).u64(2).u32(2).u32(3)),
            &["tensor w: comfy.gguf.orig_shape.w is [2, 3], the file has [4]"],
        ),
        (
            "original shape negative",
            orig(orig_key().u32(9).u32(5).u64(1).u32(u32::MAX)),
            &["tensor w: comfy.gguf.orig_shape.w is not an array"],
        ),
        (
            "original shape is text",
            orig(orig_key().u32(8).str("4")),
            &["tensor w: comfy.gguf.orig_shape.w is not an array"],
        ),
    ]);
}
