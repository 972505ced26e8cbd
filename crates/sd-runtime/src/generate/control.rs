//! The ControlNets of a request: their pictures as hints, and the steps that follow them.

use sd_core::{Error, Result, Tensor};

use super::{Active, Networks, Watch, non_finite};
use crate::canny::edges;
use crate::observer::Stage;
use crate::parameters::Parameters;
use crate::picture::Sizes;
use crate::request::ImageRequest;
use crate::resolve::{Resolved, UsedControl};

/// A ControlNet with what it follows.
pub(super) struct Control {
    used: UsedControl,
    /// `[1, c, h, w]`.
    hint: Tensor,
}

impl Control {
    /// The ControlNet in a step, counted from 0, of `steps`, if it is followed then: diffusers' rule for
    /// `control_guidance_start` and `control_guidance_end`.
    pub(super) fn active(&self, step: usize, steps: usize) -> Option<Active<'_>> {
        let share = |step: usize| step as f64 / steps.max(1) as f64;
        let UsedControl { net, strength, start, end } = self.used;
        let follows = share(step) >= start && share(step + 1) <= end && strength != 0.0;
        follows.then_some(Active { net, strength, hint: &self.hint })
    }
}

/// Has the networks read the request's control pictures.
pub(super) fn encode(
    net: &mut dyn Networks,
    request: &ImageRequest,
    resolved: &Resolved,
    p: &Parameters,
    size: &Sizes,
    watch: &mut Watch<'_>,
) -> Result<Vec<Control>> {
    let (width, height) = (p.width as usize, p.height as usize);
    let mut out = Vec::new();
    for (choice, used) in request.controls.iter().zip(&resolved.controls) {
        watch.cancel.check()?;
        let mut rgb = choice.image.covering([width, height])?;
        if choice.canny {
            rgb = edges(&rgb, width);
        }
        let [w, h] = size.computed();
        let all = size.embed(&rgb, 3);
        let plane = |c: usize| all.iter().skip(c).step_by(3).map(|b| f32::from(*b) / 255.0);
        let picture = Tensor::f32(&[1, 3, h, w], (0..3).flat_map(plane).collect())?;
        let stage = Stage::Encode;
        let context = |e: Error| e.context(format!("{} a control image", stage.name()));
        let hint = net.hint(used.net, &picture, watch.cancel).map_err(context)?;
        if !hint.is_finite() {
            return Err(non_finite(net, stage, "the hint of a control image"));
        }
        out.push(Control { used: used.clone(), hint });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_steps_is_followed() {
        let steps = |start, end, strength| -> Vec<usize> {
            let used = UsedControl { net: 0, strength, start, end };
            let control = Control { used, hint: Tensor::zeros(&[1]).unwrap() };
            (0..10).filter(|step| control.active(*step, 10).is_some()).collect()
        };
        assert_eq!(steps(0.0, 1.0, 1.0), Vec::from_iter(0..10));
        assert_eq!(steps(0.0, 0.5, 1.0), [0, 1, 2, 3, 4]);
        assert_eq!(steps(0.25, 0.75, 1.0), [3, 4, 5, 6]);
        assert_eq!(steps(0.0, 1.0, 0.0), [0; 0]);
    }
}
