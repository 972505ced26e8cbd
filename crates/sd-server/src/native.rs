//! The API of stable-diffusion.cpp's server, `/sdcpp/v1`: jobs that are submitted, polled and cancelled. Its schema
//! can also stand in the prompts of the other APIs.

use crate::app::{Answer, App, base64, read, unix_time};
use crate::control;
use crate::failure::Failure;
use crate::fields::{Fields, picture_bytes};
use crate::larger;
use crate::limits;
use crate::named;
use crate::queue::{Format, Outcome, Picture, Place};
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use sd_runtime::{CacheMode, ImageRequest, InputMask, LoraChoice, ReferenceIndex, StepCache};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How long a finished job keeps its pictures, and then how long its id is known, in seconds.
const KEPT: u64 = 600;
/// How many finished jobs keep their pictures.
const KEPT_JOBS: usize = 64;
/// How many bytes these pictures may have, as text; those of the last job are kept whatever they have.
const KEPT_BYTES: usize = 256 << 20;
/// How many finished jobs are known.
const KEPT_IDS: usize = 1024;

/// Fields that cannot be followed yet, unless they ask for nothing.
const UNSUPPORTED: &[&str] = &["ip_adapter_image", "ad_model"];

/// Fields of what is not there, or of what is off.
const IGNORED: &[&str] = &[
    "qwen_image_layers",
    "ip_adapter_strength",
    "embed_image_metadata",
    "video_frames",
    "fps",
    "moe_boundary",
    "vace_strength",
    "ad_prompt",
    "ad_negative_prompt",
    "extra_ad_args",
    "high_noise_sample_params",
];

/// The jobs that were submitted, by number.
#[derive(Default)]
pub(crate) struct Jobs(Mutex<BTreeMap<u64, Job>>);

#[derive(Debug)]
struct Job {
    /// Its number in the queue.
    ticket: u64,
    created: u64,
    cancelled: bool,
    done: Option<Done>,
}

#[derive(Debug)]
struct Done {
    started: Option<u64>,
    completed: u64,
    status: &'static str,
    /// Dropped when the job expires.
    result: Option<Value>,
    /// Of the pictures in the result.
    bytes: usize,
    error: Value,
}

impl Jobs {
    /// The jobs, without those that have expired by `now`.
    fn at(&self, now: u64) -> MutexGuard<'_, BTreeMap<u64, Job>> {
        let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let age = |job: &Job| job.done.as_ref().map_or(0, |done| now.saturating_sub(done.completed));
        jobs.retain(|_, job| age(job) <= 2 * KEPT);
        let (mut finished, mut kept, mut bytes) = (0, 0, 0);
        let mut forgotten = Vec::new();
        for (number, job) in jobs.iter_mut().rev() {
            let old = age(job) > KEPT;
            let Some(done) = &mut job.done else { continue };
            finished += 1;
            if finished > KEPT_IDS {
                forgotten.push(*number);
            }
            if done.result.is_some() {
                (kept, bytes) = (kept + 1, bytes + done.bytes);
                if old || kept > KEPT_JOBS || (kept > 1 && bytes > KEPT_BYTES) {
                    done.result = None;
                }
            }
        }
        for number in forgotten {
            jobs.remove(&number);
        }
        jobs
    }
}

