//! What goes to stderr: log lines, and below them the progress of the running request.

use sd_runtime::{Progress, Stage};
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Cells of the bar.
const CELLS: usize = 50;
/// Without a terminal, progress is a line at most this often, and one at the end of a stage.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// A handle on stderr. Clones share the knowledge whether an unfinished bar stands in the last line.
#[derive(Clone, Default)]
pub(crate) struct Console {
    bar_open: Arc<Mutex<bool>>,
}

impl Console {
    /// Sends log events of `level` and above here.
    pub(crate) fn log(&self, level: LevelFilter, color: bool) {
        tracing_subscriber::fmt()
            .with_max_level(level)
            // Where stderr cannot be written, a complaint about that on stderr would end the program.
            .log_internal_errors(false)
            .with_ansi(color)
            .event_format(LogLine)
            .with_writer(self.clone())
            .init();
    }

    /// Replaces the bar in the last line with `text`; `open` keeps the line for the next call.
    pub(crate) fn show(&self, text: &str, open: bool) {
        let mut bar_open = self.bar_open.lock().unwrap_or_else(PoisonError::into_inner);
        let end = if open { "" } else { "\n" };
        // Nothing can be told to a user whose stderr is gone.
        let _ = write!(io::stderr(), "\r{text}\x1b[K{end}");
        *bar_open = open;
    }
}

impl<'a> MakeWriter<'a> for Console {
    type Writer = Console;

    fn make_writer(&'a self) -> Console {
        self.clone()
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut bar_open = self.bar_open.lock().unwrap_or_else(PoisonError::into_inner);
        let mut stderr = io::stderr();
        if std::mem::take(&mut *bar_open) {
            stderr.write_all(b"\r\x1b[K")?;
        }
        stderr.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// `[LEVEL  ] file.rs:NNNN - message`.
struct LogLine;

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let source = event.metadata();
        let (tag, color) = match *source.level() {
            Level::ERROR => ("ERROR", 31),
            Level::WARN => ("WARN", 35),
            Level::INFO => ("INFO", 34),
            Level::DEBUG => ("VERBOSE", 37),
            Level::TRACE => ("DEBUG", 37),
        };
        let path = source.file().unwrap_or_default();
        let file = path.rsplit(['/', '\\']).next().unwrap_or(path);
        let line = source.line().unwrap_or_default();
        if to.has_ansi_escapes() {
            write!(to, "\x1b[1;{color}m[{tag:<7}]\x1b[0m")?;
        } else {
            write!(to, "[{tag:<7}]")?;
        }
        write!(to, " {file}:{line:<4} - ")?;
        context.field_format().format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
}

/// Draws the progress of one request.
pub(crate) struct Bar {
    console: Console,
    terminal: bool,
    started: Instant,
    last_line: Instant,
}

impl Bar {
    /// A bar on `console`, or plain lines when stderr is no terminal.
    pub(crate) fn new(console: &Console) -> Bar {
        let now = Instant::now();
        Bar { console: console.clone(), terminal: io::stderr().is_terminal(), started: now, last_line: now }
    }

    /// Shows `progress`.
    pub(crate) fn update(&mut self, progress: Progress) {
        let now = Instant::now();
        if progress.step == 0 {
            (self.started, self.last_line) = (now, now);
        }
        let done = progress.step >= progress.total;
        let elapsed = now.duration_since(self.started);
        match progress.stage {
            Stage::Denoise | Stage::Upscale if self.terminal && progress.step > 0 => {
                self.console.show(&format!("  |{}| {}", cells(progress), describe(progress, elapsed)), !done);
            }
            Stage::Denoise | Stage::Upscale
                if progress.step > 0 && (done || now.duration_since(self.last_line) >= LINE_EVERY) =>
            {
                self.last_line = now;
                let line = format!("{} {}\n", progress.stage.name(), describe(progress, elapsed));
                let _ = self.console.write_all(line.as_bytes());
            }
            stage if self.terminal && !done => self.console.show(&format!("  {} ...", stage.name()), true),
            _ => {}
        }
    }
}

fn cells(progress: Progress) -> String {
    let filled = progress.step * CELLS / progress.total.max(1);
    let head = if filled < CELLS { ">" } else { "" };
    format!("{}{head:<1$}", "=".repeat(filled), CELLS - filled)
}

/// `3/20 - 1.25it/s, 0:14 left`, and which image of several.
fn describe(progress: Progress, elapsed: Duration) -> String {
    let Progress { step, total, image, images, .. } = progress;
    let each = elapsed.as_secs_f64() / step.max(1) as f64;
    let rate = if each < 1.0 { format!("{:.2}it/s", each.max(1e-9).recip()) } else { format!("{each:.2}s/it") };
    let which = if images > 1 { format!(", image {}/{images}", image + 1) } else { String::new() };
    if step >= total {
        return format!("{step}/{total} - {rate}{which}");
    }
    let left = (each * total.saturating_sub(step) as f64).round() as u64;
    format!("{step}/{total} - {rate}, {}:{:02} left{which}", left / 60, left % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(step: usize, images: usize) -> Progress {
        Progress { stage: Stage::Denoise, step, total: 20, image: 1, images }
    }

    #[test]
    fn rate_and_time_left() {
        for (step, images, seconds, want) in [
            (5, 1, 4, "5/20 - 1.25it/s, 0:12 left"),
            (5, 3, 400, "5/20 - 80.00s/it, 20:00 left, image 2/3"),
            (20, 1, 4, "20/20 - 5.00it/s"),
        ] {
            assert_eq!(describe(at(step, images), Duration::from_secs(seconds)), want);
        }
    }

    #[test]
    fn the_bar_keeps_its_width() {
        assert_eq!(cells(at(1, 1)), format!("=={:<48}", ">"));
        assert_eq!(cells(at(20, 1)), "=".repeat(50));
        for step in 0..=20 {
            assert_eq!(cells(at(step, 1)).len(), CELLS);
        }
    }
}
