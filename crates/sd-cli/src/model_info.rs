//! `--model-info`: what the given files hold, on stdout.

use crate::args::Args;
use anyhow::{Context, Result, bail};
use sd_runtime::{FileKind, Survey, SurveyedFile, SurveyedPart};
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

/// Prints what is in `file` and in the files that `args` name.
pub(crate) fn run(args: &Args, file: Option<&Path>) -> Result<()> {
    let mut files = args.model.files();
    if let Some(file) = file
        && files.model.replace(file.to_owned()).is_some()
    {
        bail!("--model-info {}: there is a --model besides", file.display());
    }
    if files.is_empty() {
        bail!("--model-info: want a file, after it or with --model or an option of a part");
    }
    let text = describe(&files.survey().context("--model-info")?);
    io::stdout().lock().write_all(text.as_bytes()).context("--model-info")
}

fn describe(survey: &Survey) -> String {
    let mut out = String::new();
    survey.files.iter().for_each(|f| file(&mut out, f));
    if !survey.parts.is_empty() {
        line(&mut out, "parts", "");
    }
    survey.parts.iter().for_each(|p| part(&mut out, p));
    for p in &survey.missing {
        line(&mut out, "missing", &format!("{}; give it with {}", p.name(), p.option()));
    }
    if survey.family.is_none() && !survey.parts.is_empty() && !survey.files.iter().any(is_network) {
        line(&mut out, "missing", "a diffusion network; give one with --model or --diffusion-model");
    }
    if let Some(problem) = &survey.problem {
        line(&mut out, "problem", &problem.to_string());
    }
    if let Some(d) = &survey.defaults {
        let [w, h] = d.size;
        let guidance = survey.info.as_ref().filter(|i| i.guidance);
        let guidance = guidance.map(|_| format!(", guidance {}", d.guidance)).unwrap_or_default();
        let (steps, cfg, sampler, schedule, skip) = (d.steps, d.cfg, d.sampler, d.schedule, d.clip_skip);
        let text =
            format!("{w}x{h} pixels, {steps} steps, cfg {cfg}{guidance}, {sampler}, {schedule}, clip skip {skip}");
        line(&mut out, "defaults", &text);
    }
    if let Some(i) = &survey.info {
        let prediction = i.prediction.map_or("found out by a try".to_owned(), |p| format!("{p:?}").to_lowercase());
        let text = format!(
            "multiples of {} pixels; latents of {} channels, {2}x{2} pixels each; predicts: {prediction}",
            i.size_multiple, i.latent.channels, i.latent.compression
        );
        line(&mut out, "sizes", &text);
    }
    for u in &survey.unused {
        let text = format!("{} tensors of {}, such as {} ({})", u.count, u.group, u.example, u.file.display());
        line(&mut out, "unused", &text);
    }
    out
}

fn is_network(file: &SurveyedFile) -> bool {
    !matches!(file.kind, FileKind::Parts | FileKind::Unknown)
}

fn line(out: &mut String, what: &str, text: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "{}", format!("{what:<10}{text}").trim_end());
}

fn file(out: &mut String, f: &SurveyedFile) {
    let given = f.given_as.map(|part| format!(", given with {}", part.option())).unwrap_or_default();
    let format = format!("{:?}", f.format).to_lowercase();
    line(out, "file", &format!("{} ({format}, {} tensors{given})", f.path.display(), f.tensors));
    line(out, "is", &f.what());
    for (i, tensor) in f.evidence.iter().enumerate() {
        line(out, if i == 0 { "by" } else { "" }, tensor);
    }
}

fn part(out: &mut String, p: &SurveyedPart) {
    let stored = p.stored.iter().map(|(dtype, (count, bytes))| format!("{count} {dtype} {}", size(*bytes)));
    let stored = stored.collect::<Vec<_>>().join(", ");
    let millions = p.parameters as f64 / 1e6;
    let text = format!("{}: {} tensors, {millions:.1} million parameters: {stored}", p.part.name(), p.tensors);
    line(out, "", &text);
    if !p.sizes.is_empty() {
        let sizes: Vec<String> = p.sizes.iter().map(|(what, n)| format!("{n} {what}")).collect();
        line(out, "", &format!("  {}", sizes.join(", ")));
    }
    line(out, "", &format!("  in {}", p.file.display()));
    if let Some(problem) = &p.problem {
        line(out, "", &format!("  problem: {problem}"));
    }
}

fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    if bytes >= 1e9 { format!("{:.2} GB", bytes / 1e9) } else { format!("{:.2} MB", bytes / 1e6) }
}