/// Submits a job.
pub(crate) async fn img_gen(
    State(app): State<Arc<App>>,
    request: Body,
) -> Result<(StatusCode, Json<Value>), Failure> {
    let (request, format, warnings) = read(&app, request, |app, body| {
        let mut fields = Fields::parse(body)?;
        let mut request = app.defaults.clone();
        let warnings = apply(&mut fields, &mut request)?;
        app.has_files(&request)?;
        let quality = fields.small("output_compression", 0, 100)?.unwrap_or(100);
        let format = fields.choice("output_format", |name| Format::parse(name, quality))?;
        Ok((request, format.unwrap_or(Format::Png), [warnings, fields.unknown()].concat()))
    })
    .await?;
    let ticket = app.queue.submit(app.settled(request), format)?;
    let (number, created) = (ticket.id(), unix_time());
    app.jobs.at(created).insert(number, Job { ticket: number, created, cancelled: false, done: None });
    let jobs = app.clone();
    tokio::spawn(async move {
        let outcome = ticket.outcome().await;
        let now = unix_time();
        if let Some(job) = jobs.jobs.at(now).get_mut(&number) {
            job.done = Some(Done::new(outcome, job.cancelled, format, now));
        }
    });
    let id = id(number);
    let answer = json!({"id": id, "kind": "img_gen", "status": "queued", "created": created,
        "poll_url": format!("/sdcpp/v1/jobs/{id}"), "warnings": warnings});
    Ok((StatusCode::ACCEPTED, Json(answer)))
}

/// How a job is.
pub(crate) async fn job(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer {
    let number = number(&name)?;
    let jobs = app.jobs.at(unix_time());
    shown(&app, number, jobs.get(&number).ok_or_else(unknown)?)
}

/// Takes a job out of the queue, or stops it.
pub(crate) async fn cancel(State(app): State<Arc<App>>, Path(name): Path<String>) -> Answer {
    let number = number(&name)?;
    let mut jobs = app.jobs.at(unix_time());
    let job = jobs.get_mut(&number).ok_or_else(unknown)?;
    if job.done.is_none() {
        job.cancelled = true;
        app.queue.cancel(job.ticket);
    }
    shown(&app, number, job)
}

fn id(number: u64) -> String {
    format!("job_{number:08x}")
}

fn number(id: &str) -> Result<u64, Failure> {
    let hex = id.strip_prefix("job_").filter(|hex| hex.len() >= 8);
    hex.and_then(|hex| u64::from_str_radix(hex, 16).ok()).ok_or_else(unknown)
}

fn unknown() -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "job not found")
}

fn shown(app: &App, number: u64, job: &Job) -> Answer {
    let mut running = None;
    let (status, started, position) = match (&job.done, app.queue.place(job.ticket)) {
        (Some(done), _) => (done.status, done.started, 0),
        (None, _) if job.cancelled => ("cancelled", None, 0),
        (None, Place::Waiting(ahead)) => ("queued", None, ahead + 1),
        (None, Place::Running(now)) => ("generating", Some(running.insert(now).since), 0),
        // Between its end and its report a job still counts as running.
        (None, Place::Gone) => ("generating", None, 0),
    };
    let progress = running.as_ref().and_then(|now| now.progress).map(|p| {
        json!({"stage": p.stage.name(), "image": p.image, "images": p.images, "step": p.step, "steps": p.total})
    });
    let done = job.done.as_ref();
    if done.is_some_and(|done| done.status == "completed" && done.result.is_none()) {
        return Err(Failure::new(StatusCode::GONE, "job expired"));
    }
    Ok(Json(json!({
        "id": id(number),
        "kind": "img_gen",
        "status": status,
        "created": job.created,
        "started": started,
        "completed": done.map(|done| done.completed),
        "queue_position": position,
        "progress": progress,
        "preview": running.and_then(|now| now.preview).map(|file| base64(&file)),
        "result": done.and_then(|done| done.result.clone()),
        "error": done.map_or(Value::Null, |done| done.error.clone()),
    })))
}

