//! What clients say of ControlNets.

use crate::app::App;
use crate::failure::Failure;
use crate::fields::{Fields, shortened};
use axum::Json;
use axum::extract::State;
use sd_runtime::{ControlChoice, ImageRequest, MAX_CONTROLS};
use serde_json::{Value, json};
use std::sync::Arc;

/// What a unit's `module` can be.
const MODULES: [&str; 2] = ["none", "canny"];

/// Fields of a unit that choose what a preprocessor or another resizing would do.
const IGNORED: &[&str] = &[
    "resize_mode",
    "processor_res",
    "threshold_a",
    "threshold_b",
    "pixel_perfect",
    "lowvram",
    "low_vram",
    "guessmode",
    "hr_option",
    "save_detected_map",
    "input_mode",
    "batch_images",
    "output_dir",
    "loopback",
];

/// Takes the one picture of the native API.
pub(crate) fn native(fields: &mut Fields, request: &mut ImageRequest) -> Result<(), Failure> {
    let strength = fields.number("control_strength")?;
    let net = fields.text("control_net")?.filter(|name| !name.is_empty());
    if let Some(image) = fields.picture("control_image")? {
        let default = ControlChoice::new(image);
        request.controls = vec![ControlChoice { net, strength: strength.unwrap_or(default.strength), ..default }];
    }
    Ok(())
}

/// Takes the scripts of A1111's web UI, of which `controlnet` is followed, and returns warnings.
pub(crate) fn scripts(fields: &mut Fields, request: &mut ImageRequest) -> Result<Vec<String>, Failure> {
    let mut warnings = Vec::new();
    let Some(mut scripts) = fields.object("alwayson_scripts")? else { return Ok(warnings) };
    for name in ["controlnet", "ControlNet"] {
        let Some(mut script) = scripts.object(name)? else { continue };
        for mut unit in script.objects("args", MAX_CONTROLS)?.unwrap_or_default() {
            if unit.flag("enabled")? != Some(false) {
                request.controls.push(control(&mut unit)?);
                warnings.extend(unit.unknown());
            }
        }
    }
    scripts.refuse_rest()?;
    Ok(warnings)
}

/// The names of ControlNets, read anew for every request.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"model_list": app.list_control_nets()}))
}

/// The names of what is done to a unit's picture.
pub(crate) async fn modules() -> Json<Value> {
    Json(json!({"module_list": MODULES}))
}

fn control(unit: &mut Fields) -> Result<ControlChoice, Failure> {
    let older = unit.picture("input_image")?;
    let Some(image) = unit.picture("image")?.or(older) else {
        return Err(Failure::bad("alwayson_scripts.controlnet.args.image: want a picture in base64"));
    };
    let canny = unit.choice("module", |name| match name.to_lowercase().as_str() {
        "none" => Ok(false),
        "canny" => Ok(true),
        _ => Err(format!("no {:?}, want none or canny; give the picture that it would make", shortened(name))),
    })?;
    // The web UI puts a hash behind the name.
    let net = unit.text("model")?.filter(|name| !name.is_empty() && name != "None");
    let net = net.map(|name| name.split_once(" [").map_or(name.clone(), |(name, _)| name.to_owned()));
    unit.choice("control_mode", |mode| match mode {
        "Balanced" => Ok(()),
        _ => Err("only Balanced is supported".to_owned()),
    })?;
    let default = ControlChoice::new(image);
    let control = ControlChoice {
        net,
        strength: unit.number("weight")?.unwrap_or(1.0),
        start: unit.double("guidance_start")?.unwrap_or(default.start),
        end: unit.double("guidance_end")?.unwrap_or(default.end),
        canny: canny.unwrap_or(false),
        ..default
    };
    unit.unsupported(&["mask", "mask_image", "effective_region_mask"])?;
    unit.ignore(IGNORED);
    Ok(control)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_io::Image;

    fn file() -> String {
        crate::app::base64(&Image::new(2, 1, vec![0, 0, 0, 255, 255, 255]).unwrap().to_png(None).unwrap())
    }

    fn read(unit: Value) -> Result<(Vec<ControlChoice>, Vec<String>), Failure> {
        let body = json!({"alwayson_scripts": {"controlnet": {"args": [unit]}}}).to_string();
        let mut request = ImageRequest::default();
        let warnings = scripts(&mut Fields::parse(body.as_bytes())?, &mut request)?;
        Ok((request.controls, warnings))
    }

    #[test]
    fn units_of_the_web_ui() {
        let (controls, warnings) = read(json!({"image": file(), "module": "canny", "weight": 0.5,
            "model": "edges [d14c016b]", "guidance_end": 0.75, "pixel_perfect": true, "control_mode": "Balanced",
            "odd": 1}))
        .unwrap();
        let ControlChoice { net, image, strength, start, end, canny } = controls[0].clone();
        assert_eq!(
            (net.as_deref(), image.width, strength, start, end, canny),
            (Some("edges"), 2, 0.5, 0.0, 0.75, true)
        );
        assert_eq!(warnings, ["alwayson_scripts.controlnet.args.odd: unknown, ignored"]);
        let (controls, _) = read(json!({"input_image": file(), "model": "None"})).unwrap();
        assert_eq!((&controls[0].net, controls[0].strength), (&None, 1.0));
        assert!(read(json!({"enabled": false})).unwrap().0.is_empty());
        for (unit, want) in [
            (json!({}), "alwayson_scripts.controlnet.args.image: want a picture"),
            (json!({"image": file(), "module": "depth"}), "alwayson_scripts.controlnet.args.module: no \"depth\""),
            (json!({"image": file(), "control_mode": "x"}), "alwayson_scripts.controlnet.args.control_mode: only"),
            (json!({"image": file(), "weight": "x"}), "alwayson_scripts.controlnet.args.weight: want a number"),
        ] {
            let e = read(unit).unwrap_err();
            assert!(e.message().starts_with(want), "{}", e.message());
        }
        let mut other = Fields::parse(br#"{"alwayson_scripts":{"refiner":{"args":[1]},"none":{}}}"#).unwrap();
        let e = scripts(&mut other, &mut ImageRequest::default()).unwrap_err();
        assert_eq!(e.message(), "alwayson_scripts.refiner: not supported yet");
    }
}
