//! The command line: names, defaults and ranges of the options. `docs/cli.md` describes them for users.

mod config;
mod hires;
mod larger;
mod metadata;
mod mode;
mod pictures;
mod preview;

use crate::later;
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args as Group, Command, CommandFactory, FromArgMatches, Parser};
use clap_complete::Shell;
use hires::HiresOptions;
use larger::Larger;
pub(crate) use metadata::Metadata;
pub(crate) use mode::Mode;
use mode::{mode, output};
use pictures::{Pictures, Steps};
use preview::PreviewOptions;
use sd_options::value::{log_level, named, not_negative, whole};
use sd_options::{CacheArgs, ModelOptions};
use sd_runtime::{MAX_BATCH, MAX_SIDE, MAX_STEPS, RngKind, SamplerKind, SchedulerKind};
use std::ffi::OsString;
use std::path::PathBuf;
use tracing::level_filters::LevelFilter;

const VERSION: &str = concat!("version ", env!("CARGO_PKG_VERSION"));

/// Draws pictures from text.
#[derive(Debug, Parser)]
#[command(
    name = "sd-rs",
    bin_name = "sd-cli",
    version = VERSION,
    disable_version_flag = true,
    disable_help_flag = true,
    args_override_self = true,
    max_term_width = 120,
    after_help = "sd-cli rpc-worker --help says how to serve this machine's devices to other machines."
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) cli: Cli,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    pub(crate) context: Context,
    #[command(flatten)]
    pub(crate) generation: Generation,
    #[command(flatten)]
    pub(crate) steps: Steps,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    #[command(flatten)]
    pub(crate) pictures: Pictures,
    #[command(flatten)]
    pub(crate) larger: Larger,
    #[command(flatten)]
    pub(crate) metadata: Metadata,
    #[command(flatten)]
    pub(crate) hires: HiresOptions,
    #[command(flatten)]
    pub(crate) preview: PreviewOptions,
}

/// What this program does with its results and its log.
#[derive(Debug, Group)]
#[command(next_help_heading = "CLI Options")]
pub(crate) struct Cli {
    /// What to do: img_gen, upscale to make the picture of --init-img larger, convert to write a model in other types or
    /// another format, or metadata to print what the picture of --image says of itself
    #[arg(short = 'M', long, value_name = "string", default_value = "img_gen", value_parser = mode)]
    pub(crate) mode: Mode,
    /// Where to write: a .png, .jpg, .jpeg, .jpe or .webp file; %d, %3d and %03d stand for the number of the image.
    /// With -M convert a .gguf or .safetensors file
    #[arg(short, long, value_name = "string", default_value = "output.png", value_parser = output)]
    pub(crate) output: String,
    /// Number of the first image; negative means 0
    #[arg(long, value_name = "int", default_value_t = -1, value_parser = whole(i32::MIN, i32::MAX))]
    pub(crate) output_begin_idx: i32,
    /// JPEG quality, 1 to 100; 0 means 90
    #[arg(long, value_name = "int", default_value_t = 90, value_parser = whole(0u8, 100))]
    pub(crate) compression_quality: u8,
    /// How much to log on stderr: debug, verbose, info, warn or error
    #[arg(long, value_name = "string", default_value = "info", value_parser = log_level)]
    pub(crate) log_level: LevelFilter,
    /// The same as --log-level verbose
    #[arg(short, long)]
    verbose: bool,
    /// Colour the tags of the log
    #[arg(long)]
    pub(crate) color: bool,
    /// Give tensors the names that this program uses, with -M convert
    #[arg(long)]
    pub(crate) convert_name: bool,
    /// Importance matrix; of several the sums count. With -M convert it says which columns of weights quantised types keep
    /// closest, with --imat-out what is added to
    #[arg(long, value_name = "path", action = ArgAction::Append)]
    pub(crate) imat_in: Vec<PathBuf>,
    /// Where to write the importance matrix that is collected while pictures are drawn
    #[arg(long, value_name = "path")]
    pub(crate) imat_out: Option<PathBuf>,
    /// Print family, parts, missing parts, defaults and unread tensors of the given files, and stop
    #[arg(long, value_name = "path")]
    pub(crate) model_info: Option<Option<PathBuf>>,
    /// File of options, TOML or JSON, as name = value; what the command line says wins
    #[arg(long, value_name = "path")]
    config: Option<PathBuf>,
    /// Print where each part would run and the memory it would take, and stop
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print a line of JSON on stdout for every picture that is written
    #[arg(long)]
    pub(crate) json: bool,
    /// File for a record of what was loaded, computed and let go on devices, for Chrome's trace viewer or Perfetto
    #[arg(long, value_name = "path")]
    pub(crate) trace: Option<PathBuf>,
    /// Print what completes options in a shell, and stop: bash, elvish, fish, powershell or zsh
    #[arg(long, value_name = "string")]
    pub(crate) completions: Option<Shell>,
    /// Print this help
    #[arg(short, long, action = ArgAction::HelpShort)]
    help: Option<bool>,
    /// Print the version
    #[arg(long, action = ArgAction::Version)]
    version: Option<bool>,
}