impl Done {
    /// The report on an outcome; none means that the job never ran.
    fn new(outcome: Option<Outcome>, cancelled: bool, format: Format, completed: u64) -> Done {
        let failed = |code: &str, message: &str| json!({"code": code, "message": message});
        let started = outcome.as_ref().map(|outcome| outcome.started);
        let mut bytes = 0;
        let (status, result, error) = match &outcome {
            None if cancelled => ("cancelled", None, failed("cancelled", "job cancelled by client")),
            None => ("failed", None, failed("generation_failed", "the server is stopping")),
            Some(Outcome { error: Some(e), .. }) if e.is_cancelled() => {
                ("cancelled", None, failed("cancelled", "job cancelled by client"))
            }
            Some(Outcome { error: Some(e), .. }) => ("failed", None, failed("generation_failed", &e.to_string())),
            Some(Outcome { pictures, warnings, .. }) => {
                let image = |(index, picture): (usize, &Picture)| json!({"index": index, "b64_json": base64(&picture.bytes), "seed": picture.parameters.seed});
                let images: Vec<Value> = pictures.iter().enumerate().map(image).collect();
                // Four characters for three bytes.
                bytes = pictures.iter().map(|picture| picture.bytes.len().div_ceil(3) * 4).sum();
                let result = json!({"output_format": format.name(), "images": images, "warnings": warnings});
                ("completed", Some(result), Value::Null)
            }
        };
        Done { started, completed, status, result, bytes, error }
    }
}

/// Writes the fields of the schema over `request`, and returns warnings.
pub(crate) fn apply(fields: &mut Fields, request: &mut ImageRequest) -> Result<Vec<String>, Failure> {
    let whole = |side: Option<u32>| side.map(limits::whole_blocks);
    set(&mut request.prompt, fields.text("prompt")?);
    set(&mut request.negative_prompt, fields.text("negative_prompt")?);
    request.width = whole(fields.small("width", 1, limits::SIDE)?).or(request.width);
    request.height = whole(fields.small("height", 1, limits::SIDE)?).or(request.height);
    request.seed = fields.whole("seed", i64::MIN, i64::MAX)?.or(request.seed);
    request.batch_count = fields.small("batch_count", 1, limits::IMAGES)?.or(request.batch_count);
    let clip_skip = fields.whole("clip_skip", -1, 64)?.and_then(|n| i32::try_from(n).ok());
    request.clip_skip = clip_skip.or(request.clip_skip);
    let mut warnings = Vec::new();
    if let Some(mut sample) = fields.object("sample_params")? {
        request.steps = sample.small("sample_steps", 1, limits::STEPS)?.or(request.steps);
        request.eta = sample.not_negative("eta")?.or(request.eta);
        if let Some((sampler, scheduler)) = sample.choice("sample_method", named::sampler_or_default)?.flatten() {
            request.sampler = Some(sampler);
            request.scheduler = scheduler.or(request.scheduler);
        }
        request.scheduler = sample.choice("scheduler", named::scheduler)?.flatten().or(request.scheduler);
        if let Some(mut guidance) = sample.object("guidance")? {
            request.cfg_scale = guidance.not_negative("txt_cfg")?.or(request.cfg_scale);
            if let Some(mut layers) = guidance.object("slg")? {
                let mut slg = request.slg.take().unwrap_or_default();
                slg.scale = layers.number("scale")?.unwrap_or(slg.scale);
                slg.layers = layers.indices("layers", limits::LAYERS)?.unwrap_or(slg.layers);
                slg.start = layers.double("layer_start")?.unwrap_or(slg.start);
                slg.end = layers.double("layer_end")?.unwrap_or(slg.end);
                request.slg = Some(slg).filter(|slg| slg.scale != 0.0);
                warnings.extend(layers.unknown());
            }
            request.guidance = guidance.not_negative("distilled_guidance")?.or(request.guidance);
            request.image_cfg_scale = guidance.not_negative("img_cfg")?.or(request.image_cfg_scale);
            warnings.extend(guidance.unknown());
        }
        set(&mut request.extra_sample_args, sample.text("extra_sample_args")?);
        request.flow_shift = sample.not_negative("flow_shift")?.or(request.flow_shift);
        // An empty list and 0 leave the schedule as it is.
        let sigmas = sample.numbers("custom_sigmas", limits::STEPS as usize + 1)?;
        request.sigmas = sigmas.filter(|sigmas| !sigmas.is_empty()).or(request.sigmas.take());
        let shift = sample.small("shifted_timestep", 0, 1000)?;
        request.timestep_shift = shift.filter(|shift| *shift > 0).or(request.timestep_shift);
        warnings.extend(sample.unknown());
    }
    warnings.extend(loras(fields, request)?);
    let strength = fields.not_negative("strength")?;
    if let Some(image) = fields.picture("init_image")? {
        (request.init_image, request.strength) = (Some(image), strength.or(request.strength));
    }
    if let Some(image) = fields.picture("mask_image")? {
        request.mask = Some(InputMask::luma(&image, false));
    }
    control::native(fields, request)?;
    request.ref_images.extend(fields.pictures("ref_images")?);
    request.ref_resize = fields.flag("auto_resize_ref_image")?.or(request.ref_resize);
    if fields.flag("increase_ref_index")? == Some(true) {
        request.ref_index = ReferenceIndex::Increase;
    }
    warnings.extend(larger::apply(fields, request)?);
    cache(fields, request)?;
    fields.unsupported(UNSUPPORTED)?;
    fields.ignore(IGNORED);
    Ok(warnings)
}

