//! The methods that model code calls, one file per kind of op: check, infer, push.

mod attention;
mod conv;
mod elementwise;
mod linear;
mod norm;
mod rope;
mod shape;

pub use attention::AttentionOptions;
pub use conv::Conv2dOptions;
