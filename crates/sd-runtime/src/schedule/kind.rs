//! The schedules by name.

use crate::names::named;

/// How the noise levels of a run are chosen. `docs/samplers.md` says when to use which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SchedulerKind {
    /// Evenly spaced timesteps, from the last to the first.
    Discrete,
    /// Karras et al. 2022, equation 5, with rho 7.
    Karras,
    /// Evenly spaced logarithms of the noise level.
    Exponential,
    /// Align your steps (Sabour et al. 2024).
    Ays,
    /// GITS (Chen et al. 2024).
    Gits,
    /// Evenly spaced timesteps that stop one step before the first (Stability AI's generative-models).
    SgmUniform,
    /// Every so many entries of the table, from the last on.
    Simple,
    /// Timesteps along a smoothstep: dense at both ends.
    Smoothstep,
    /// KL-optimal: evenly spaced arctangents of the level (Sabour et al. 2024, section 3.1).
    KlOptimal,
    /// The timesteps of latent consistency models (Luo et al. 2023).
    Lcm,
    /// Two arcs of the arctangent (RES4LYF).
    BongTangent,
    /// LTX-Video's: shifted by the size, stretched to end at 0.1.
    Ltx2,
    /// Quantiles of a logit-normal distribution (Ideogram 4).
    LogitNormal,
    /// Flux.2's: shifted by the size and the number of steps.
    Flux2,
    /// Flux's: evenly spaced shares of noise, shifted by the size of the picture.
    Flux,
    /// Quantiles of a beta distribution (Lee et al. 2024, "Beta sampling is all you need").
    Beta,
}

named!(
    SchedulerKind,
    "scheduler",
    [
        ("discrete", SchedulerKind::Discrete),
        ("normal", SchedulerKind::Discrete),
        ("karras", SchedulerKind::Karras),
        ("exponential", SchedulerKind::Exponential),
        ("ays", SchedulerKind::Ays),
        ("gits", SchedulerKind::Gits),
        ("sgm_uniform", SchedulerKind::SgmUniform),
        ("simple", SchedulerKind::Simple),
        ("smoothstep", SchedulerKind::Smoothstep),
        ("kl_optimal", SchedulerKind::KlOptimal),
        ("lcm", SchedulerKind::Lcm),
        ("bong_tangent", SchedulerKind::BongTangent),
        ("ltx2", SchedulerKind::Ltx2),
        ("logit_normal", SchedulerKind::LogitNormal),
        ("flux2", SchedulerKind::Flux2),
        ("flux", SchedulerKind::Flux),
        ("beta", SchedulerKind::Beta),
    ]
);

impl SchedulerKind {
    /// The name web UIs know it by.
    pub fn label(self) -> &'static str {
        match self {
            SchedulerKind::Discrete => "Normal",
            SchedulerKind::Karras => "Karras",
            SchedulerKind::Exponential => "Exponential",
            SchedulerKind::Ays => "Align Your Steps",
            SchedulerKind::Gits => "Align Your Steps GITS",
            SchedulerKind::SgmUniform => "SGM Uniform",
            SchedulerKind::Simple => "Simple",
            SchedulerKind::Smoothstep => "Smoothstep",
            SchedulerKind::KlOptimal => "KL Optimal",
            SchedulerKind::Lcm => "LCM",
            SchedulerKind::BongTangent => "Bong Tangent",
            SchedulerKind::Ltx2 => "LTX2",
            SchedulerKind::LogitNormal => "Logit-Normal",
            SchedulerKind::Flux2 => "Flux2",
            SchedulerKind::Flux => "Flux",
            SchedulerKind::Beta => "Beta",
        }
    }
}
