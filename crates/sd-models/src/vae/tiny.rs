//! TAESD, a tiny autoencoder without normalisation whose latents have the scale of the diffusion network
//! (`AutoencoderTiny` of diffusers), and TAEF2, which normalises beside its blocks on the level of the latents
//! (`taesd.py` of madebyollin's TAESD). Golden values: `oracle/tiny_vae.py`.
//! `z` latent channels, `f` pixels of the picture for a latent value.

use std::sync::Arc;

use sd_core::scope::Conv2d;
use sd_core::{Conv2dOptions, DType, Error, Graph, Program, Result, Scope, Var, WeightSource};
use sd_io::Checkpoint;

use crate::diffusion::conv;
use crate::names::{Row, Spelling};
use crate::view::View;

/// Latents are held to this softly.
const MAGNITUDE: f32 = 3.0;

/// Of the norms beside TAEF2's blocks, which no tensor tells.
const GROUPS: usize = 4;
const EPS: f32 = 1e-5;

/// Whether a file has the layers of a tiny autoencoder.
pub(crate) fn is_tiny(file: &dyn WeightSource) -> bool {
    let names = file.names();
    let renamed = Spelling::new("", rows(&names));
    let first = |name: &str| {
        let layers = ["decoder.layers.0.weight", "encoder.layers.0.weight"];
        renamed.here(name).iter().any(|(here, _)| layers.contains(&here.as_str()))
    };
    names.into_iter().any(|name| first(name) && file.meta(name).is_some_and(|m| m.shape.rank() == 4))
}

/// An open tiny autoencoder: a decoder, an encoder, or both.
pub struct TinyVae {
    view: Arc<View>,
    scope: Scope,
    latent: usize,
    compression: usize,
}

impl TinyVae {
    /// Finds out what the file holds, under diffusers' names or those of the original files, and checks every name and
    /// shape. Reads headers only.
    ///
    /// # Errors
    /// It holds no such autoencoder, or a tensor that it does not have.
    pub fn open(file: &Arc<Checkpoint>) -> Result<TinyVae> {
        let path = file.path();
        let tiny = TinyVae::detect(file.clone()).map_err(|e| e.context(path.display().to_string()))?;
        let tiny = tiny.ok_or_else(|| {
            Error::bad_file(path, "holds no tiny autoencoder")
                .hint("TAESD and its kin for SDXL, SD 3 and FLUX.1 are known")
        })?;
        if tiny.can_decode() {
            tiny.decode_program(1, 1, [false; 2])?;
        }
        if tiny.can_encode() {
            tiny.encode_program(tiny.compression, tiny.compression, [false; 2])?;
        }
        if let Some(name) = tiny.scope.unused().first() {
            let name = tiny.view.sources(name).first().unwrap_or(name);
            return Err(Error::bad_file(path, format!("{name} is no part of a known tiny autoencoder")));
        }
        Ok(tiny)
    }

    fn detect(file: Arc<dyn WeightSource>) -> Result<Option<TinyVae>> {
        let files = file.names();
        let view = Arc::new(View::new(file.clone(), file.clone(), Spelling::new("", rows(&files)), &files));
        let scope = Scope::root(view.clone());
        let (decoder, encoder) = (layers(&scope, "decoder"), layers(&scope, "encoder"));
        let latent = match (decoder.first(), encoder.last()) {
            (Some(first), _) => scope.dims::<4>(&format!("decoder.layers.{first}.weight"))?[1],
            (None, Some(last)) => scope.dims::<4>(&format!("encoder.layers.{last}.weight"))?[0],
            (None, None) => return Ok(None),
        };
        // Convolutions of the decoder but the first and the last follow a doubling.
        let convs = |side: &str, all: &[usize]| {
            all.iter().filter(|i| scope.has(&format!("{side}.layers.{i}.weight"))).count().saturating_sub(2)
        };
        let doublings = if decoder.is_empty() { convs("encoder", &encoder) } else { convs("decoder", &decoder) };
        let compression = 1usize.checked_shl(doublings as u32).filter(|f| *f <= 64);
        let compression =
            compression.ok_or_else(|| Error::unsupported(format!("a tiny autoencoder of {doublings} levels")))?;
        Ok(Some(TinyVae { view, scope, latent, compression }))
    }

    /// Channels of its latents.
    pub fn channels(&self) -> usize {
        self.latent
    }

    /// Pixels of a picture for a latent value, along each axis.
    pub fn compression(&self) -> usize {
        self.compression
    }

    /// Whether it makes pictures of latents.
    pub fn can_decode(&self) -> bool {
        self.scope.contains("decoder")
    }

    /// Whether it makes latents of pictures.
    pub fn can_encode(&self) -> bool {
        self.scope.contains("encoder")
    }

