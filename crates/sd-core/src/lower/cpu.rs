//! Which nodes the project's own kernels compute on the CPU device.

use super::ggml::Lowering;
use super::layout::ne;
use crate::error::Result;
use crate::ffi::{HostOp, Id};
use crate::graph::{Node, Op};
use crate::kernels::{Attention, Conv2d, Geometry, Linear, Sums, can_read};

impl Lowering<'_> {
    /// `node` computed by a kernel, if there is one for it.
    pub(super) fn kernel(&mut self, node: &Node) -> Result<Option<Id>> {
        let Some(isa) = self.isa else { return Ok(None) };
        let op: Option<Box<dyn HostOp>> = match node.op {
            Op::Linear { .. } | Op::MatMulT => {
                let (_, x) = self.operand(node, 0)?;
                let (w, w_dims) = self.operand(node, 1)?;
                let [lead @ .., n, k] = w_dims.as_slice() else { return Ok(None) };
                let dtype = self.ctx.dtype(w)?;
                let m = x.iter().take(x.len() - 1).product();
                let fits = lead.iter().all(|&d| d == 1) && can_read(dtype);
                let bias = node.inputs.len() > 2;
                let sums = match node.op {
                    Op::Linear { .. } => Sums::of(&x, dtype, false),
                    _ => Sums::Tiles,
                };
                fits.then(|| Box::new(Linear { isa, m, n: *n, k: *k, dtype, bias, sums }) as Box<dyn HostOp>)
            }
            Op::Conv2d { stride, padding, dilation, .. } => {
                let (_, x) = self.operand(node, 0)?;
                let (w, kernel) = self.operand(node, 1)?;
                let (&[batch, channels, h, wd], &[n, _, kh, kw]) = (x.as_slice(), kernel.as_slice()) else {
                    return Ok(None);
                };
                let geometry = Geometry {
                    batch,
                    channels,
                    image: [h, wd],
                    out: [node.shape.dim(2), node.shape.dim(3)],
                    n,
                    kernel: [kh, kw],
                    stride,
                    padding: [padding; 2],
                    dilation,
                };
                let conv = Conv2d::new(isa, geometry, self.ctx.dtype(w)?, node.inputs.len() > 2);
                conv.map(|c| Box::new(c) as Box<dyn HostOp>)
            }
            Op::Attention { scale, causal } => {
                let (q, k, v) = (self.operand(node, 0)?.1, self.operand(node, 1)?.1, self.operand(node, 2)?.1);
                let (&[batch, queries, heads, width], &[_, keys, _, _], &[.., value_width]) =
                    (q.as_slice(), k.as_slice(), v.as_slice())
                else {
                    return Ok(None);
                };
                let mask = match node.inputs.get(3) {
                    None => None,
                    Some(_) => {
                        let dims = self.operand(node, 3)?.1;
                        let mut sizes = [1; 4];
                        sizes.iter_mut().rev().zip(dims.iter().rev()).for_each(|(s, &d)| *s = d);
                        Some(sizes)
                    }
                };
                let sizes = Attention { isa, batch, heads, queries, keys, width, value_width, scale, causal, mask };
                Some(Box::new(sizes) as Box<dyn HostOp>)
            }
            _ => None,
        };
        let Some(op) = op else { return Ok(None) };
        let operands = (0..node.inputs.len()).map(|i| Ok(self.operand(node, i)?.0)).collect::<Result<Vec<_>>>()?;
        self.ctx.custom(op, &operands, ne(&node.shape)).map(Some)
    }
}
