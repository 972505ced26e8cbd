//! What weights are multiplied by, collected while networks run.

use sd_core::exec::Runner;
use sd_core::passes::taps::{Tap, input_squares};
use sd_core::{CancelToken, Error, Program, Result, Tensor};
use sd_io::Importance;
use sd_models::Part;

/// How many tapped programs are kept.
const KEPT: usize = 8;

/// Runs programs, and collects the squares of what their weights are multiplied by if it is to.
#[derive(Default)]
pub(super) struct Collector {
    found: Option<Importance>,
    tapped: Vec<(u128, Program, Vec<Tap>)>,
}

impl Collector {
    /// One that collects.
    pub(super) fn on() -> Collector {
        Collector { found: Some(Importance::default()), tapped: Vec::new() }
    }

    /// What was collected; `None` if nothing was to be.
    pub(super) fn found(&self) -> Option<&Importance> {
        self.found.as_ref()
    }

    /// The results of `program`.
    pub(super) fn run(
        &mut self,
        part: Part,
        runner: &mut Runner,
        program: &Program,
        inputs: &[(&str, &Tensor)],
        cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        let Some(found) = &mut self.found else { return runner.run(program, inputs, cancel) };
        let at = match self.tapped.iter().position(|t| t.0 == program.signature()) {
            Some(at) => at,
            None => {
                let (tapped, taps) = input_squares(program)?;
                if self.tapped.len() >= KEPT {
                    self.tapped.remove(0);
                }
                self.tapped.push((program.signature(), tapped, taps));
                self.tapped.len() - 1
            }
        };
        let (_, tapped, taps) = self.tapped.get(at).ok_or_else(|| Error::internal("no tapped program"))?;
        let mut results = runner.run(tapped, inputs, cancel)?;
        let sums = results.split_off(program.outputs().len());
        for (tap, sum) in taps.iter().zip(&sums) {
            found.add(&format!("{}{}", part.place(), tap.weight), sum.values(), tap.rows)?;
        }
        Ok(results)
    }
}
