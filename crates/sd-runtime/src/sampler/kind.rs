//! The samplers by name.

use crate::names::named;

/// Which sampler. `docs/samplers.md` says when to use which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SamplerKind {
    /// Euler's method on the probability flow.
    Euler,
    /// Euler steps with ancestral noise.
    EulerA,
    /// Heun's method, two evaluations a step.
    Heun,
    /// DPM-Solver-2, two evaluations a step.
    Dpm2,
    /// DPM-Solver++(2S) with ancestral noise, two evaluations a step.
    DpmPp2sA,
    /// DPM-Solver++(2M).
    DpmPp2m,
    /// DPM-Solver++(2M) with averaged step lengths.
    DpmPp2mV2,
    /// Improved PNDM with constant coefficients.
    Ipndm,
    /// Improved PNDM with coefficients for uneven steps.
    IpndmV,
    /// Latent consistency models.
    Lcm,
    /// DDIM.
    DdimTrailing,
    /// Trajectory consistency distillation.
    Tcd,
    /// The refined exponential solver with the estimate of the step before.
    ResMultistep,
    /// The refined exponential solver of two stages.
    Res2s,
    /// The extended reverse-time SDE solver of third order.
    ErSde,
    /// Euler with CFG++.
    EulerCfgPp,
    /// Euler with ancestral noise and CFG++.
    EulerACfgPp,
    /// Euler with gradient estimation.
    EulerGe,
    /// DPM-Solver++(2M) on the SDE.
    DpmPp2mSde,
    /// The same with noise of a Brownian path.
    DpmPp2mSdeBt,
    /// Linear multistep.
    Lms,
    /// DPM-Solver-2 with ancestral noise, two evaluations a step.
    Dpm2A,
    /// Heun++, up to three evaluations a step.
    HeunPp2,
    /// DPM-Solver++ on the SDE with noise of a Brownian path, two evaluations a step.
    DpmPpSde,
    /// DPM-Solver++(3M) on the SDE with noise of a Brownian path.
    DpmPp3mSde,
    /// UniPC of second order.
    UniPc,
}

named!(
    SamplerKind,
    "sampler",
    [
        ("euler", SamplerKind::Euler),
        ("euler_a", SamplerKind::EulerA),
        ("heun", SamplerKind::Heun),
        ("dpm2", SamplerKind::Dpm2),
        ("dpm++2s_a", SamplerKind::DpmPp2sA),
        ("dpm++2m", SamplerKind::DpmPp2m),
        ("dpm++2mv2", SamplerKind::DpmPp2mV2),
        ("ipndm", SamplerKind::Ipndm),
        ("ipndm_v", SamplerKind::IpndmV),
        ("lcm", SamplerKind::Lcm),
        ("ddim_trailing", SamplerKind::DdimTrailing),
        ("tcd", SamplerKind::Tcd),
        ("res_multistep", SamplerKind::ResMultistep),
        ("res_2s", SamplerKind::Res2s),
        ("er_sde", SamplerKind::ErSde),
        ("euler_cfg_pp", SamplerKind::EulerCfgPp),
        ("euler_a_cfg_pp", SamplerKind::EulerACfgPp),
        ("euler_ge", SamplerKind::EulerGe),
        ("dpm++2m_sde", SamplerKind::DpmPp2mSde),
        ("dpm++2m_sde_bt", SamplerKind::DpmPp2mSdeBt),
        ("lms", SamplerKind::Lms),
        ("dpm2_a", SamplerKind::Dpm2A),
        ("heunpp2", SamplerKind::HeunPp2),
        ("dpm++sde", SamplerKind::DpmPpSde),
        ("dpm++3m_sde", SamplerKind::DpmPp3mSde),
        ("uni_pc", SamplerKind::UniPc),
    ]
);

impl SamplerKind {
    /// The name web UIs know it by.
    pub fn label(self) -> &'static str {
        match self {
            SamplerKind::Euler => "Euler",
            SamplerKind::EulerA => "Euler a",
            SamplerKind::Heun => "Heun",
            SamplerKind::Dpm2 => "DPM2",
            SamplerKind::DpmPp2sA => "DPM++ 2S a",
            SamplerKind::DpmPp2m => "DPM++ 2M",
            SamplerKind::DpmPp2mV2 => "DPM++ 2M v2",
            SamplerKind::Ipndm => "IPNDM",
            SamplerKind::IpndmV => "IPNDM_V",
            SamplerKind::Lcm => "LCM",
            SamplerKind::DdimTrailing => "DDIM trailing",
            SamplerKind::Tcd => "TCD",
            SamplerKind::ResMultistep => "Res Multistep",
            SamplerKind::Res2s => "Res 2s",
            SamplerKind::ErSde => "ER SDE",
            SamplerKind::EulerCfgPp => "Euler CFG++",
            SamplerKind::EulerACfgPp => "Euler a CFG++",
            SamplerKind::EulerGe => "Euler GE",
            SamplerKind::DpmPp2mSde => "DPM++ 2M SDE",
            SamplerKind::DpmPp2mSdeBt => "DPM++ 2M SDE BT",
            SamplerKind::Lms => "LMS",
            SamplerKind::Dpm2A => "DPM2 a",
            SamplerKind::HeunPp2 => "HeunPP2",
            SamplerKind::DpmPpSde => "DPM++ SDE",
            SamplerKind::DpmPp3mSde => "DPM++ 3M SDE",
            SamplerKind::UniPc => "UniPC",
        }
    }

    /// The noise scale when a request names none.
    pub fn default_eta(self) -> f32 {
        use SamplerKind as K;
        match self {
            K::EulerA | K::DpmPp2sA | K::ErSde | K::EulerACfgPp | K::DpmPp2mSde | K::DpmPp2mSdeBt => 1.0,
            K::Dpm2A | K::DpmPpSde | K::DpmPp3mSde => 1.0,
            _ => 0.0,
        }
    }

    /// Whether `eta` changes what the sampler does.
    pub fn uses_eta(self) -> bool {
        use SamplerKind as K;
        self.default_eta() > 0.0
            || matches!(self, K::DdimTrailing | K::Tcd | K::ResMultistep | K::Res2s | K::EulerGe)
    }

    /// Whether the sampler reads the estimate without guidance, so that its pass is needed whatever the scale.
    pub fn uses_base(self) -> bool {
        matches!(self, SamplerKind::EulerCfgPp | SamplerKind::EulerACfgPp)
    }

    /// How many evaluations of the network a step takes, the last one aside.
    pub fn evaluations(self) -> usize {
        use SamplerKind as K;
        match self {
            K::Heun | K::Dpm2 | K::Dpm2A | K::DpmPp2sA | K::DpmPpSde | K::Res2s => 2,
            K::HeunPp2 => 3,
            _ => 1,
        }
    }

    /// Whether noise follows a Brownian path over the levels instead of the caller's stream.
    pub(super) fn uses_brownian(self) -> bool {
        matches!(self, SamplerKind::DpmPp2mSdeBt | SamplerKind::DpmPpSde | SamplerKind::DpmPp3mSde)
    }

    /// Whether steps are measured in the logarithm of the ratio of picture to noise.
    pub(super) fn steps_in_lambda(self) -> bool {
        self.uses_brownian() || matches!(self, SamplerKind::DpmPp2mSde | SamplerKind::ErSde | SamplerKind::UniPc)
    }
}
