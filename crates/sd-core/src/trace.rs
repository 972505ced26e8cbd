//! A record of what runners do when, for people and for viewers such as Perfetto.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// Weights were loaded because a segment waited for them.
    Load,
    /// Weights were loaded for a later segment.
    Prefetch,
    /// Weights were let go.
    Evict,
    /// A segment was computed.
    Compute,
    /// Memory for values was allocated.
    Workspace,
    /// Cuts were chosen for a program, and it was lowered.
    Plan,
}

impl EventKind {
    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Load => "load",
            EventKind::Prefetch => "prefetch",
            EventKind::Evict => "evict",
            EventKind::Compute => "compute",
            EventKind::Workspace => "workspace",
            EventKind::Plan => "plan",
        }
    }
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub kind: EventKind,
    /// The network, as its runner was told.
    pub module: Arc<str>,
    /// The segment, or the module of the network that the weights belong to; empty for the whole network.
    pub segment: Arc<str>,
    /// The device.
    pub device: Arc<str>,
    /// Bytes of device memory that were loaded, let go or allocated; for a computation, those of its workspace.
    pub bytes: usize,
    /// When it began, since the trace began.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// What runners had on the device afterwards, in bytes.
    pub level: usize,
}

/// A recorder of events. Give it to [`ManagerOptions`](crate::ManagerOptions) and ask it later.
#[derive(Debug)]
pub struct Trace {
    began: Instant,
    events: Mutex<Vec<Event>>,
}

impl Trace {
    /// An empty trace that begins now.
    pub fn new() -> Arc<Trace> {
        Arc::new(Trace { began: Instant::now(), events: Mutex::default() })
    }

    /// What happened so far, in the order in which it ended.
    pub fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes an event that began at `started` and has just ended; `event` gets its start and duration.
    pub(crate) fn note(&self, started: Instant, event: Event) {
        let start = started.saturating_duration_since(self.began);
        let event = Event { start, duration: started.elapsed(), ..event };
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Writes the events in the JSON of Chrome's trace viewer, which Perfetto reads too: a row for computations and one
    /// for movements on each device, and its memory as a counter.
    ///
    /// # Errors
    /// `to` cannot be written.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        let events = self.events();
        let mut devices: Vec<&Arc<str>> = Vec::new();
        for e in &events {
            if !devices.contains(&&e.device) {
                devices.push(&e.device);
            }
        }
        let mut out = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
        let mut separator = "\n";
        let mut push = |out: &mut String, text: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = write!(out, "{separator}{text}");
            separator = ",\n";
        };
        for (pid, device) in devices.iter().enumerate() {
            let name = quoted(device);
            push(
                &mut out,
                format_args!(r#"{{"ph":"M","name":"process_name","pid":{pid},"tid":0,"args":{{"name":{name}}}}}"#),
            );
            for (tid, row) in [(0, "compute"), (1, "memory")] {
                push(
                    &mut out,
                    format_args!(
                        r#"{{"ph":"M","name":"thread_name","pid":{pid},"tid":{tid},"args":{{"name":"{row}"}}}}"#
                    ),
                );
            }
        }
        for e in &events {
            let pid = devices.iter().position(|d| **d == e.device).unwrap_or(0);
            let tid = u8::from(!matches!(e.kind, EventKind::Compute | EventKind::Plan));
            let (kind, start, level) = (e.kind.name(), micros(e.start), e.level);
            let name = quoted(&format!("{kind} {} {}", e.module, e.segment));
            let (module, segment) = (quoted(&e.module), quoted(&e.segment));
            push(
                &mut out,
                format_args!(
                    r#"{{"ph":"X","cat":"{kind}","name":{name},"pid":{pid},"tid":{tid},"ts":{start},"dur":{},"args":{{"module":{module},"segment":{segment},"bytes":{}}}}}"#,
                    micros(e.duration),
                    e.bytes
                ),
            );
            push(
                &mut out,
                format_args!(
                    r#"{{"ph":"C","name":"memory","pid":{pid},"tid":0,"ts":{},"args":{{"bytes":{level}}}}}"#,
                    micros(e.start + e.duration)
                ),
            );
        }
        out.push_str("\n]}\n");
        to.write_all(out.as_bytes())
    }
}

fn micros(d: Duration) -> String {
    format!("{:.3}", d.as_secs_f64() * 1e6)
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_viewers_read() {
        let trace = Trace::new();
        let event = Event {
            kind: EventKind::Load,
            module: "unet".into(),
            segment: "a\"b\n".into(),
            device: "CUDA0".into(),
            bytes: 7,
            start: Duration::ZERO,
            duration: Duration::ZERO,
            level: 9,
        };
        trace.note(Instant::now(), event.clone());
        trace.note(Instant::now(), Event { kind: EventKind::Compute, ..event });
        let mut out = Vec::new();
        trace.write(&mut out).unwrap();
        let out = String::from_utf8(out).unwrap();
        assert!(out.contains(r#""name":"load unet a\"b\u000a","pid":0,"tid":1,"#), "{out}");
        assert!(out.contains(r#""cat":"compute""#) && out.contains(r#""args":{"bytes":9}"#), "{out}");
        assert_eq!(out.matches('{').count(), out.matches('}').count());
        assert_eq!(out.lines().filter(|l| l.starts_with("{\"ph\"")).count(), 3 + 4);
    }
}
