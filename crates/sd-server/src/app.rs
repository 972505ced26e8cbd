//! What handlers share, and which path each answers.

use crate::failure::Failure;
use crate::fields::shortened;
use crate::native::Jobs;
use crate::queue::{Format, Outcome, Queue};
use crate::{control, limits, native, openai, page, webui};
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue,
};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use sd_runtime::{ImageRequest, LoraChoice, ModelInfo};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a handler returns.
pub(crate) type Answer = Result<Json<Value>, Failure>;

/// The state of the server.
pub(crate) struct App {
    pub(crate) queue: Arc<Queue>,
    pub(crate) jobs: Jobs,
    pub(crate) model: ModelInfo,
    /// What requests start from.
    pub(crate) defaults: ImageRequest,
    /// A page instead of the built-in one.
    pub(crate) page: Option<PathBuf>,
    /// The folder of LoRAs.
    pub(crate) loras: Option<PathBuf>,
    /// The folder of ControlNets.
    pub(crate) control_nets: Option<PathBuf>,
    /// Held while a body is read into a request: before its size is known a picture may take a gigabyte.
    pub(crate) reading: Arc<tokio::sync::Mutex<()>>,
}

impl App {
    /// Draws, and gives up when the handler is dropped because its client went away. Warnings are appended.
    pub(crate) async fn generate(
        &self,
        request: ImageRequest,
        format: Format,
        warnings: &mut Vec<String>,
    ) -> Result<Outcome, Failure> {
        let ticket = self.queue.submit(self.settled(request), format)?;
        let mut outcome = ticket.outcome().await.ok_or_else(Failure::stopping)?;
        match &outcome.error {
            // Who interrupts a request wants what is there.
            Some(e) if e.is_cancelled() && !outcome.pictures.is_empty() => {
                warnings.push("interrupted: not all pictures were drawn".to_owned());
            }
            Some(e) => return Err(Failure::from(e)),
            None => {}
        }
        warnings.append(&mut outcome.warnings);
        Ok(outcome)
    }

    /// A request whose control picture goes to the network itself where there is no ControlNet.
    pub(crate) fn settled(&self, mut request: ImageRequest) -> ImageRequest {
        if self.model.control_nets.is_empty()
            && let [control] = request.controls.as_slice()
            && control.net.is_none()
        {
            (request.control_image, request.canny) = (Some(control.image.clone()), control.canny);
            request.controls.clear();
        }
        request
    }

    /// Nothing if every LoRA and every ControlNet that the request lists is there.
    pub(crate) fn has_files(&self, request: &ImageRequest) -> Result<(), Failure> {
        let named = request.controls.iter().filter_map(|c| c.net.as_ref());
        for net in named.filter(|net| !self.model.control_nets.contains(net)) {
            // The engine tells which there are where there is no folder.
            let Some(folder) = &self.control_nets else { continue };
            sd_runtime::find_control_net(folder, net).map_err(|e| Failure::from(&e))?;
        }
        let Some(first) = request.loras.first() else { return Ok(()) };
        let Some(folder) = &self.loras else {
            return Err(Failure::bad(format!(
                "lora: {}: the server has no folder of LoRAs",
                shortened(&first.name)
            )));
        };
        let found = |lora: &LoraChoice| sd_runtime::find_lora(folder, &lora.name, false);
        request.loras.iter().try_for_each(|lora| found(lora).map(drop)).map_err(|e| Failure::from(&e))
    }

    /// Name and path of every LoRA, by path.
    pub(crate) fn list_loras(&self) -> Vec<Value> {
        let Some(folder) = self.loras.as_deref() else { return Vec::new() };
        let item = |path: String| {
            let name = sd_runtime::name_of_lora(folder, &path);
            json!({"name": name, "alias": name, "path": path, "metadata": {}})
        };
        sd_runtime::list_loras(folder).into_iter().map(item).collect()
    }

    /// The names that requests may give ControlNets by.
    pub(crate) fn list_control_nets(&self) -> Vec<String> {
        let mut names = self.model.control_nets.clone();
        names.extend(self.control_nets.iter().flat_map(|folder| sd_runtime::list_control_nets(folder)));
        names
    }

    /// Nothing if `name` is the model's, as lists of models spell it.
    pub(crate) fn is_model(&self, name: &str) -> Result<(), String> {
        if is_named(&self.model.name, name) {
            return Ok(());
        }
        Err(format!(
            "the server has one model, {:?}; start it with another --model to change that",
            self.model.name
        ))
    }

    /// Nothing if `name` is the refiner's.
    pub(crate) fn is_refiner(&self, name: &str) -> Result<(), String> {
        match &self.model.refiner {
            Some(refiner) if is_named(refiner, name) => Ok(()),
            Some(refiner) => Err(format!("the server's refiner is {refiner:?}")),
            None => Err("the server has no refiner; start it with --refiner".into()),
        }
    }
}

/// Whether a client's `name` is that of a file, with or without its extension.
fn is_named(file: &str, name: &str) -> bool {
    [name, name.rsplit_once('.').map_or(name, |(stem, _)| stem)].contains(&file)
}