/// Takes which steps are left out. `disabled` computes all, an empty mode leaves it to the server's own options.
fn cache(fields: &mut Fields, request: &mut ImageRequest) -> Result<(), Failure> {
    let mode = fields.choice("cache_mode", |mode| match mode {
        "disabled" => Ok(None),
        mode => sd_options::value::named::<CacheMode>(mode).map(Some),
    })?;
    let option = fields.text("cache_option")?;
    let mask = fields.choice("scm_mask", |text| sd_options::mask(text).map(|mask| mask.0))?;
    let dynamic = fields.flag("scm_policy_dynamic")?;
    if let Some(mode) = mode {
        request.cache = mode.map(StepCache::new);
    }
    if let Some(cache) = &mut request.cache {
        set(&mut cache.option, option.filter(|o| !o.is_empty()));
        cache.scm_mask = mask.unwrap_or(std::mem::take(&mut cache.scm_mask));
        cache.scm_static = dynamic.map_or(cache.scm_static, |dynamic| !dynamic);
    }
    Ok(())
}

/// Takes the list of LoRAs, which replaces the request's. Returns warnings.
pub(crate) fn loras(fields: &mut Fields, request: &mut ImageRequest) -> Result<Vec<String>, Failure> {
    let Some(list) = fields.objects("lora", limits::LORAS)? else { return Ok(Vec::new()) };
    let mut warnings = Vec::new();
    request.loras.clear();
    for mut item in list {
        let Some(name) = item.text("path")?.filter(|path| !path.is_empty()) else {
            return Err(Failure::bad("lora.path: want the path of a file below the folder of LoRAs"));
        };
        let strength = item.number("multiplier")?.unwrap_or(1.0);
        let high_noise = item.flag("is_high_noise")?.unwrap_or(false);
        item.ignore(&["name"]);
        warnings.extend(item.unknown());
        request.loras.push(LoraChoice { name, strength, high_noise });
    }
    Ok(warnings)
}

fn set(to: &mut String, text: Option<String>) {
    if let Some(text) = text {
        *to = text;
    }
}