    /// Its tensors, to run its programs with.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        self.view.clone()
    }

    /// The picture `[1, 3, f h, f w]`, about -1 to 1, of `latent [1, z, h, w]` in the diffusion network's scale, which
    /// repeats down and across as `circular` says.
    ///
    /// # Errors
    /// There is no decoder, or a weight is missing or misshapen.
    pub fn decode_program(&self, h: usize, w: usize, circular: [bool; 2]) -> Result<Program> {
        if !self.can_decode() {
            return Err(Error::request("the tiny autoencoder has no decoder"));
        }
        let g = Graph::new();
        let latent = g.input("latent", &[1, self.latent, h, w], DType::F32)?;
        let y = decode(&g, &self.scope.sub("decoder"), latent, circular)?;
        g.finish(&[y])
    }

    /// The latent `[1, z, h / f, w / f]` of `image [1, 3, h, w]`, -1 to 1.
    ///
    /// # Errors
    /// There is no encoder, a side is no multiple of `f`, or a weight is missing or misshapen.
    pub fn encode_program(&self, h: usize, w: usize, circular: [bool; 2]) -> Result<Program> {
        let f = self.compression;
        if !self.can_encode() {
            return Err(Error::request("the tiny autoencoder has no encoder"));
        }
        if !h.is_multiple_of(f) || !w.is_multiple_of(f) {
            return Err(Error::shape(format!("picture {w}x{h}: both sides must be multiples of {f}")));
        }
        let g = Graph::new();
        let image = g.input("image", &[1, 3, h, w], DType::F32)?;
        let y = encode(&g, &self.scope.sub("encoder"), image, circular)?;
        g.finish(&[y])
    }
}

fn decode(g: &Graph, w: &Scope, latent: Var, circular: [bool; 2]) -> Result<Var> {
    let mut x = g.scale(g.tanh(g.scale(latent, 1.0 / MAGNITUDE)?)?, MAGNITUDE)?;
    let all = layers(w, "");
    for (place, &i) in all.iter().enumerate() {
        let w = w.at("layers", i);
        if w.has("weight") {
            // A doubling stands before each convolution but the first and the last.
            let doubles = place > 0 && place + 1 < all.len();
            x = if doubles { g.upsample_nearest(x, 2)? } else { x };
            x = conv(g, &layer(&w, place == 0 || place + 1 == all.len())?, x, 1, circular)?;
            x = if place == 0 { g.relu(x)? } else { x };
        } else {
            x = block(g, &w, x, circular)?;
        }
        g.cut(&w, &[x]);
    }
    g.affine(x, 2.0, -1.0)
}

fn encode(g: &Graph, w: &Scope, image: Var, circular: [bool; 2]) -> Result<Var> {
    let mut x = g.affine(image, 0.5, 0.5)?;
    let all = layers(w, "");
    for (place, &i) in all.iter().enumerate() {
        let w = w.at("layers", i);
        if w.has("weight") {
            let halves = place > 0 && place + 1 < all.len();
            x = conv(g, &layer(&w, !halves)?, x, if halves { 2 } else { 1 }, circular)?;
        } else {
            x = block(g, &w, x, circular)?;
        }
        g.cut(&w, &[x]);
    }
    Ok(x)
}

fn block(g: &Graph, w: &Scope, x: Var, circular: [bool; 2]) -> Result<Var> {
    let x = if w.contains("pool") { g.add(x, pool(g, &w.sub("pool"), x)?)? } else { x };
    let w = w.sub("conv");
    let y = g.relu(conv(g, &w.conv2d("0")?, x, 1, circular)?)?;
    let y = g.relu(conv(g, &w.conv2d("2")?, y, 1, circular)?)?;
    let y = conv(g, &w.conv2d("4")?, y, 1, circular)?;
    g.relu(g.add(x, y)?)
}

/// What all of `x` says about each of its pixels.
fn pool(g: &Graph, w: &Scope, x: Var) -> Result<Var> {
    let y = g.conv2d(&w.conv2d_no_bias("0")?, x, Conv2dOptions::default())?;
    let y = g.relu(g.group_norm(&w.norm("1")?, y, GROUPS, EPS)?)?;
    g.conv2d(&w.conv2d_no_bias("3")?, y, Conv2dOptions::default())
}

/// A convolution; those that change the size have no bias.
fn layer(w: &Scope, bias: bool) -> Result<Conv2d> {
    if bias { w.conv2d("") } else { w.conv2d_no_bias("") }
}

