//! The networks that predict noise.

pub mod flux;
mod rope;
pub mod unet;

use sd_core::{Graph, Result, Scope, Var};

use self::unet::{Heads, Inputs};

/// An architecture, with what no tensor tells about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    Unet(Heads),
}

/// A network with its sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Network {
    Unet(unet::Config),
}

impl Network {
    /// The sizes of the network at `w`.
    pub(crate) fn detect(architecture: Architecture, w: &Scope) -> Result<Network> {
        match architecture {
            Architecture::Unet(heads) => unet::Config::detect(w, heads).map(Network::Unet),
        }
    }

    /// The prediction `[b, out, h, w]`.
    pub(crate) fn build(&self, g: &Graph, w: &Scope, inputs: Inputs) -> Result<Var> {
        match self {
            Network::Unet(cfg) => unet::build(g, w, cfg, inputs),
        }
    }

    /// Channels it reads and predicts.
    pub(crate) fn channels(&self) -> [usize; 2] {
        match self {
            Network::Unet(cfg) => [cfg.in_channels, cfg.out_channels],
        }
    }

    /// Channels of a context token.
    pub(crate) fn context(&self) -> usize {
        match self {
            Network::Unet(cfg) => cfg.context,
        }
    }

    /// Channels of the vector beside the context, if it reads one.
    pub(crate) fn vector(&self) -> Option<usize> {
        match self {
            Network::Unet(cfg) => cfg.vector,
        }
    }

    /// Sides of a latent are multiples of this.
    pub(crate) fn multiple(&self) -> usize {
        match self {
            Network::Unet(cfg) => 1usize.checked_shl(cfg.halvings as u32).unwrap_or(0),
        }
    }
}
