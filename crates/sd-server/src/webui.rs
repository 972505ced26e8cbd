//! The API of A1111's web UI, `/sdapi/v1`, as far as it is about drawing.

use crate::app::{self, Answer, App, base64, body};
use crate::control;
use crate::failure::Failure;
use crate::fields::{Fields, shortened};
use crate::larger;
use crate::limits;
use crate::queue::{Enlarge, Format, Work};
use crate::{named, native};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use sd_runtime::{ImageRequest, InputMask, Stage};
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields that would change the picture and cannot be followed.
const UNSUPPORTED: &[&str] = &["styles", "subseed_strength", "restore_faces", "script_name", "extra_images"];

/// Fields that choose between files, or that belong to a feature which is off.
const IGNORED: &[&str] = &[
    "hr_checkpoint_name",
    "hr_sampler_name",
    "hr_scheduler",
    "hr_prompt",
    "hr_negative_prompt",
    "mask_blur",
    "mask_blur_x",
    "mask_blur_y",
    "inpaint_full_res",
    "inpaint_full_res_padding",
    "subseed",
    "seed_resize_from_h",
    "seed_resize_from_w",
    "seed_enable_extras",
    "firstphase_width",
    "firstphase_height",
    "script_args",
    "override_settings_restore_afterwards",
    "do_not_save_samples",
    "do_not_save_grid",
    "save_images",
    "send_images",
    "disable_extra_networks",
    "comments",
    "force_task_id",
    "infotext",
    "include_init_images",
    "inpainting_fill",
    "initial_noise_multiplier",
    "image_cfg_scale",
    "resize_mode",
];

/// Pictures from a prompt.
pub(crate) async fn txt2img(State(app): State<Arc<App>>, request: Body) -> Answer {
    let asked = app::read(&app, request, |app, body| {
        let mut fields = Fields::parse(body)?;
        let strength = fields.not_negative("denoising_strength")?;
        let hires = larger::second_pass(&mut fields, strength)?;
        let (mut request, warnings) = read(&mut fields, app)?;
        request.hires = hires.or(request.hires);
        Asked::new(body, request, warnings)
    });
    draw(&app, asked.await?).await
}

/// Pictures from a prompt and a picture.
pub(crate) async fn img2img(State(app): State<Arc<App>>, request: Body) -> Answer {
    let asked = app::read(&app, request, |app, body| {
        let mut fields = Fields::parse(body)?;
        let (request, warnings) = read_picture(&mut fields, app)?;
        Asked::new(body, request, warnings)
    });
    draw(&app, asked.await?).await
}

/// What a client wants.
struct Asked {
    request: ImageRequest,
    /// What the answer repeats of the body.
    echo: Value,
    warnings: Vec<String>,
}

impl Asked {
    fn new(body: &[u8], mut request: ImageRequest, mut warnings: Vec<String>) -> Result<Asked, Failure> {
        warnings.extend(native::follow_prompt(&mut request)?);
        let mut echo: Value = serde_json::from_slice(body).unwrap_or_default();
        if let Some(echo) = echo.as_object_mut() {
            // The client has its own pictures, and what else is too long to be kept while the request waits.
            let mut left = limits::ECHO;
            echo.retain(|name, value| {
                let len = name.len() + value.to_string().len();
                let kept = !matches!(name.as_str(), "init_images" | "mask" | "alwayson_scripts") && len <= left;
                left -= if kept { len } else { 0 };
                kept
            });
        }
        Ok(Asked { request, echo, warnings })
    }
}

