//! Guidance: functions over the predictions that a step makes under its conditions.

mod apg;
mod combine;
mod prediction;
mod scales;

pub use apg::Apg;
pub use combine::{Guidance, Predictions, Scales};
pub use prediction::{Prediction, Scalings};
pub use scales::{GuidanceSchedule, Interval};