/// Takes `<sd_cpp_extra_args>{…}</sd_cpp_extra_args>` out of the request's prompt and follows the first of them.
/// Returns warnings.
pub(crate) fn follow_prompt(request: &mut ImageRequest) -> Result<Vec<String>, Failure> {
    const BEGIN: &str = "<sd_cpp_extra_args>";
    const END: &str = "</sd_cpp_extra_args>";
    let given = std::mem::take(&mut request.prompt);
    if given.len() > limits::PROMPT {
        let (most, len) = (limits::PROMPT, given.len());
        return Err(Failure::bad(format!("prompt: want at most {most} bytes, got {len}")));
    }
    let (mut first, mut rest) = (None, given.as_str());
    while let Some((before, behind)) = rest.split_once(BEGIN) {
        let Some((block, after)) = behind.split_once(END).filter(|(block, _)| !block.contains('\n')) else { break };
        first.get_or_insert(block);
        request.prompt.push_str(before);
        rest = after;
    }
    request.prompt.push_str(rest);
    let Some(block) = first else { return Ok(Vec::new()) };
    let mut fields = Fields::parse_in("sd_cpp_extra_args", block.as_bytes(), picture_bytes(request) as u64 / 3)?;
    let warnings = apply(&mut fields, request)?;
    fields.ignore(&["output_format", "output_compression"]);
    Ok([warnings, fields.unknown()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_runtime::{SamplerKind, SchedulerKind, SkipLayers};

    #[test]
    fn the_schema() {
        let json = r#"{"prompt":"a","width":100,"seed":3,"batch_count":2,"clip_skip":-1,"strength":0.75,"lora":[],
            "init_image":null,"hires":{"enabled":false,"scale":2.0},"cache_mode":"disabled","odd":1,
            "sample_params":{"sample_steps":5,"sample_method":"euler","scheduler":"karras","guidance":{"txt_cfg":4,
            "slg":{"layers":[7],"scale":0}},"eta":null,"custom_sigmas":[]}}"#;
        let mut fields = Fields::parse(json.as_bytes()).unwrap();
        let mut r = ImageRequest::default();
        assert!(apply(&mut fields, &mut r).unwrap().is_empty());
        assert_eq!(fields.unknown(), ["odd: unknown, ignored"]);
        assert_eq!((r.prompt.as_str(), r.width, r.seed, r.batch_count), ("a", Some(104), Some(3), Some(2)));
        assert_eq!((r.steps, r.cfg_scale, r.clip_skip), (Some(5), Some(4.0), Some(-1)));
        assert_eq!((r.sampler, r.scheduler), (Some(SamplerKind::Euler), Some(SchedulerKind::Karras)));
        for (json, want) in [
            (r#"{"sample_params":{"sample_steps":0}}"#, "sample_params.sample_steps: "),
            (r#"{"sample_params":{"guidance":{"txt_cfg":"x"}}}"#, "sample_params.guidance.txt_cfg: "),
            (r#"{"hires":{"enabled":true,"steps":-1}}"#, "hires.steps: want a whole number"),
            (r#"{"cache_mode":"easy"}"#, "cache_mode: no \"easy\""),
            (r#"{"cache_mode":"dbcache","scm_mask":"1,2"}"#, "scm_mask: \"2\" is neither 1 nor 0"),
            (r#"{"lora":[{"multiplier":1}]}"#, "lora.path: want the path"),
            (r#"{"lora":[{"path":"x","multiplier":"y"}]}"#, "lora.multiplier: want a number, got a string"),
            (r#"{"lora":{"path":"x"}}"#, "lora: want a list of objects, got an object"),
        ] {
            let e = apply(&mut Fields::parse(json.as_bytes()).unwrap(), &mut r).unwrap_err();
            assert!(e.message().starts_with(want), "{json}: {}", e.message());
        }
    }

    #[test]
    fn schedules_and_skipped_layers() {
        let read = |sample: &str| {
            let mut r = ImageRequest::default();
            let json = format!(r#"{{"sample_params":{sample}}}"#);
            apply(&mut Fields::parse(json.as_bytes()).unwrap(), &mut r).map(|warnings| (r, warnings))
        };
        let (r, warnings) = read(
            r#"{"custom_sigmas":[14.6,3,0],"shifted_timestep":250,"guidance":{"slg":{"scale":2.5,"layers":[7,9],
            "layer_start":0.05,"layer_end":0.3,"odd":1}}}"#,
        )
        .unwrap();
        assert_eq!((r.sigmas, r.timestep_shift), (Some(vec![14.6, 3.0, 0.0]), Some(250)));
        assert_eq!(r.slg, Some(SkipLayers { scale: 2.5, layers: vec![7, 9], start: 0.05, end: 0.3 }));
        assert_eq!(warnings, ["sample_params.guidance.slg.odd: unknown, ignored"]);
        let off = r#"{"custom_sigmas":[],"shifted_timestep":0,"guidance":{"slg":{"layers":[7],"scale":0}}}"#;
        let (r, _) = read(off).unwrap();
        assert_eq!((r.sigmas, r.timestep_shift, r.slg), (None, None, None));
        let (r, _) = read(r#"{"guidance":{"slg":{"scale":1}}}"#).unwrap();
        assert_eq!(r.slg, Some(SkipLayers { scale: 1.0, ..SkipLayers::default() }));
        let many = format!(r#"{{"custom_sigmas":[{}0]}}"#, "1,".repeat(limits::STEPS as usize + 1));
        for (json, want) in [
            (many.as_str(), "sample_params.custom_sigmas: want a list of at most 151 numbers, got a list"),
            (
                r#"{"custom_sigmas":["x"]}"#,
                "sample_params.custom_sigmas: want a list of at most 151 numbers, got a s",
            ),
            (r#"{"shifted_timestep":1001}"#, "sample_params.shifted_timestep: want a whole number from 0 to 1000"),
            (
                r#"{"guidance":{"slg":{"layers":[-1]}}}"#,
                "sample_params.guidance.slg.layers: want a list of at most",
            ),
            (r#"{"guidance":{"slg":{"layer_end":"x"}}}"#, "sample_params.guidance.slg.layer_end: want a number"),
        ] {
            let e = read(json).unwrap_err();
            assert!(e.message().starts_with(want), "{json}: {}", e.message());
        }
    }

    #[test]
    fn caches() {
        let read = |json: &str, mut r: ImageRequest| {
            apply(&mut Fields::parse(json.as_bytes()).unwrap(), &mut r).unwrap();
            r.cache
        };
        let of = |mode| Some(StepCache::new(mode));
        let json = r#"{"cache_mode":"dbcache","cache_option":"Fn=4","scm_mask":"1,0","scm_policy_dynamic":false}"#;
        let want = StepCache {
            option: "Fn=4".into(),
            scm_mask: vec![true, false],
            scm_static: true,
            ..StepCache::new(CacheMode::DbCache)
        };
        assert_eq!(read(json, ImageRequest::default()), Some(want));
        let started = ImageRequest { cache: of(CacheMode::UCache), ..ImageRequest::default() };
        assert_eq!(read(r#"{"cache_mode":"","cache_option":""}"#, started.clone()), of(CacheMode::UCache));
        assert_eq!(read(r#"{"cache_mode":"disabled"}"#, started), None);
    }

    #[test]
    fn loras_replace_those_before() {
        let mut r = ImageRequest::default();
        let json = r#"{"lora":[{"path":"a/b.safetensors","multiplier":-0.5,"odd":1},{"path":"c"}]}"#;
        let warnings = apply(&mut Fields::parse(json.as_bytes()).unwrap(), &mut r).unwrap();
        let lora = |name: &str, strength| LoraChoice { name: name.into(), strength, high_noise: false };
        assert_eq!(
            (r.loras.clone(), warnings),
            (vec![lora("a/b.safetensors", -0.5), lora("c", 1.0)], vec!["lora.odd: unknown, ignored".to_owned()])
        );
        apply(&mut Fields::parse(br#"{"prompt":"a"}"#).unwrap(), &mut r).unwrap();
        assert_eq!(r.loras.len(), 2);
        let e = App::for_tests().has_files(&r).unwrap_err();
        assert_eq!(e.message(), "lora: a/b.safetensors: the server has no folder of LoRAs");
        apply(&mut Fields::parse(br#"{"lora":[]}"#).unwrap(), &mut r).unwrap();
        assert!(r.loras.is_empty());
    }

    #[test]
    fn arguments_in_the_prompt() {
        let mut r = ImageRequest {
            prompt: concat!(
                r#"a <sd_cpp_extra_args>{"seed":9}</sd_cpp_extra_args>cat"#,
                r#"<sd_cpp_extra_args>{"seed":1}</sd_cpp_extra_args>"#
            )
            .into(),
            ..Default::default()
        };
        follow_prompt(&mut r).unwrap();
        assert_eq!((r.prompt.as_str(), r.seed), ("a cat", Some(9)));
        r.prompt = "a <sd_cpp_extra_args>{</sd_cpp_extra_args>".into();
        assert!(follow_prompt(&mut r).unwrap_err().message().starts_with("sd_cpp_extra_args"));
        r.prompt = "a <sd_cpp_extra_args>{".into();
        follow_prompt(&mut r).unwrap();
        assert_eq!(r.prompt, "a <sd_cpp_extra_args>{");
        r.prompt = "a<sd_cpp_extra_args>{}</sd_cpp_extra_args>".repeat(1000);
        follow_prompt(&mut r).unwrap();
        assert_eq!(r.prompt, "a".repeat(1000));
        r.prompt = "a".repeat(limits::PROMPT + 1);
        assert_eq!(follow_prompt(&mut r).unwrap_err().message(), "prompt: want at most 65536 bytes, got 65537");
    }

    #[test]
    fn finished_jobs_expire() {
        let jobs = Jobs::default();
        let done = |completed| Done {
            started: None,
            completed,
            status: "completed",
            result: Some(json!(1)),
            bytes: 0,
            error: json!(null),
        };
        for number in 0..KEPT_JOBS as u64 + 1 {
            jobs.at(0).insert(number, Job { ticket: 0, created: 0, cancelled: false, done: Some(done(10)) });
        }
        let kept = |now| jobs.at(now).values().filter(|j| j.done.as_ref().unwrap().result.is_some()).count();
        assert_eq!((kept(10), jobs.at(10).len()), (KEPT_JOBS, KEPT_JOBS + 1));
        assert!(jobs.at(10).get(&0).unwrap().done.as_ref().unwrap().result.is_none(), "the oldest goes first");
        assert_eq!((kept(611), jobs.at(611).len()), (0, KEPT_JOBS + 1));
        assert_eq!(jobs.at(1211).len(), 0);
    }

    #[test]
    fn the_last_results_are_kept_within_a_size() {
        let jobs = Jobs::default();
        let add = |number, bytes, result| {
            let done = Done { started: None, completed: 10, status: "", result, bytes, error: json!(null) };
            jobs.at(10).insert(number, Job { ticket: 0, created: 0, cancelled: false, done: Some(done) });
        };
        let kept = || -> Vec<u64> {
            let has = |job: &Job| job.done.as_ref().unwrap().result.is_some();
            jobs.at(10).iter().filter(|(_, job)| has(job)).map(|(number, _)| *number).collect()
        };
        for number in 0..4 {
            add(number, KEPT_BYTES / 2, Some(json!(1)));
        }
        assert_eq!(kept(), [2, 3]);
        add(4, KEPT_BYTES + 1, Some(json!(1)));
        assert_eq!(kept(), [4], "the last, whatever it has");
        for number in 5..KEPT_IDS as u64 + 5 {
            add(number, 0, None);
        }
        let jobs = jobs.at(10);
        assert_eq!((jobs.len(), jobs.first_key_value().map(|(number, _)| *number)), (KEPT_IDS, Some(5)));
    }

    #[test]
    fn ids() {
        assert_eq!(number(&id(17)).unwrap(), 17);
        for wrong in ["", "job_", "job_1", "17", "job_zzzzzzzz", "job_ffffffffffffffffff"] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
    }
}
