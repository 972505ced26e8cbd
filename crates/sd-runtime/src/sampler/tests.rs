use super::*;

fn setup(sigmas: &[f64], table: SigmaTable, eta: f64) -> SamplerSetup {
    SamplerSetup { sigmas: sigmas.to_vec(), table, eta, seed: 3, options: SampleOptions::default() }
}

/// Runs to the end with a denoiser that knows the picture, and noise from torch's generator.
fn run(kind: SamplerKind, setup: SamplerSetup, picture: &[f32]) -> Vec<f32> {
    let mut rng = crate::rng::Rng::new(crate::rng::RngKind::Cpu, 5);
    let mut x = rng.randn(picture.len());
    let first = setup.sigmas[0] as f32;
    x.iter_mut().for_each(|v| *v *= first);
    let mut sampler = Sampler::new(kind, setup);
    for _ in 0..sampler.steps() {
        let d = sampler.step(&mut x, &mut |_, _| Ok(picture.to_vec().into()), &mut |n| rng.randn(n)).unwrap();
        assert_eq!(d, picture, "{kind}");
        assert!(x.iter().all(|v| v.is_finite()), "{kind}: {x:?}");
    }
    x
}

#[test]
fn every_sampler_lands_on_the_picture() {
    let picture: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) / 8.0).collect();
    let tables = [SigmaTable::scaled_linear(), SigmaTable::flow(3.0, 1000.0), SigmaTable::continuous(0.002, 120.0)];
    for name in SamplerKind::names() {
        let kind: SamplerKind = name.parse().unwrap();
        for table in &tables {
            // One step, two, uneven ones, repeated levels, a start below the table's end.
            let (high, low) = (table.max(), table.min());
            for levels in [
                vec![high, 0.0],
                vec![high, low, 0.0],
                vec![high, 0.9 * high, 0.5 * high, 0.4 * high, 0.05 * high, low, 0.0],
                vec![high, high, 0.5 * high, 0.5 * high, 0.5 * high, low, 0.0],
                vec![0.3 * high, 0.2 * high, 0.0],
            ] {
                for eta in [0.0, 0.3, 1.0, 8.0] {
                    let x = run(kind, setup(&levels, table.clone(), eta), &picture);
                    let worst = x.iter().zip(&picture).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(worst < 1e-5, "{kind}, {levels:?}, eta {eta}: off by {worst}");
                }
            }
        }
    }
}

#[test]
fn a_run_may_end_above_0() {
    // Euler with a constant estimate keeps the noise's direction: x = D + sigma n.
    let table = SigmaTable::scaled_linear();
    let mut sampler = Sampler::new(SamplerKind::Euler, setup(&[8.0, 2.0, 0.5], table, 0.0));
    let mut x = vec![1.0 + 8.0 * 0.25];
    for _ in 0..2 {
        sampler.step(&mut x, &mut |_, _| Ok(vec![1.0].into()), &mut |n| vec![0.0; n]).unwrap();
    }
    assert!((x[0] - 1.125).abs() < 1e-6);
    let e = sampler.step(&mut x, &mut |_, _| Ok(vec![1.0].into()), &mut |n| vec![0.0; n]).unwrap_err();
    assert!(e.to_string().contains("past its last noise level"));
}

#[test]
fn evaluations_are_counted_as_documented() {
    for name in SamplerKind::names() {
        let kind: SamplerKind = name.parse().unwrap();
        let levels = [10.0, 8.0, 5.0, 3.0, 1.0, 0.0];
        let mut sampler = Sampler::new(kind, setup(&levels, SigmaTable::scaled_linear(), 0.5));
        let (mut x, mut count) = (vec![1.0; 16], 0);
        let mut first = 0;
        for i in 0..5 {
            let mut denoise = |x: &[f32], sigma: f64| {
                count += 1;
                Ok(x.iter().map(|v| v / (1.0 + sigma as f32)).collect::<Vec<f32>>().into())
            };
            sampler.step(&mut x, &mut denoise, &mut |n| vec![0.5; n]).unwrap();
            first = if i == 0 { count } else { first };
        }
        assert_eq!(first, kind.evaluations(), "{kind}");
        assert!(count <= 5 * kind.evaluations() && count > 4 * kind.evaluations() - 4, "{kind}: {count}");
    }
}

#[test]
fn lcm_scales_and_clips_its_noise() {
    // Sixteen whole steps from -7.5 to 7.5 have the variance 340 / 15; noise is held to half the deviation.
    let options: SampleOptions = "noise_scale_start=2,noise_scale_end=1,noise_clip_std=0.5".parse().unwrap();
    let sigmas = vec![10.0, 4.0, 2.0, 1.0, 0.0];
    let table = SigmaTable::scaled_linear();
    let mut sampler = Sampler::new(SamplerKind::Lcm, SamplerSetup { sigmas, table, eta: 0.0, seed: 0, options });
    let noise: Vec<f32> = (1..=16).map(|i| i as f32 - 8.5).collect();
    let most = 0.5 * (340.0f32 / 15.0).sqrt();
    let mut x = vec![0.0; 16];
    for (level, scale) in [(4.0, 2.0), (2.0, 2.0 - 1.0 / 3.0), (1.0, 2.0 - 2.0 / 3.0)] {
        sampler.step(&mut x, &mut |_, _| Ok(vec![0.25; 16].into()), &mut |_| noise.clone()).unwrap();
        for (x, n) in x.iter().zip(&noise) {
            let want = 0.25 + level * scale * n.clamp(-most, most);
            assert!((x - want).abs() < 1e-5, "{x}, want {want}");
        }
    }
}
