//! Options of `-M metadata`.

use clap::Args as Group;
use std::path::PathBuf;

/// Which file to describe, and how.
#[derive(Debug, Group)]
#[command(next_help_heading = "Metadata Options")]
pub(crate) struct Metadata {
    /// Picture whose metadata -M metadata prints
    #[arg(long, value_name = "path")]
    pub(crate) image: Option<PathBuf>,
    /// How to print it: text or json
    #[arg(long, value_name = "string", default_value = "text", value_parser = ["text", "json"])]
    pub(crate) metadata_format: String,
    /// Show the first 64 bytes of what is not taken apart
    #[arg(long)]
    pub(crate) metadata_raw: bool,
    /// Cut texts after 240 bytes
    #[arg(long)]
    pub(crate) metadata_brief: bool,
    /// Show the chunks and segments of the picture itself, too
    #[arg(long)]
    pub(crate) metadata_all: bool,
}