/// Draws, and answers with an echo of the body.
async fn draw(app: &App, asked: Asked) -> Answer {
    let Asked { request, echo, mut warnings } = asked;
    let outcome = app.generate(request, Format::Png, &mut warnings).await?;
    let images: Vec<String> = outcome.pictures.iter().map(|p| base64(&p.bytes)).collect();
    let of = |f: fn(&sd_runtime::Parameters) -> Value| -> Vec<Value> {
        outcome.pictures.iter().map(|p| f(&p.parameters)).collect()
    };
    let info = outcome.pictures.first().map(|first| {
        let p = &first.parameters;
        json!({
            "prompt": p.prompt,
            "negative_prompt": p.negative_prompt,
            "seed": p.seed,
            "all_seeds": of(|p| json!(p.seed)),
            "all_prompts": of(|p| json!(p.prompt)),
            "all_negative_prompts": of(|p| json!(p.negative_prompt)),
            "infotexts": of(|p| json!(p.to_text())),
            "width": p.width,
            "height": p.height,
            "steps": p.steps,
            "cfg_scale": p.cfg_scale,
            "sampler_name": p.sampler.label(),
            "clip_skip": p.clip_skip,
            "extra_generation_params": {"Schedule type": p.scheduler.label()},
            "sd_model_name": p.model,
            "version": "sd-rs",
        })
    });
    // A client reads `info` as JSON inside of a string.
    let info = info.unwrap_or_default().to_string();
    Ok(Json(json!({"images": images, "parameters": echo, "info": info, "warnings": warnings})))
}

/// The request that the fields describe, with warnings.
fn read(fields: &mut Fields, app: &App) -> Result<(ImageRequest, Vec<String>), Failure> {
    let mut request = app.defaults.clone();
    request.prompt = fields.text("prompt")?.unwrap_or_default();
    request.negative_prompt = fields.text("negative_prompt")?.unwrap_or_default();
    let whole = |side: Option<u32>| side.map(limits::whole_blocks);
    request.width = whole(fields.small("width", 1, limits::SIDE)?).or(request.width);
    request.height = whole(fields.small("height", 1, limits::SIDE)?).or(request.height);
    request.steps = fields.small("steps", 1, limits::STEPS)?.or(request.steps);
    request.cfg_scale = fields.not_negative("cfg_scale")?.or(request.cfg_scale);
    request.eta = fields.not_negative("eta")?.or(request.eta);
    request.guidance = fields.not_negative("distilled_cfg_scale")?.or(request.guidance);
    request.seed = fields.whole("seed", i64::MIN, i64::MAX)?.or(request.seed);
    let most = limits::IMAGES;
    let images = fields.small("batch_size", 1, most)?.unwrap_or(1) * fields.small("n_iter", 1, most)?.unwrap_or(1);
    if images > most {
        return Err(Failure::bad(format!("batch_size, n_iter: want at most {most} images, got {images}")));
    }
    request.batch_count = Some(images);
    // `sampler_index` is the older name.
    let older = fields.choice("sampler_index", named::sampler)?;
    if let Some((sampler, scheduler)) = fields.choice("sampler_name", named::sampler)?.or(older) {
        request.sampler = Some(sampler);
        request.scheduler = scheduler.or(request.scheduler);
    }
    request.scheduler = fields.choice("scheduler", named::scheduler)?.flatten().or(request.scheduler);
    // Clients send 1 where nobody chose anything, so it means the model's own.
    let clip_skip = |n: Option<i64>| n.filter(|n| *n > 1).and_then(|n| i32::try_from(n).ok());
    request.clip_skip = clip_skip(fields.whole("clip_skip", -1, 64)?).or(request.clip_skip);
    if let Some(tiling) = fields.flag("tiling")? {
        (request.circular_x, request.circular_y) = (tiling, tiling);
    }
    let mut warnings = Vec::new();
    if let Some(mut settings) = fields.object("override_settings")? {
        request.clip_skip = clip_skip(settings.whole("CLIP_stop_at_last_layers", -1, 64)?).or(request.clip_skip);
        settings.choice("sd_model_checkpoint", |name| app.is_model(name))?;
        warnings.extend(settings.unknown());
    }
    let named = fields.choice("refiner_checkpoint", |name| app.is_refiner(name))?.is_some();
    // Clients send 0 where nobody chose a refiner.
    let switch = fields.not_negative("refiner_switch_at")?.filter(|at| named || *at > 0.0);
    request.refiner_switch = switch.filter(|_| app.model.refiner.is_some()).or(request.refiner_switch);
    warnings.extend(native::loras(fields, &mut request)?);
    warnings.extend(control::scripts(fields, &mut request)?);
    app.has_files(&request)?;
    fields.unsupported(UNSUPPORTED)?;
    fields.ignore(IGNORED);
    warnings.extend(fields.unknown());
    Ok((request, warnings))
}

