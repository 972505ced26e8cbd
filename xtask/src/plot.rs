//! A trace of the option `--trace` as a picture: what each device holds over time, what it computes and what moves.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 34.0;
/// Heights of a curve, of a row, and of the space below a device.
const CURVE: f64 = 150.0;
const ROW: f64 = 16.0;
const GAP: f64 = 46.0;
/// For modules, in the order in which they come.
const COLOURS: [&str; 6] = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"];
/// What moves, with its colour.
const MOVES: [(&str, &str); 3] = [("load", "#cc3311"), ("prefetch", "#009988"), ("evict", "#bbbbbb")];

/// What happened on one device.
#[derive(Default)]
struct Device {
    name: String,
    /// Microseconds and bytes.
    levels: Vec<(f64, f64)>,
    events: Vec<Event>,
}

/// Something that takes time, in microseconds.
struct Event {
    kind: String,
    module: String,
    start: f64,
    duration: f64,
}

/// The SVG of a trace.
///
/// # Errors
/// `trace` is not what `--trace` writes, or nothing happened in it.
pub fn svg(trace: &str) -> Result<String> {
    let devices = devices(trace)?;
    let ends = devices.values().flat_map(|d| d.levels.iter().map(|l| l.0));
    let end = ends.fold(0.0, f64::max);
    ensure!(end > 0.0, "the trace has no events");
    let mut modules: Vec<&str> = Vec::new();
    for event in devices.values().flat_map(|d| &d.events).filter(|e| e.kind == "compute") {
        if !modules.contains(&event.module.as_str()) {
            modules.push(&event.module);
        }
    }
    let x = |micros: f64| LEFT + (WIDTH - LEFT - RIGHT) * micros / end;
    let height = TOP + devices.len() as f64 * (CURVE + 2.0 * ROW + GAP);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let colour = |module: &str| {
        let number = modules.iter().position(|m| *m == module).unwrap_or(0);
        COLOURS.get(number % COLOURS.len()).copied().unwrap_or("black")
    };
    let keys = modules.iter().map(|m| (*m, colour(m))).chain(MOVES.iter().copied());
    let mut at = LEFT;
    for (name, fill) in keys {
        rect(&mut out, [at, 10.0, 12.0, 12.0], fill)?;
        text(&mut out, at + 16.0, 20.0, "start", name)?;
        at += 34.0 + 7.0 * name.chars().count() as f64;
    }
    for (i, device) in devices.values().enumerate() {
        let top = TOP + i as f64 * (CURVE + 2.0 * ROW + GAP);
        let most = device.levels.iter().map(|l| l.1).fold(1.0, f64::max);
        let y = |bytes: f64| top + CURVE * (1.0 - bytes / most);
        text(&mut out, LEFT - 6.0, top + 12.0, "end", &format!("{:.0} MiB", most / f64::from(1 << 20)))?;
        text(&mut out, LEFT - 6.0, top + CURVE, "end", "0")?;
        text(&mut out, LEFT - 6.0, top + CURVE / 2.0, "end", &device.name)?;
        let mut path = format!("M{:.1} {:.1}", x(0.0), y(0.0));
        for (time, bytes) in &device.levels {
            write!(path, "H{:.1}V{:.1}", x(*time), y(*bytes))?;
        }
        writeln!(out, "<path d=\"{path}V{:.1}Z\" fill=\"#dddddd\" stroke=\"#555555\"/>", y(0.0))?;
        for (row, name) in ["compute", "move"].into_iter().enumerate() {
            text(&mut out, LEFT - 6.0, top + CURVE + (row as f64 + 1.0) * ROW, "end", name)?;
        }
        for event in &device.events {
            let fill = match MOVES.iter().find(|m| m.0 == event.kind) {
                Some(moves) => moves.1,
                None if event.kind == "compute" => colour(&event.module),
                None => continue,
            };
            let row = if event.kind == "compute" { 0.0 } else { ROW };
            let (from, to) = (x(event.start), x(event.start + event.duration));
            rect(&mut out, [from, top + CURVE + 4.0 + row, (to - from).max(0.4), ROW - 3.0], fill)?;
        }
        for tick in 0..=4 {
            let micros = end * f64::from(tick) / 4.0;
            let anchor =
                ["start", "middle", "middle", "middle", "end"].get(tick as usize).copied().unwrap_or("middle");
            text(&mut out, x(micros), top + CURVE + 2.0 * ROW + 18.0, anchor, &format!("{:.1} s", micros / 1e6))?;
        }
    }
    out.push_str("</svg>\n");
    Ok(out)
}

/// Devices by their numbers in the trace.
fn devices(trace: &str) -> Result<BTreeMap<u64, Device>> {
    let trace: Value = serde_json::from_str(trace).context("no trace")?;
    let mut devices: BTreeMap<u64, Device> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().context("the trace has no traceEvents")? {
        let word = |of: &Value| of.as_str().unwrap_or_default().to_owned();
        let number = |key: &str| event[key].as_f64().unwrap_or(0.0);
        let device = devices.entry(event["pid"].as_u64().unwrap_or(0)).or_default();
        match (event["ph"].as_str(), event["name"].as_str()) {
            (Some("M"), Some("process_name")) => device.name = word(&event["args"]["name"]),
            (Some("C"), Some("memory")) => {
                device.levels.push((number("ts"), event["args"]["bytes"].as_f64().unwrap_or(0.0)));
            }
            (Some("X"), _) => device.events.push(Event {
                kind: word(&event["cat"]),
                module: word(&event["args"]["module"]),
                start: number("ts"),
                duration: number("dur"),
            }),
            _ => {}
        }
    }
    Ok(devices)
}

fn rect(out: &mut String, [x, y, width, height]: [f64; 4], fill: &str) -> Result<()> {
    Ok(writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"/>"
    )?)
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) -> Result<()> {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    Ok(writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second of loading and a second of computing: where they end is known.
    #[test]
    fn what_happens_is_where_it_belongs() {
        let trace = r#"{"traceEvents":[
            {"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"GPU<0>"}},
            {"ph":"X","cat":"load","name":"load a","pid":0,"tid":1,"ts":0,"dur":1000000,"args":{"module":"a","bytes":1048576}},
            {"ph":"C","name":"memory","pid":0,"tid":0,"ts":1000000,"args":{"bytes":1048576}},
            {"ph":"X","cat":"compute","name":"compute a","pid":0,"tid":0,"ts":1000000,"dur":1000000,"args":{"module":"a","bytes":0}},
            {"ph":"C","name":"memory","pid":0,"tid":0,"ts":2000000,"args":{"bytes":1048576}}]}"#;
        let svg = svg(trace).unwrap();
        let middle = LEFT + (WIDTH - LEFT - RIGHT) / 2.0;
        let half = (WIDTH - LEFT - RIGHT) / 2.0;
        assert!(svg.contains("GPU&lt;0>") && svg.contains(">1 MiB<") && svg.contains(">2.0 s<"), "{svg}");
        let bar = |x: f64, row: f64, fill: &str| {
            let y = TOP + CURVE + 4.0 + row;
            format!("<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{half:.1}\" height=\"13.0\" fill=\"{fill}\"/>")
        };
        assert!(svg.contains(&bar(LEFT, ROW, "#cc3311")) && svg.contains(&bar(middle, 0.0, COLOURS[0])), "{svg}");
        assert!(svg.contains(&format!("M{LEFT:.1} {:.1}H{middle:.1}V{TOP:.1}", TOP + CURVE)), "{svg}");
        assert!(super::svg(r#"{"traceEvents":[]}"#).is_err() && super::svg("x").is_err());
    }
}
