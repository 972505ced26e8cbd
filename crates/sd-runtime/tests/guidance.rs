//! Predictions and guidance against ComfyUI, k-diffusion and diffusers (`oracle/predictions.py`, `guidance.py`).

#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_runtime::{Apg, Guidance, Prediction, Predictions, SampleOptions, Scales};
use support::{Fixture, json};

const NEAR: f64 = 1e-5;

#[test]
fn combinations_are_diffusers() {
    let file = Fixture::open("guidance.safetensors");
    let config = file.metadata("config");
    let [text, image, skip] = ["scale", "image", "skip"].map(|k| config[k].as_f64().unwrap());
    let steps = config["steps"].as_u64().unwrap() as usize;
    let inputs = ["cond", "uncond", "image_uncond", "skipped"].map(|k| file.f32s(&format!("input.{k}")));
    let mut compared = 0;
    for name in file.names() {
        let Some(case) = name.strip_prefix("output.") else { continue };
        let apg = if case.starts_with("apg") { case.parse::<SampleOptions>().unwrap().apg } else { Apg::default() };
        assert_eq!(apg.is_on(), case.starts_with("apg"), "{case}");
        let (three, skips) = (case == "three_way", case == "slg");
        let scales = Scales { text, image, skip: if skips { skip } else { 0.0 } };
        let want = file.f32s(name);
        let n = want.len() / steps;
        let mut guidance = Guidance::new(apg);
        for step in 0..steps {
            let [cond, uncond, image_uncond, skipped] = [0, 1, 2, 3].map(|i| inputs[i][step * n..][..n].to_vec());
            let p = Predictions {
                cond,
                uncond: Some(uncond),
                image_uncond: three.then_some(image_uncond),
                skipped: skips.then_some(skipped),
            };
            let got = guidance.combine(&p, scales);
            for (g, w) in got.iter().zip(&want[step * n..]) {
                let off = f64::from((g - w).abs()) / f64::from(w.abs().max(1.0));
                assert!(off < NEAR, "{case}, step {step}: {g}, want {w}");
            }
        }
        compared += 1;
    }
    assert_eq!(compared, 8);
}

#[test]
fn predictions_mean_what_they_do_in_comfyui() {
    let json = json("predictions.json");
    let list = |v: &serde_json::Value| -> Vec<f32> {
        v.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
    };
    let [x, f, noise] = ["x", "f", "noise"].map(|k| list(&json[k]));
    let rows = json["rows"].as_array().unwrap();
    for row in rows {
        let prediction: Prediction = row["prediction"].as_str().unwrap().parse().unwrap();
        let sigma = row["sigma"].as_f64().unwrap();
        let latent: Vec<f32> = x.iter().map(|x| (f64::from(*x) * sigma) as f32).collect();
        let scalings = prediction.scalings(sigma);
        for (what, got) in [
            ("input", scalings.input(&latent)),
            ("denoised", scalings.denoised(&latent, &f)),
            ("noised", prediction.noised(&x, &noise, sigma)),
        ] {
            for (g, w) in got.iter().zip(list(&row[what])) {
                let off = f64::from((g - w).abs()) / f64::from(w.abs().max(1.0));
                assert!(off < 1e-6, "{what} of {prediction} at {sigma}: {g}, want {w}");
            }
        }
    }
    assert_eq!(rows.len(), 18);
    assert_eq!(Prediction::EdmV.scalings(3.7), Prediction::V.scalings(3.7));
}