/// As [`read`], with what belongs to a picture to start from.
fn read_picture(fields: &mut Fields, app: &App) -> Result<(ImageRequest, Vec<String>), Failure> {
    let first = fields.pictures("init_images")?.into_iter().next();
    let first = first.ok_or_else(|| Failure::bad("init_images: want a list with the picture to start from"))?;
    let strength = fields.not_negative("denoising_strength")?;
    let mask = fields.picture("mask")?;
    let invert = fields.flag("inpainting_mask_invert")?.unwrap_or(false);
    // Clients send 0 where nobody chose anything.
    let image_cfg_scale = fields.not_negative("image_cfg_scale")?.filter(|scale| *scale > 0.0);
    let blur = mask_blur(fields)?;
    let only_masked = fields.flag("inpaint_full_res")?.unwrap_or(false);
    let padding = fields.small("inpaint_full_res_padding", 0, limits::SIDE)?;
    fields.unsupported(&["enable_hr"])?;
    fields.ignore(&["hr_scale", "hr_upscaler", "hr_second_pass_steps", "hr_resize_x", "hr_resize_y"]);
    let fill = fields.small("inpainting_fill", 0, 3)?;
    let resize = fields.small("resize_mode", 0, 3)?;
    let noise = fields.not_negative("initial_noise_multiplier")?;
    let (mut request, mut warnings) = read(fields, app)?;
    if mask.is_some() && fill.is_some_and(|fill| fill != 1) {
        warnings.push("inpainting_fill: only 1 is supported yet, which starts from the picture".to_owned());
    }
    if noise.is_some_and(|noise| noise != 1.0) {
        warnings.push("initial_noise_multiplier: not supported yet, so it is 1".to_owned());
    }
    let [width, height] =
        [request.width.unwrap_or(first.width), request.height.unwrap_or(first.height)].map(u64::from);
    let [own_width, own_height] = [first.width, first.height].map(u64::from);
    let same = match resize {
        None | Some(1) => true,
        Some(3) => (width, height) == (own_width, own_height),
        Some(_) => width * own_height == height * own_width,
    };
    if !same {
        warnings.push("resize_mode: only 1 is supported yet, which resizes and crops the picture".to_owned());
    }
    request.init_image = Some(first);
    request.strength = strength.or(request.strength);
    request.mask = mask.map(|mask| InputMask::luma(&mask, invert));
    if request.mask.is_some() {
        (request.mask_blur, request.only_masked, request.mask_padding) = (blur, only_masked, padding);
    }
    request.image_cfg_scale = image_cfg_scale.or(request.image_cfg_scale);
    Ok((request, warnings))
}

/// A larger picture of one that the request brings along.
pub(crate) async fn extra_single_image(State(app): State<Arc<App>>, request: Body) -> Answer {
    let (enlarge, warnings) = app::read(&app, request, |_, body| read_extra(&mut Fields::parse(body)?)).await?;
    let ticket = app.queue.submit(Work::Enlarge(enlarge), Format::Png)?;
    let outcome = ticket.outcome().await.ok_or_else(Failure::stopping)?;
    match (outcome.enlarged, outcome.error) {
        (Some(file), None) => Ok(Json(json!({"image": base64(&file), "html_info": "", "warnings": warnings}))),
        (_, Some(e)) => Err(Failure::from(&e)),
        (None, None) => Err(Failure::stopping()),
    }
}