/// Every path.
pub(crate) fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page::page))
        .route("/health", get(health))
        .route("/v1/models", get(openai::models))
        .route("/v1/images/generations", post(openai::generations))
        .route("/sdapi/v1/txt2img", post(webui::txt2img))
        .route("/sdapi/v1/img2img", post(webui::img2img))
        .route("/sdapi/v1/extra-single-image", post(webui::extra_single_image))
        .route("/sdapi/v1/progress", get(webui::progress))
        .route("/sdapi/v1/interrupt", post(webui::interrupt))
        .route("/sdapi/v1/samplers", get(webui::samplers))
        .route("/sdapi/v1/schedulers", get(webui::schedulers))
        .route("/sdapi/v1/upscalers", get(webui::upscalers))
        .route("/sdapi/v1/latent-upscale-modes", get(webui::latent_upscalers))
        .route("/sdapi/v1/sd-models", get(webui::models))
        .route("/sdapi/v1/loras", get(webui::loras))
        .route("/controlnet/model_list", get(control::models))
        .route("/controlnet/module_list", get(control::modules))
        .route("/sdapi/v1/options", get(webui::options).post(webui::set_options))
        .route("/sdcpp/v1/capabilities", get(capabilities))
        .route("/sdcpp/v1/img_gen", post(native::img_gen))
        .route("/sdcpp/v1/jobs/{id}", get(native::job))
        .route("/sdcpp/v1/jobs/{id}/cancel", post(native::cancel))
        .fallback(not_found)
        .method_not_allowed_fallback(not_found)
        .layer(from_fn(cross_origin))
        .with_state(app)
}

async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

async fn not_found() -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "not found")
}

/// The model, what requests start from, and limits.
async fn capabilities(State(app): State<Arc<App>>) -> Json<Value> {
    let (model, request) = (&app.model, &app.defaults);
    let d = &model.defaults;
    let defaults = json!({
        "width": request.width.unwrap_or(d.width),
        "height": request.height.unwrap_or(d.height),
        "seed": request.seed,
        "batch_count": 1,
        "sample_params": {
            "sample_steps": request.steps.unwrap_or(d.steps),
            "sample_method": request.sampler.unwrap_or(d.sampler).name(),
            "scheduler": request.scheduler.unwrap_or(d.scheduler).name(),
            "guidance": {"txt_cfg": request.cfg_scale.unwrap_or(d.cfg_scale)},
        },
    });
    Json(json!({
        "model": {"name": model.name, "stem": model.name, "family": model.family, "device": model.device},
        "supported_modes": ["img_gen"],
        "current_mode": "img_gen",
        "defaults": defaults,
        "output_formats": ["png", "jpeg", "webp"],
        "samplers": sd_runtime::SamplerKind::names().collect::<Vec<_>>(),
        "schedulers": sd_runtime::SchedulerKind::names().collect::<Vec<_>>(),
        "loras": app.list_loras(),
        "control_nets": app.list_control_nets(),
        "upscalers": sd_runtime::HiresUpscaler::names().collect::<Vec<_>>(),
        "limits": {
            "min_width": 8, "max_width": limits::SIDE, "min_height": 8, "max_height": limits::SIDE,
            "max_batch_count": limits::IMAGES, "max_queue_size": crate::queue::MAX_QUEUE,
        },
    }))
}

/// Lets pages of other origins use the server, which has no secrets, and answers their preflights.
async fn cross_origin(request: Request, next: Next) -> Response {
    let mut response = if request.method() == Method::OPTIONS {
        StatusCode::NO_CONTENT.into_response()
    } else {
        next.run(request).await
    };
    for header in [ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_HEADERS] {
        response.headers_mut().insert(header, HeaderValue::from_static("*"));
    }
    response
}

/// What `read` makes of a body, beside the threads that serve connections. Nothing is read for a full queue.
pub(crate) async fn read<T: Send + 'static>(
    app: &Arc<App>,
    request: Body,
    read: impl FnOnce(&App, &[u8]) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    app.queue.takes(0)?;
    let body = body(request).await?;
    let turn = app.reading.clone().lock_owned().await;
    app.queue.takes(0)?;
    let app = app.clone();
    let reading = tokio::task::spawn_blocking(move || {
        let result = read(&app, &body);
        drop(turn);
        result
    });
    let broken = |_| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be read");
    reading.await.map_err(broken)?
}

/// A whole body, held to a size and a time.
pub(crate) async fn body(body: Body) -> Result<Bytes, Failure> {
    match tokio::time::timeout(limits::BODY_TIME, to_bytes(body, limits::BODY)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(e)) => {
            let text = format!("the body cannot be read, or has more than {} bytes: {e}", limits::BODY);
            Err(Failure::new(StatusCode::PAYLOAD_TOO_LARGE, text))
        }
        Err(_) => Err(Failure::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
}

/// A file as JSON can hold it.
pub(crate) fn base64(bytes: &[u8]) -> String {
    base64::prelude::BASE64_STANDARD.encode(bytes)
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
impl App {
    /// A server without a worker.
    pub(crate) fn for_tests() -> App {
        let defaults = sd_runtime::Defaults {
            width: 128,
            height: 128,
            steps: 20,
            cfg_scale: 5.0,
            guidance: None,
            sampler: sd_runtime::SamplerKind::EulerA,
            scheduler: sd_runtime::SchedulerKind::Discrete,
            clip_skip: 1,
        };
        let model = ModelInfo {
            name: "demo".into(),
            family: "SD 1.x",
            device: "CPU".into(),
            defaults,
            unused: Vec::new(),
            refiner: None,
            control_nets: Vec::new(),
        };
        App {
            queue: Arc::default(),
            jobs: Jobs::default(),
            model,
            defaults: ImageRequest::default(),
            page: None,
            loras: None,
            control_nets: None,
            reading: Arc::default(),
        }
    }
}
