use super::*;
use crate::plan::{Cuts, segments};
use crate::scope::tests::Shapes;

fn weights() -> Scope {
    Shapes::scope(&[
        ("up.weight", &[8, 4]),
        ("up.bias", &[8]),
        ("down.weight", &[4, 8]),
        ("conv.weight", &[6, 4, 3, 3]),
        ("conv.bias", &[6]),
        ("norm.weight", &[8]),
        ("norm.bias", &[8]),
    ])
}

fn message<T>(r: Result<T>) -> String {
    r.err().map(|e| e.to_string()).unwrap_or_default()
}

#[test]
fn shapes_are_inferred() {
    let (g, w) = (Graph::new(), weights());
    let x = g.input("x", &[2, 5, 4], DType::F32).unwrap();
    let y = g.linear(&w.linear("up").unwrap(), x).unwrap();
    assert_eq!(g.shape(y).dims(), [2, 5, 8]);
    let [a, b] = g.chunk(y).unwrap();
    assert_eq!(g.shape(g.mul(a, g.gelu(b).unwrap()).unwrap()).dims(), [2, 5, 4]);
    let h = g.split_heads(y, 2).unwrap();
    let o = g.attention(h, h, h, AttentionOptions::default()).unwrap();
    assert_eq!(g.shape(g.merge_heads(o).unwrap()).dims(), [2, 5, 8]);
    let i = g.input("i", &[1, 4, 7, 9], DType::F32).unwrap();
    let options = Conv2dOptions { stride: 2, padding: 1, dilation: 1 };
    let c = g.conv2d(&w.conv2d("conv").unwrap(), i, options).unwrap();
    assert_eq!(g.shape(c).dims(), [1, 6, 4, 5]);
    let t = g.to_tokens(c).unwrap();
    assert_eq!(g.shape(t).dims(), [1, 20, 6]);
    assert_eq!(g.shape(g.to_image(t, 4, 5).unwrap()), g.shape(c));
    assert_eq!(g.shape(g.concat(&[c, c], 1).unwrap()).dims(), [1, 12, 4, 5]);
    let p = g.pad2d(c, [0, 1], [0, 1]).unwrap();
    assert_eq!(g.shape(g.upsample_nearest(p, 2).unwrap()).dims(), [1, 6, 10, 12]);
}

#[test]
fn errors_name_operands_and_weights() {
    let (g, w) = (Graph::new(), weights());
    let x = g.input("x", &[2, 3], DType::F32).unwrap();
    assert_eq!(
        message(g.linear(&w.linear("up").unwrap(), x)),
        "up.weight: input x [2, 3] f32, so want [*, 3]; file has [8, 4] f32 (heron.gguf)"
    );
    let y = g.silu(x).unwrap();
    let z = g.input("z", &[2, 2], DType::F32).unwrap();
    assert_eq!(message(g.add(y, z)), "add of silu after x [2, 3] f32 and z [2, 2] f32: shapes do not broadcast");
    assert!(message(g.input("z", &[1], DType::F32)).contains("two values are named z"));
    let norm = g.layer_norm(&w.norm("norm").unwrap(), x, 1e-5);
    assert_eq!(message(norm), "norm.weight: input x [2, 3] f32, so want [3]; file has [8] f32 (heron.gguf)");
    for bad in [
        message(g.reshape(x, &[7])),
        message(g.permute(x, &[0, 0])),
        message(g.slice(x, 1, 2, 2)),
        message(g.concat(&[x, z], 0)),
        message(g.chunk::<2>(x)),
        message(g.timestep_embedding(x, 8, 1e4)),
    ] {
        assert!(bad.contains("x [2, 3] f32"), "{bad}");
    }
}

#[test]
fn what_crosses_a_cut_must_be_listed() {
    let (g, w) = (Graph::new(), weights());
    let x = g.input("x", &[2, 4], DType::F32).unwrap();
    let skip = g.silu(x).unwrap();
    g.label(skip, "skip");
    let y = g.linear(&w.linear("up").unwrap(), skip).unwrap();
    g.cut(&w.sub("first"), &[y]);
    let y = g.linear(&w.linear_no_bias("down").unwrap(), y).unwrap();
    let out = g.add(y, skip).unwrap();
    let e = message(g.finish(&[out]));
    assert!(e.contains("cut first: skip [2, 4] f32 crosses it to add"), "{e}");
    g.keep(&[skip]);
    let program = g.finish(&[out]).unwrap();

    let whole = segments(&program, &Cuts::None).unwrap();
    assert_eq!(whole.len(), 1);
    assert!(whole[0].reads.is_empty());
    let cut = segments(&program, &Cuts::All).unwrap();
    assert_eq!(cut.len(), 2);
    assert_eq!(cut[0].writes.len(), 2);
    assert_eq!(cut[1].reads, cut[0].writes);
    assert_eq!(cut[1].last_reads, cut[0].writes);
    assert_eq!(cut[1].writes, program.outputs());
    assert!(segments(&program, &Cuts::At(vec![1])).is_err());
}

#[test]
fn dead_nodes_go_and_signatures_tell_programs_apart() {
    let build = |factor: f32, dead: bool| {
        let g = Graph::new();
        let x = g.input("x", &[2, 4], DType::F32).unwrap();
        if dead {
            g.exp(x).unwrap();
        }
        let y = g.scale(x, factor).unwrap();
        g.finish(&[y]).unwrap()
    };
    assert_eq!(build(2.0, true).nodes().len(), 2);
    assert_eq!(build(2.0, true).signature(), build(2.0, false).signature());
    assert_ne!(build(2.0, true).signature(), build(2.5, true).signature());
}