/// More of what is loaded.
#[derive(Debug, Group)]
#[command(next_help_heading = "Context Options")]
pub(crate) struct Context {
    /// Folder of LoRAs, which <lora:name:strength> in the prompt name; empty reads tags as text
    #[arg(long, value_name = "path", default_value = ".", value_parser = OsStringValueParser::new().map(PathBuf::from))]
    pub(crate) lora_model_dir: PathBuf,
    /// Types by name, with -M convert: regex=type, several separated by commas, the first that is found in a name counts
    #[arg(long, value_name = "string", action = ArgAction::Append)]
    pub(crate) tensor_type_rules: Vec<String>,
    /// Generator of the noise: cuda (as web UIs on a GPU draw it) or cpu (as ComfyUI draws it)
    #[arg(long, value_name = "string", default_value = "cuda", value_parser = named::<RngKind>)]
    pub(crate) rng: RngKind,
    /// Generator of the sampler's own noise; default: as --rng
    #[arg(long, value_name = "string", value_parser = named::<RngKind>)]
    pub(crate) sampler_rng: Option<RngKind>,
    /// Print name and description of every device and stop
    #[arg(long)]
    pub(crate) list_devices: bool,
}

/// What to draw.
#[derive(Debug, Group)]
#[command(next_help_heading = "Generation Options")]
pub(crate) struct Generation {
    /// What the picture should show; (x:1.3) weighs a part, BREAK starts a new window
    #[arg(short, long, value_name = "string", default_value = "", hide_default_value = true)]
    pub(crate) prompt: String,
    /// What it should not show
    #[arg(short, long, value_name = "string", default_value = "", hide_default_value = true)]
    pub(crate) negative_prompt: String,
    /// File whose whole text is the prompt
    #[arg(long, value_name = "path", overrides_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// File with a prompt in each line, - for stdin; pictures are drawn for all of them with the model loaded once
    #[arg(long, value_name = "path", overrides_with_all = ["prompt", "prompt_file"])]
    pub(crate) prompts_file: Option<PathBuf>,
    /// File whose whole text is the negative prompt
    #[arg(long, value_name = "path", overrides_with = "negative_prompt")]
    pub(crate) negative_prompt_file: Option<PathBuf>,
    /// Pixels across; default: the model's own, mostly 512
    #[arg(short = 'W', long, value_name = "int", value_parser = whole(1, MAX_SIDE))]
    pub(crate) width: Option<u32>,
    /// Pixels down; default: the model's own, mostly 512
    #[arg(short = 'H', long, value_name = "int", value_parser = whole(1, MAX_SIDE))]
    pub(crate) height: Option<u32>,
    /// Seed of the first image, the next has one more; negative means random
    #[arg(short, long, value_name = "int", default_value_t = 42, value_parser = whole(i64::MIN, i64::MAX))]
    pub(crate) seed: i64,
    /// Number of images
    #[arg(short, long, value_name = "int", default_value_t = 1,
        value_parser = whole(1, MAX_BATCH))]
    pub(crate) batch_count: u32,
    /// Sampler steps; default: the model's own, mostly 20
    #[arg(long, value_name = "int", value_parser = whole(1, MAX_STEPS))]
    pub(crate) steps: Option<u32>,
    /// How strongly to follow the prompt; 1 turns guidance off; default: the model's own, mostly 7
    #[arg(long, value_name = "float", value_parser = not_negative)]
    pub(crate) cfg_scale: Option<f32>,
    /// Noise scale of ancestral samplers; default: 1 for euler_a, else 0
    #[arg(long, value_name = "float", value_parser = not_negative)]
    pub(crate) eta: Option<f32>,
    /// Sampler: euler, euler_a or dpm++2m; default: the model's own, mostly euler_a
    #[arg(long, value_name = "string", value_parser = named::<SamplerKind>)]
    pub(crate) sampling_method: Option<SamplerKind>,
    /// Noise schedule: discrete, karras or exponential; default: the model's own
    #[arg(long, value_name = "string", value_parser = named::<SchedulerKind>)]
    pub(crate) scheduler: Option<SchedulerKind>,
    /// Layers of the text encoder to leave out, counting from 1 for none; 0 or less means the model's own
    #[arg(long, value_name = "int", default_value_t = -1, value_parser = whole(i32::MIN, i32::MAX))]
    pub(crate) clip_skip: i32,
    /// Write no generation parameters into the images
    #[arg(long)]
    pub(crate) disable_image_metadata: bool,
}

