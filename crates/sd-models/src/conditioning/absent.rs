//! Text encoders that a family can do without.

use sd_core::{Error, Program, Result};

use super::{Encoded, Run, TextEncoder};
use crate::names::Part;
use crate::text::prompt::Piece;

/// Channels of the zeros that stand for an encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Zeros {
    /// Of its states.
    pub(crate) width: usize,
    /// Of its pooled state.
    pub(crate) pooled: usize,
}

pub(super) struct Encoder {
    pub(super) part: Part,
    pub(super) zeros: Zeros,
    pub(super) tokens: usize,
    pub(super) beside: bool,
}

impl TextEncoder for Encoder {
    fn part(&self) -> Part {
        self.part
    }

    fn width(&self) -> usize {
        self.zeros.width
    }

    fn tokens(&self) -> usize {
        self.tokens
    }

    fn pooled(&self) -> usize {
        self.zeros.pooled
    }

    fn beside(&self) -> bool {
        self.beside
    }

    fn program(&self, _batch: usize, _clip_skip: usize) -> Result<Program> {
        Err(Error::request(format!("there is no {}", self.part.name()))
            .hint(format!("give it with {}", self.part.option())))
    }

    fn dry_run(&self, _clip_skip: usize) -> Result<()> {
        Ok(())
    }

    fn encode(&self, _pieces: &[Piece], _clip_skip: usize, _run: &mut Run<'_>) -> Result<Encoded> {
        Ok(Encoded::zeros(self))
    }
}
