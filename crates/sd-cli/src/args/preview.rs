//! Options of previews.

use clap::Args as Group;
use sd_options::value::{Shown, shown, whole};
use sd_runtime::Preview;

/// Pictures of what is being drawn.
#[derive(Debug, Group)]
#[command(next_help_heading = "CLI Options")]
pub(crate) struct PreviewOptions {
    /// Write previews: none, proj (a rough one that costs nothing), tae (by --taesd) or vae
    #[arg(long, value_name = "string", default_value = "none", value_parser = shown)]
    preview: Shown,
    /// File of the preview; %d numbers them
    #[arg(long, value_name = "string", default_value = "preview.png")]
    pub(crate) preview_path: String,
    /// N for every Nth step, -N for step N alone, 0 for the end of the first pass
    #[arg(long, value_name = "int", default_value_t = 1, value_parser = whole(i32::MIN, i32::MAX))]
    preview_interval: i32,
    /// Show the noisy picture instead of the estimate of the finished one
    #[arg(long)]
    preview_noisy: bool,
}

impl PreviewOptions {
    /// The previews that are asked for.
    pub(crate) fn preview(&self) -> Option<Preview> {
        let (interval, noisy) = (self.preview_interval, self.preview_noisy);
        self.preview.0.map(|mode| Preview { mode, interval, noisy })
    }
}