impl Args {
    /// Reads a command line, program name first.
    pub(crate) fn read(argv: impl IntoIterator<Item = OsString>) -> Result<Args, clap::Error> {
        let mut command = Args::full_command();
        let argv: Vec<OsString> = argv.into_iter().collect();
        let matches = command.try_get_matches_from_mut(&argv);
        let matches = matches.map_err(|e| match e.kind() {
            ErrorKind::InvalidUtf8 => not_utf8(&mut command, &argv),
            _ => e,
        })?;
        let matches = match matches.get_one::<PathBuf>("config") {
            None => matches,
            Some(file) => {
                let all = config::extend(&mut command, &argv, &matches, file);
                let all = all.map_err(|message| command.error(ErrorKind::InvalidValue, message))?;
                command.try_get_matches_from_mut(all)?
            }
        };
        later::check(&mut command, &matches)?;
        let mut args = Args::from_arg_matches(&matches).map_err(|e| e.format(&mut command))?;
        if last_of(&matches, "verbose") > last_of(&matches, "log_level") {
            args.cli.log_level = LevelFilter::DEBUG;
        }
        Ok(args)
    }

    /// What completes the options in a shell.
    pub(crate) fn completions(shell: Shell) -> Vec<u8> {
        let mut out = Vec::new();
        clap_complete::generate(shell, &mut Args::command(), "sd-cli", &mut out);
        out
    }

    /// The options above and those of later versions. A value may start with a dash.
    fn full_command() -> Command {
        later::add(Args::command()).mut_args(|arg| {
            let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
            // What stands after --model-info may be the next option.
            let hyphens = takes_value && arg.get_id() != "model_info";
            arg.allow_hyphen_values(hyphens)
        })
    }
}

/// The error that shows the argument which is not UTF-8, and the one before it, which may be its option.
fn not_utf8(command: &mut Command, argv: &[OsString]) -> clap::Error {
    let wrong = argv.iter().position(|arg| arg.to_str().is_none()).unwrap_or(0);
    let shown = argv.iter().take(wrong + 1).skip(wrong.saturating_sub(1).max(1));
    let shown: Vec<_> = shown.map(|arg| arg.to_string_lossy()).collect();
    command.error(ErrorKind::InvalidUtf8, format!("'{}' is not UTF-8", shown.join(" ")))
}

/// Where an option last stood on the command line, counted from 1; 0 when it was not there.
fn last_of(matches: &ArgMatches, id: &str) -> usize {
    let given = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
    let last = matches.indices_of(id).and_then(Iterator::max).filter(|_| given);
    last.map_or(0, |index| index + 1)
}

/// A hidden option for [`later`].
pub(crate) fn hidden(name: &'static str, takes_value: bool) -> Arg {
    let action = if takes_value { ArgAction::Append } else { ArgAction::SetTrue };
    Arg::new(name).long(name).hide(true).action(action)
}