fn read_extra(fields: &mut Fields) -> Result<(Enlarge, Vec<String>), Failure> {
    let image = fields.picture("image")?.ok_or_else(|| Failure::bad("image: want a picture to make larger"))?;
    let name = fields.text("upscaler_1")?.unwrap_or_else(|| "None".to_owned());
    let by = fields.number("upscaling_resize")?.unwrap_or(2.0);
    let size = [
        fields.small("upscaling_resize_w", 0, limits::SIDE)?,
        fields.small("upscaling_resize_h", 0, limits::SIDE)?,
    ];
    // 0 is by a factor, 1 to a size.
    let to_size = fields.small("resize_mode", 0, 1)? == Some(1);
    fields.ignore(&["upscaling_crop", "show_extras_results", "upscale_first", "extras_upscaler_2_visibility"]);
    fields.unsupported(&["upscaler_2", "gfpgan_visibility", "codeformer_visibility", "codeformer_weight"])?;
    let own = [image.width, image.height];
    if !(by > 0.0 && by <= 8.0) {
        return Err(Failure::bad(format!("upscaling_resize: want a number above 0 and at most 8, got {by}")));
    }
    let size = match (name.as_str(), to_size, size) {
        ("None", ..) => own,
        (_, true, [Some(width), Some(height)]) if width > 0 && height > 0 => [width, height],
        (_, true, _) => return Err(Failure::bad("upscaling_resize_w, upscaling_resize_h: want a size")),
        (_, false, _) => own.map(|side| (f64::from(side) * f64::from(by)).round().max(1.0) as u32),
    };
    if u64::from(size[0]) * u64::from(size[1]) > limits::PICTURE_PIXELS {
        let (most, [width, height]) = (limits::PICTURE_PIXELS, size);
        return Err(Failure::bad(format!("upscaling_resize: want at most {most} pixels, got {width}x{height}")));
    }
    let by_network = match name.as_str() {
        "None" | "Lanczos" => false,
        "Model" => true,
        other => {
            let other = shortened(other);
            return Err(Failure::bad(format!("upscaler_1: no {other:?} (one of None, Lanczos, Model)")));
        }
    };
    Ok((Enlarge { image, by_network, size }, fields.unknown()))
}

/// How far the mask is blurred: `mask_blur`, or the larger of its values for the two directions.
fn mask_blur(fields: &mut Fields) -> Result<u32, Failure> {
    const MOST: u32 = 64;
    let both = fields.small("mask_blur", 0, MOST)?;
    let (x, y) = (fields.small("mask_blur_x", 0, MOST)?, fields.small("mask_blur_y", 0, MOST)?);
    Ok(both.unwrap_or_else(|| x.into_iter().chain(y).max().unwrap_or(0)))
}

/// How far the running request is.
pub(crate) async fn progress(State(app): State<Arc<App>>) -> Json<Value> {
    let (running, waiting) = app.queue.progress();
    let Some(running) = running else {
        let state = state("", 0, 0, 0, 0, false);
        return Json(json!({"progress": 0.0, "eta_relative": 0.0, "state": state, "current_image": null,
            "textinfo": null, "queue": waiting}));
    };
    let seconds = running.started.elapsed().as_secs_f64();
    let job = format!("request {}", running.id);
    let (image, images, step, steps) = running.progress.map_or((0, 1, 0, 0), |p| match p.stage {
        Stage::Denoise => (p.image, p.images, p.step, p.total),
        _ => (p.image, p.images, 0, 0),
    });
    let decoding = running.progress.is_some_and(|p| p.stage == Stage::Decode);
    let part = if decoding { 1.0 } else { step as f64 / steps.max(1) as f64 };
    let done = ((image as f64 + part) / images.max(1) as f64).min(1.0);
    let left = if done > 0.0 { seconds / done - seconds } else { 0.0 };
    Json(json!({
        "progress": done,
        "eta_relative": left,
        "state": state(&job, images, image, step, steps, running.interrupted),
        "current_image": running.preview.as_ref().map(|file| base64(file)),
        "textinfo": running.progress.map(|p| p.stage.name()),
        "queue": waiting,
    }))
}