/// The numbers of the layers that have weights.
fn layers(w: &Scope, side: &str) -> Vec<usize> {
    let w = w.sub(side);
    let mut numbers: Vec<usize> = w.children("layers").iter().filter_map(|n| n.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

/// Rows for the names of the original files, whose decoder begins with a layer without weights, alone or after what
/// tells the sides apart in one file; none for diffusers'.
fn rows(names: &[&str]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (prefix, side) in [
        ("", None),
        ("encoder.", Some("encoder")),
        ("decoder.", Some("decoder")),
        ("taesd_encoder.", Some("encoder")),
        ("taesd_decoder.", Some("decoder")),
    ] {
        let number = |name: &&str| name.strip_prefix(prefix)?.split('.').next()?.parse::<usize>().ok();
        let numbers: std::collections::BTreeSet<usize> = names.iter().filter_map(number).collect();
        let side = side.unwrap_or(if numbers.contains(&0) { "encoder" } else { "decoder" });
        let first = usize::from(side == "decoder");
        let row =
            |n: usize| Row::new(format!("{prefix}{n}"), format!("{side}.layers.{}", n.saturating_sub(first)), &[]);
        rows.extend(numbers.into_iter().map(row));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Case, Fixture, check, check_circular, check_cuts};

    fn open(fixture: &str, rename: impl Fn(&str) -> String) -> TinyVae {
        TinyVae::detect(Fixture::open(fixture).weights(rename).shared()).unwrap().unwrap()
    }

    /// As original files spell it.
    fn original(name: &str) -> String {
        let (side, rest) = name.split_once(".layers.").unwrap();
        let (number, rest) = rest.split_once('.').unwrap();
        let number: usize = number.parse().unwrap();
        format!("{}.{rest}", if side == "decoder" { number + 1 } else { number })
    }

    fn case(fixture: &str, rename: fn(&str) -> String, circular: [bool; 2], run: fn(&Case)) {
        let tiny = open(fixture, rename);
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| {
            if w.contains("decoder") {
                return Ok(vec![("image", decode(g, &w.sub("decoder"), inputs[0], circular)?)]);
            }
            Ok(vec![("latent", encode(g, &w.sub("encoder"), inputs[0], circular)?)])
        };
        run(&Case { fixture, source: tiny.source(), prefix: "", build: &build });
    }

    #[test]
    fn both_spellings_agree_with_diffusers() {
        for fixture in ["tiny_vae_decoder", "tiny_vae_encoder"] {
            case(fixture, str::to_owned, [false; 2], check);
            case(fixture, original, [false; 2], check);
        }
    }

    /// As the original files of one side spell it.
    fn bare(name: &str) -> String {
        name.split_once('.').unwrap().1.to_owned()
    }

    /// As files with both sides spell it.
    fn both(name: &str) -> String {
        name.replace("taesd_", "")
    }

    #[test]
    fn norms_beside_blocks_agree_with_the_original() {
        for fixture in ["taef2_decoder", "taef2_encoder"] {
            for rename in [str::to_owned, bare, both] {
                case(fixture, rename, [false; 2], check);
                let tiny = open(fixture, rename);
                assert_eq!((tiny.channels(), tiny.compression()), (32, 8), "{fixture}");
                tiny.decode_program(1, 1, [false; 2])
                    .map(drop)
                    .or_else(|_| tiny.encode_program(8, 8, [false; 2]).map(drop))
                    .unwrap();
                assert_eq!(tiny.scope.unused(), [""; 0]);
            }
        }
    }

    #[test]
    fn cuts_change_nothing_and_pictures_repeat() {
        case("tiny_vae_decoder", str::to_owned, [false; 2], check_cuts);
        let twice: fn(&Case) = |c| check_circular(c, "latent", [1, 2], |by| by.map(|n| 8 * n));
        case("tiny_vae_decoder", str::to_owned, [true; 2], twice);
    }

    #[test]
    fn what_a_file_holds_is_read_off_its_names() {
        for (fixture, decodes) in [("tiny_vae_decoder", true), ("tiny_vae_encoder", false)] {
            let tiny = open(fixture, original);
            assert_eq!((tiny.channels(), tiny.compression()), (4, 8), "{fixture}");
            assert_eq!((tiny.can_decode(), tiny.can_encode()), (decodes, !decodes));
            assert_eq!(tiny.decode_program(2, 3, [false; 2]).is_ok(), decodes);
            assert_eq!(tiny.encode_program(16, 8, [false; 2]).is_ok(), !decodes);
            assert!(tiny.encode_program(9, 8, [false; 2]).is_err());
            assert_eq!(tiny.scope.unused(), [""; 0]);
        }
        let other = crate::testing::Tensors::shapes(&[("a.weight", &[1])]).shared();
        assert!(TinyVae::detect(other).unwrap().is_none());
    }
}
