//! Broken safetensors files.

use crate::check;
use crate::common::safetensors;

/// A safetensors file whose only tensor, called `w`, has this description, over 16 bytes of data.
fn tensor(info: &str) -> Vec<u8> {
    safetensors(&format!("{{\"w\":{{{info}}}}}"), &[0; 16])
}

#[test]
fn safetensors_headers() {
    let ok = r#""dtype":"F32","shape":[4],"data_offsets":[0,16]"#;
    let deep = |open: &str, close: &str, before: &str, after: &str| {
        safetensors(&format!("{before}{}{}{after}", open.repeat(10_000), close.repeat(10_000)), &[])
    };
    let mut huge = (200u64 << 20).to_le_bytes().to_vec();
    huge.extend_from_slice(b"{}");
    let mut endless = u64::MAX.to_le_bytes().to_vec();
    endless.extend_from_slice(b"{}");
    let mut cut = tensor(ok);
    cut.truncate(20);
    let mut latin = safetensors("{\"w?\":{}}", &[]);
    latin[11] = 0xe9;
    let long_name = format!("{{\"{}\":7}}", "n".repeat(50_000));
    let long_type = format!(r#"{{"w":{{"dtype":"{}","shape":[4],"data_offsets":[0,16]}}}}"#, "T".repeat(50_000));
    let long_value = format!(r#"{{"w":"{}"}}"#, "v".repeat(50_000));
    check(vec![
        ("length past the end", huge, &["header of 209715200 bytes does not fit in the 2 that follow"]),
        ("length of all ones", endless, &["header of 18446744073709551615 bytes does not fit"]),
        ("header cut off", cut, &["header of", "does not fit in the 12 that follow"]),
        ("not UTF-8", latin, &["header is not UTF-8"]),
        ("not JSON", safetensors("{\"w\":", &[]), &["header: ", "EOF"]),
        ("text after the JSON", safetensors("{}x", &[]), &["header: trailing characters"]),
        ("deep arrays", deep("[", "]", "{\"w\":", "}"), &["header: tensor w: invalid type: sequence"]),
        ("deep objects", deep("{\"a\":", "}", "", ""), &["header: tensor a"]),
        (
            "deep in a tensor",
            deep("[", "]", "{\"w\":{\"shape\":", "}}"),
            &["header: tensor w: invalid type: sequence"],
        ),
        (
            "deep in metadata",
            deep("[", "]", "{\"__metadata__\":{\"k\":", "}}"),
            &["__metadata__: k: invalid type: sequence"],
        ),
        ("deep and ignored", deep("[", "]", "{\"w\":{\"extra\":", "}}"), &["header: tensor w: missing field"]),
        (
            "metadata twice",
            safetensors(r#"{"__metadata__":{},"__metadata__":{}}"#, &[]),
            &["__metadata__ appears twice"],
        ),
        (
            "metadata key twice",
            safetensors(r#"{"__metadata__":{"k":"1","k":"2"}}"#, &[]),
            &["metadata key k appears twice"],
        ),
        (
            "metadata is a list",
            safetensors(r#"{"__metadata__":[]}"#, &[]),
            &["__metadata__: invalid type: sequence"],
        ),
        ("tensor is a number", safetensors(&long_name, &[]), &["tensor nnn", "invalid type: integer `7`"]),
        ("tensor is a long string", safetensors(&long_value, &[]), &["tensor w: invalid type: string"]),
        ("type with a long name", safetensors(&long_type, &[0; 16]), &["tensor w: dtype TTT", "is not supported"]),
    ]);
}

#[test]
fn safetensors_tensors() {
    let two = |a: &str, b: &str, bytes: usize| {
        let t = |o: &str| format!(r#"{{"dtype":"U8","shape":[8],"data_offsets":{o}}}"#);
        safetensors(&format!(r#"{{"a":{},"b":{}}}"#, t(a), t(b)), &vec![0; bytes])
    };
    let twice = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}}"#;
    check(vec![
        ("no dtype", tensor(r#""shape":[4],"data_offsets":[0,16]"#), &["tensor w: missing field `dtype`"]),
        ("no shape", tensor(r#""dtype":"F32","data_offsets":[0,16]"#), &["tensor w: missing field `shape`"]),
        ("no offsets", tensor(r#""dtype":"F32","shape":[4]"#), &["tensor w: missing field `data_offsets`"]),
        (
            "shape twice",
            tensor(r#""dtype":"F32","shape":[4],"shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: shape appears twice"],
        ),
        (
            "unknown dtype",
            tensor(r#""dtype":"F7","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: dtype F7 is not supported"],
        ),
        (
            "U32",
            tensor(r#""dtype":"U32","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: dtype U32 is not supported, only F64"],
        ),
        (
            "six axes",
            tensor(r#""dtype":"F32","shape":[1,1,1,1,1,4],"data_offsets":[0,16]"#),
            &["tensor w: 6 axes, at most 5"],
        ),
        (
            "million axes",
            tensor(&format!(r#""dtype":"U8","shape":[{}16],"data_offsets":[0,16]"#, "1,".repeat(1_000_000))),
            &["tensor w: 1000001 axes"],
        ),
        (
            "negative axis",
            tensor(r#""dtype":"F32","shape":[-4],"data_offsets":[0,16]"#),
            &["tensor w: invalid value: integer `-4`"],
        ),
        (
            "fractional axis",
            tensor(r#""dtype":"F32","shape":[4.5],"data_offsets":[0,16]"#),
            &["tensor w: invalid type: floating point"],
        ),
        (
            "product wraps",
            tensor(r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]"#),
            &["tensor w: the product of [4294967296, 4294967296] does not fit"],
        ),
        (
            "size wraps",
            tensor(r#""dtype":"F64","shape":[4611686018427387904],"data_offsets":[0,16]"#),
            &["tensor w: the size of [4611686018427387904] f64 does not fit"],
        ),
        (
            "reversed offsets",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[16,0]"#),
            &["tensor w: data_offsets [16, 0] are reversed"],
        ),
        (
            "offsets past the end",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[8,24]"#),
            &["tensor w: data_offsets [8, 24] leave the 16 bytes", "cut off"],
        ),
        (
            "offsets of all ones",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[18446744073709551600,18446744073709551615]"#),
            &["tensor w: data_offsets", "leave the 16 bytes"],
        ),
        (
            "offsets too large",
            tensor(r#""dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551616]"#),
            &["tensor w: invalid type: floating point"],
        ),
        ("three offsets", tensor(r#""dtype":"F32","shape":[4],"data_offsets":[0,8,16]"#), &["tensor w:"]),
        (
            "too few bytes",
            tensor(r#""dtype":"F64","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: [4] f64 takes 32 bytes, data_offsets [0, 16] hold 16"],
        ),
        (
            "too many bytes",
            tensor(r#""dtype":"F16","shape":[4],"data_offsets":[0,16]"#),
            &["tensor w: [4] f16 takes 8 bytes"],
        ),
        ("name twice", safetensors(twice, &[0; 2]), &["tensor w appears twice: [1] u8 and [1] i8"]),
        ("overlap", two("[0,8]", "[4,12]", 12), &["tensor b at bytes", "overlaps tensor a"]),
        ("same bytes", two("[0,8]", "[0,8]", 8), &["overlaps tensor"]),
        ("hole", two("[0,8]", "[12,20]", 20), &["4 unused bytes before tensor b"]),
        ("hole at the start", two("[16,24]", "[8,16]", 24), &["8 unused bytes before tensor b"]),
        ("bytes left over", two("[8,16]", "[0,8]", 19), &["3 unused bytes after the last tensor"]),
        (
            "data cut off",
            two("[0,8]", "[8,16]", 10),
            &["tensor b: data_offsets [8, 16] leave the 10 bytes of data"],
        ),
    ]);
}