fn state(job: &str, jobs: usize, at: usize, step: usize, steps: usize, interrupted: bool) -> Value {
    json!({"skipped": false, "interrupted": interrupted, "job": job, "job_count": jobs, "job_no": at,
        "sampling_step": step, "sampling_steps": steps})
}

/// Stops the running request. Its client gets the pictures that are finished.
pub(crate) async fn interrupt(State(app): State<Arc<App>>) -> Json<Value> {
    app.queue.interrupt();
    Json(json!({}))
}

/// Names of samplers.
pub(crate) async fn samplers() -> Json<Value> {
    let item = |s: sd_runtime::SamplerKind| json!({"name": s.label(), "aliases": [s.name()], "options": {}});
    Json(named::all_samplers().map(item).collect())
}

/// Names of schedules.
pub(crate) async fn schedulers() -> Json<Value> {
    let mut names: Vec<_> = named::all_schedulers().map(|s| (s.name(), s.label())).collect();
    names.dedup();
    let automatic = json!({"name": "automatic", "label": "Automatic"});
    let items = names.into_iter().map(|(name, label)| json!({"name": name, "label": label}));
    Json(std::iter::once(automatic).chain(items).collect())
}

/// Names of upscalers of pictures.
pub(crate) async fn upscalers() -> Json<Value> {
    let names = ["None", "Lanczos", "Model"];
    Json(names.map(|name| json!({"name": name, "model_name": null, "model_path": null, "model_url": null, "scale": null})).to_vec().into())
}

/// Names of upscalers of latents.
pub(crate) async fn latent_upscalers() -> Json<Value> {
    let latent = sd_runtime::HiresUpscaler::names().filter(|name| name.starts_with("Latent"));
    Json(latent.map(|name| json!({"name": name})).collect())
}

/// The one model there is.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let name = &app.model.name;
    Json(
        json!([{"title": name, "model_name": name, "filename": name, "hash": null, "sha256": null, "config": null}]),
    )
}

/// The LoRAs there are.
pub(crate) async fn loras(State(app): State<Arc<App>>) -> Json<Value> {
    Json(app.list_loras().into())
}

/// The settings that clients ask for.
pub(crate) async fn options(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"samples_format": "png", "sd_model_checkpoint": app.model.name}))
}

