//! OpenAI's image API: `GET /v1/models`, `POST /v1/images/generations`.

use crate::app::{Answer, App, base64, read, unix_time};
use crate::failure::Failure;
use crate::fields::{Fields, shortened};
use crate::limits;
use crate::queue::{Format, Picture};
use crate::{named, native};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use sd_runtime::ImageRequest;
use serde_json::{Value, json};
use std::sync::Arc;

/// The one model there is.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let model = json!({"id": app.model.name, "object": "model", "created": 0, "owned_by": "sd-rs"});
    Json(json!({"object": "list", "data": [model]}))
}

/// Pictures from a prompt.
pub(crate) async fn generations(State(app): State<Arc<App>>, request: Body) -> Answer {
    let (asked, mut warnings) = read(&app, request, |app, body| {
        let mut fields = Fields::parse(body)?;
        let mut asked = Asked::read(&mut fields, &app.defaults)?;
        let mut warnings = fields.unknown();
        warnings.extend(native::follow_prompt(&mut asked.request)?);
        Ok((asked, warnings))
    })
    .await?;
    let outcome = app.generate(asked.request, asked.format, &mut warnings).await?;
    let first = outcome.pictures.first().map(|p| &p.parameters);
    let size = first.map(|p| format!("{}x{}", p.width, p.height));
    let picture = |picture: &Picture| {
        let text = base64(&picture.bytes);
        let seed = picture.parameters.seed;
        if asked.url {
            json!({"url": format!("data:image/{};base64,{text}", asked.format.name()), "seed": seed})
        } else {
            json!({"b64_json": text, "seed": seed})
        }
    };
    let data: Vec<Value> = outcome.pictures.iter().map(picture).collect();
    Ok(Json(json!({
        "created": unix_time(),
        "data": data,
        "output_format": asked.format.name(),
        "size": size,
        "warnings": warnings,
    })))
}

/// What a client wants.
#[derive(Debug)]
struct Asked {
    request: ImageRequest,
    format: Format,
    /// As data URLs instead of plain base64.
    url: bool,
}

impl Asked {
    fn read(fields: &mut Fields, defaults: &ImageRequest) -> Result<Asked, Failure> {
        let mut request = defaults.clone();
        request.prompt = fields.text("prompt")?.unwrap_or_default();
        if request.prompt.trim().is_empty() {
            return Err(Failure::bad("prompt: want a text that says what to draw"));
        }
        request.batch_count = Some(fields.small("n", 1, limits::IMAGES)?.unwrap_or(1));
        if let Some((width, height)) = fields.choice("size", size)?.flatten() {
            (request.width, request.height) = (Some(width), Some(height));
        }
        // Fields that the API lacks but its clients can send.
        request.negative_prompt = fields.text("negative_prompt")?.unwrap_or(request.negative_prompt);
        request.seed = fields.whole("seed", i64::MIN, i64::MAX)?.or(request.seed);
        request.steps = fields.small("steps", 1, limits::STEPS)?.or(request.steps);
        request.cfg_scale = fields.not_negative("cfg_scale")?.or(request.cfg_scale);
        if let Some((sampler, scheduler)) = fields.choice("sampler", named::sampler)? {
            request.sampler = Some(sampler);
            request.scheduler = scheduler.or(request.scheduler);
        }
        request.scheduler = fields.choice("scheduler", named::scheduler)?.flatten().or(request.scheduler);
        let quality = fields.small("output_compression", 0, 100)?.unwrap_or(100);
        let format = fields.choice("output_format", |name| Format::parse(name, quality))?;
        let url = fields.choice("response_format", |name| match name {
            "b64_json" => Ok(false),
            "url" => Ok(true),
            other => Err(format!("want b64_json or url, got {:?}", shortened(other))),
        })?;
        fields.choice("background", |name| match name {
            "auto" | "opaque" => Ok(()),
            other => Err(format!("want auto or opaque, got {:?}", shortened(other))),
        })?;
        fields.unsupported(&["stream", "partial_images"])?;
        // There is one model, and no service to choose a quality or a moderation.
        fields.ignore(&["model", "quality", "style", "user", "moderation"]);
        Ok(Asked { request, format: format.unwrap_or(Format::Png), url: url.unwrap_or(false) })
    }
}

/// `WIDTHxHEIGHT`, or `auto` for the default.
fn size(text: &str) -> Result<Option<(u32, u32)>, String> {
    if text == "auto" {
        return Ok(None);
    }
    let side = |text: &str| text.parse().ok().filter(|side| (1..=limits::SIDE).contains(side));
    let sides = text.split_once(['x', 'X']).and_then(|(w, h)| Some((side(w.trim())?, side(h.trim())?)));
    let want = || format!("want WIDTHxHEIGHT with sides from 1 to {}, got {:?}", limits::SIDE, shortened(text));
    let (width, height) = sides.ok_or_else(want)?;
    Ok(Some((limits::whole_blocks(width), limits::whole_blocks(height))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sd_runtime::{SamplerKind, SchedulerKind};

    fn read(json: &str) -> Result<Asked, Failure> {
        Asked::read(&mut Fields::parse(json.as_bytes()).unwrap(), &ImageRequest::default())
    }

    #[test]
    fn fields_become_a_request() {
        let asked = read(
            r#"{"model":"dall-e-3","prompt":"a cat","n":2,"size":"100x64","quality":"hd","output_format":"jpeg",
                "output_compression":70,"response_format":"url","seed":5,"sampler":"euler","scheduler":"karras"}"#,
        )
        .unwrap();
        let r = &asked.request;
        assert_eq!((r.prompt.as_str(), r.batch_count, r.width, r.height), ("a cat", Some(2), Some(104), Some(64)));
        assert_eq!((r.seed, asked.format, asked.url), (Some(5), Format::Jpeg(70), true));
        assert_eq!((r.sampler, r.scheduler), (Some(SamplerKind::Euler), Some(SchedulerKind::Karras)));
        let asked = read(r#"{"prompt":"a","size":"auto","stream":false,"n":null}"#).unwrap();
        assert_eq!((asked.request.width, asked.format, asked.url), (None, Format::Png, false));
    }

    #[test]
    fn wrong_fields_are_named() {
        for (json, want) in [
            ("{}", "prompt: "),
            (r#"{"prompt":" "}"#, "prompt: "),
            (r#"{"prompt":["a"]}"#, "prompt: want a string, got a list"),
            (r#"{"prompt":"a","n":0}"#, "n: want a whole number from 1 to 8, got 0"),
            (r#"{"prompt":"a","n":9}"#, "n: "),
            (r#"{"prompt":"a","size":"512"}"#, "size: want WIDTHxHEIGHT"),
            (r#"{"prompt":"a","size":"0x8"}"#, "size: "),
            (r#"{"prompt":"a","size":"-8x8"}"#, "size: "),
            (r#"{"prompt":"a","size":"99999999999x8"}"#, "size: "),
            (r#"{"prompt":"a","output_format":"tiff"}"#, "output_format: want png, jpeg or webp, got \"tiff\""),
            (r#"{"prompt":"a","output_compression":101}"#, "output_compression: "),
            (r#"{"prompt":"a","response_format":"x"}"#, "response_format: "),
            (r#"{"prompt":"a","background":"transparent"}"#, "background: "),
            (r#"{"prompt":"a","stream":true}"#, "stream: not supported yet"),
            (r#"{"prompt":"a","seed":1.5}"#, "seed: want a whole number, got 1.5"),
        ] {
            let e = read(json).unwrap_err();
            assert!(e.message().starts_with(want), "{json}: {}", e.message());
        }
    }
}