/// Takes settings that are already so.
pub(crate) async fn set_options(State(app): State<Arc<App>>, request: Body) -> Answer {
    let mut fields = Fields::parse(&body(request).await?)?;
    fields.choice("sd_model_checkpoint", |name| app.is_model(name))?;
    fields.choice("samples_format", |name| match name {
        "png" => Ok(()),
        other => Err(format!("want png, got {:?}", shortened(other))),
    })?;
    match fields.unknown().first() {
        None => Ok(Json(json!({}))),
        Some(field) => Err(Failure::bad(field.replace("unknown, ignored", "no such setting"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_runtime::{SamplerKind, SchedulerKind};

    fn read(json: &str) -> Result<(ImageRequest, Vec<String>), Failure> {
        let app = App::for_tests();
        super::read(&mut Fields::parse(json.as_bytes()).unwrap(), &app)
    }

    #[test]
    fn fields_become_a_request() {
        let (r, warnings) = read(
            r#"{"prompt":"a cat","negative_prompt":"dog","width":500,"height":512,"steps":20,"cfg_scale":7.5,
                "seed":-1,"batch_size":2,"n_iter":2,"sampler_name":"DPM++ 2M Karras","styles":[],"enable_hr":false,
                "alwayson_scripts":{},"save_images":true,"subseed":-1,"sampler_index":"Euler",
                "override_settings":{"CLIP_stop_at_last_layers":2,"sd_model_checkpoint":"demo"},"odd":1}"#,
        )
        .unwrap();
        assert_eq!((r.prompt.as_str(), r.negative_prompt.as_str()), ("a cat", "dog"));
        assert_eq!((r.width, r.height, r.steps, r.cfg_scale), (Some(504), Some(512), Some(20), Some(7.5)));
        assert_eq!((r.seed, r.batch_count, r.clip_skip), (Some(-1), Some(4), Some(2)));
        assert_eq!((r.sampler, r.scheduler), (Some(SamplerKind::DpmPp2m), Some(SchedulerKind::Karras)));
        assert_eq!(warnings, ["odd: unknown, ignored"]);
    }

    #[test]
    fn a_refiner_is_the_servers_and_takes_over_where_asked() {
        let mut app = App::for_tests();
        let read = |app: &App, json: &str| super::read(&mut Fields::parse(json.as_bytes()).unwrap(), app);
        let switch = |app: &App, json: &str| read(app, json).map(|(r, w)| (r.refiner_switch, w.len())).unwrap();
        // Without a refiner the fields that clients fill by themselves mean nothing.
        for json in [r#"{"refiner_checkpoint":"","refiner_switch_at":0.8}"#, r#"{"refiner_switch_at":0}"#] {
            assert_eq!(switch(&app, json), (None, 0), "{json}");
        }
        app.model.refiner = Some("heron".into());
        for (json, want) in [
            (r#"{"refiner_checkpoint":"heron.safetensors","refiner_switch_at":0.5}"#, Some(0.5)),
            (r#"{"refiner_checkpoint":"heron","refiner_switch_at":0}"#, Some(0.0)),
            (r#"{"refiner_switch_at":0.6}"#, Some(0.6)),
            (r#"{"refiner_checkpoint":null,"refiner_switch_at":0}"#, None),
            ("{}", None),
        ] {
            assert_eq!(switch(&app, json), (want, 0), "{json}");
        }
        let e = read(&app, r#"{"refiner_checkpoint":"egret"}"#).unwrap_err();
        assert_eq!(e.message(), "refiner_checkpoint: the server's refiner is \"heron\"");
    }

    #[test]
    fn tiling_closes_both_directions() {
        for (json, want) in [("{}", false), (r#"{"tiling":false}"#, false), (r#"{"tiling":true}"#, true)] {
            let r = read(json).unwrap().0;
            assert_eq!((r.circular_x, r.circular_y), (want, want), "{json}");
        }
    }

    #[test]
    fn what_belongs_to_a_picture_is_read_or_warned_about() {
        let file = sd_io::Image::new(16, 8, vec![0; 16 * 8 * 3]).unwrap().to_png(None).unwrap();
        let read = |extra: Value| {
            let mut json = json!({"prompt": "a", "init_images": [base64(&file)]});
            json.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let mut fields = Fields::parse(json.to_string().as_bytes()).unwrap();
            read_picture(&mut fields, &App::for_tests())
        };
        for neutral in [
            json!({}),
            json!({"inpainting_fill": 0, "resize_mode": 0, "initial_noise_multiplier": 1, "image_cfg_scale": 0}),
            json!({"inpainting_fill": 1, "mask": base64(&file), "resize_mode": 2, "width": 32, "height": 16}),
            json!({"resize_mode": 1, "width": 64, "height": 64}),
            json!({"resize_mode": 3, "width": 16, "height": 8}),
        ] {
            let (r, warnings) = read(neutral.clone()).unwrap();
            assert_eq!((warnings, r.image_cfg_scale), (Vec::new(), None), "{neutral}");
        }
        for (asks, want) in [
            (json!({"inpainting_fill": 0, "mask": base64(&file)}), "inpainting_fill: "),
            (json!({"initial_noise_multiplier": 0.5}), "initial_noise_multiplier: "),
            (json!({"resize_mode": 0, "width": 64, "height": 64}), "resize_mode: "),
            (json!({"resize_mode": 3, "width": 32, "height": 16}), "resize_mode: "),
        ] {
            let warnings = read(asks.clone()).unwrap().1;
            assert!(warnings.len() == 1 && warnings[0].starts_with(want), "{asks}: {warnings:?}");
        }
        assert_eq!(read(json!({"image_cfg_scale": 1.5})).unwrap().0.image_cfg_scale, Some(1.5));
        let asks =
            json!({"mask": base64(&file), "mask_blur": 4, "inpaint_full_res": 1, "inpaint_full_res_padding": 8});
        let r = read(asks).unwrap().0;
        assert_eq!((r.mask_blur, r.only_masked, r.mask_padding), (4, true, Some(8)));
        let r = read(json!({"mask_blur": 4, "inpaint_full_res": true})).unwrap().0;
        assert_eq!((r.mask_blur, r.only_masked), (0, false), "without a mask they mean nothing");
        let e = read(json!({"resize_mode": 4})).unwrap_err();
        assert_eq!(e.message(), "resize_mode: want a whole number from 0 to 3, got 4");
    }

    #[test]
    fn pictures_become_larger_by_a_factor_or_to_a_size() {
        let file = base64(&sd_io::Image::new(16, 8, vec![0; 16 * 8 * 3]).unwrap().to_png(None).unwrap());
        let read = |extra: Value| {
            let mut json = json!({"image": file});
            json.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            read_extra(&mut Fields::parse(json.to_string().as_bytes()).unwrap())
                .map(|(e, _)| (e.by_network, e.size))
        };
        assert_eq!(read(json!({"upscaling_resize": 3})).unwrap(), (false, [16, 8]));
        assert_eq!(read(json!({"upscaler_1": "Lanczos", "upscaling_resize": 1.5})).unwrap(), (false, [24, 12]));
        let size =
            json!({"upscaler_1": "Model", "resize_mode": 1, "upscaling_resize_w": 30, "upscaling_resize_h": 20});
        assert_eq!(read(size).unwrap(), (true, [30, 20]));
        for (asks, want) in [
            (json!({"upscaler_1": "4x"}), "upscaler_1: no \"4x\""),
            (json!({"upscaling_resize": 9}), "upscaling_resize: want a number"),
            (json!({"gfpgan_visibility": 1}), "gfpgan_visibility: not supported yet"),
            (
                json!({"upscaler_1": "Model", "resize_mode": 1}),
                "upscaling_resize_w, upscaling_resize_h: want a size",
            ),
        ] {
            let e = read(asks.clone()).unwrap_err();
            assert!(e.message().starts_with(want), "{asks}: {}", e.message());
        }
    }

    #[test]
    fn clip_skip_of_1_is_the_models_own() {
        for (json, want) in [
            (r#"{"clip_skip":1}"#, None),
            (r#"{"clip_skip":2}"#, Some(2)),
            (r#"{"clip_skip":2,"override_settings":{"CLIP_stop_at_last_layers":1}}"#, Some(2)),
        ] {
            assert_eq!(read(json).unwrap().0.clip_skip, want, "{json}");
        }
    }

    #[test]
    fn wrong_fields_are_named() {
        for (json, want) in [
            (r#"{"prompt":1}"#, "prompt: want a string, got 1"),
            (r#"{"width":0}"#, "width: want a whole number from 1 to 4096, got 0"),
            (r#"{"height":99999}"#, "height: "),
            (r#"{"steps":151}"#, "steps: "),
            (r#"{"steps":"20"}"#, "steps: want a whole number from 1 to 150, got a string"),
            (r#"{"cfg_scale":-1}"#, "cfg_scale: "),
            (r#"{"batch_size":4,"n_iter":3}"#, "batch_size, n_iter: want at most 8 images, got 12"),
            (r#"{"sampler_name":"Oiler"}"#, "sampler_name: no \"Oiler\" (one of euler"),
            (r#"{"scheduler":"x"}"#, "scheduler: no \"x\""),
            (r#"{"styles":["x"]}"#, "styles: not supported yet"),
            (r#"{"refiner_checkpoint":"x"}"#, "refiner_checkpoint: the server has no refiner"),
            (r#"{"override_settings":[]}"#, "override_settings: want an object, got a list"),
            (r#"{"override_settings":{"sd_model_checkpoint":"other"}}"#, "override_settings.sd_model_checkpoint: "),
        ] {
            let e = read(json).unwrap_err();
            assert!(e.message().starts_with(want), "{json}: {}", e.message());
        }
    }
}
