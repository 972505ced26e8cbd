//! Networks that make pictures larger: ESRGAN and Real-ESRGAN in their spellings. Golden values: `oracle/upscale.py`.

mod compact;
mod names;
mod rrdb;

use std::sync::Arc;

use sd_core::{DType, Error, Graph, Program, Result, Scope, Var, WeightSource};
use sd_io::Checkpoint;

use crate::view::View;

/// An open upscaler.
pub struct Upscaler {
    network: Network,
    view: Arc<View>,
    scope: Scope,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Network {
    Rrdb(rrdb::Config),
    Compact(compact::Config),
}

impl Upscaler {
    /// Finds out which network the file holds, and checks every name and shape. Reads headers only.
    ///
    /// # Errors
    /// It holds no known upscaler, or one for pictures without colour; a tensor is missing, misshapen, or one that the
    /// network does not have.
    pub fn open(file: &Arc<Checkpoint>) -> Result<Upscaler> {
        let path = file.path();
        let upscaler = Upscaler::detect(file.clone())
            .map_err(|e| e.context(format!("{}: upscaler", path.display())))?
            .ok_or_else(|| {
                Error::bad_file(path, "holds no upscaler")
                    .hint("ESRGAN, Real-ESRGAN and their compact networks are known")
            })?;
        let side = upscaler.multiple();
        upscaler.program(side, side)?;
        if let Some(name) = upscaler.scope.unused().first() {
            let name = upscaler.view.sources(name).first().unwrap_or(name);
            return Err(Error::bad_file(path, format!("{name} is no part of a known upscaler")));
        }
        Ok(upscaler)
    }

    fn detect(file: Arc<dyn WeightSource>) -> Result<Option<Upscaler>> {
        let files = file.names();
        let spelling = names::spelling(&files);
        let view = Arc::new(View::new(file.clone(), file.clone(), spelling, &files));
        let scope = Scope::root(view.clone());
        let network = if scope.has("conv_first.weight") {
            Network::Rrdb(rrdb::Config::detect(&scope)?)
        } else if scope.has("body.0.weight") {
            Network::Compact(compact::Config::detect(&scope)?)
        } else {
            return Ok(None);
        };
        Ok(Some(Upscaler { network, view, scope }))
    }

    /// How many times as many pixels a result has along each axis.
    pub fn scale(&self) -> usize {
        match &self.network {
            Network::Rrdb(cfg) => cfg.scale(),
            Network::Compact(cfg) => cfg.scale,
        }
    }

    /// Sides of pictures are multiples of this.
    pub fn multiple(&self) -> usize {
        match &self.network {
            Network::Rrdb(cfg) => cfg.shuffle,
            Network::Compact(_) => 1,
        }
    }

    /// Its tensors, to run its program with.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        self.view.clone()
    }

    /// The larger picture `[1, 3, scale h, scale w]` of `image [1, 3, h, w]`. Values run from 0 to 1 and may leave that
    /// range.
    ///
    /// # Errors
    /// A side is no multiple of [`Upscaler::multiple`], or a weight is missing or misshapen.
    pub fn program(&self, h: usize, w: usize) -> Result<Program> {
        let g = Graph::new();
        let image = g.input("image", &[1, 3, h, w], DType::F32)?;
        let y = self.build(&g, &self.scope, image)?;
        g.finish(&[y])
    }

    fn build(&self, g: &Graph, w: &Scope, image: Var) -> Result<Var> {
        match &self.network {
            Network::Rrdb(cfg) => rrdb::build(g, w, cfg, image),
            Network::Compact(cfg) => compact::build(g, w, cfg, image),
        }
    }
}

/// `x [b, c, r h, r w]` as `[b, c r r, h, w]`: the pixels of each cell of `r` by `r` become channels, row by row.
fn pixel_unshuffle(g: &Graph, x: Var, r: usize) -> Result<Var> {
    if r == 1 {
        return Ok(x);
    }
    let [b, c, h, w] = g.dims(x)?;
    if !h.is_multiple_of(r) || !w.is_multiple_of(r) {
        return Err(Error::shape(format!("picture {w}x{h}: both sides must be multiples of {r}")));
    }
    let x = g.reshape(x, &[b * c * h, w / r, r])?;
    let x = g.permute(x, &[0, 2, 1])?; // [b c h, r, w / r]
    let x = g.reshape(x, &[b * c, h / r, r * r, w / r])?;
    let x = g.permute(x, &[0, 2, 1, 3])?;
    g.reshape(x, &[b, c * r * r, h / r, w / r])
}

/// The way back: `x [b, c r r, h, w]` as `[b, c, r h, r w]`.
fn pixel_shuffle(g: &Graph, x: Var, r: usize) -> Result<Var> {
    if r == 1 {
        return Ok(x);
    }
    let [b, c, h, w] = g.dims(x)?;
    let x = g.reshape(x, &[b * c / (r * r), r * r, h, w])?;
    let x = g.permute(x, &[0, 2, 1, 3])?;
    let x = g.reshape(x, &[b * c / (r * r) * h * r, r, w])?;
    let x = g.permute(x, &[0, 2, 1])?;
    g.reshape(x, &[b, c / (r * r), h * r, w * r])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Case, Fixture, check, check_cuts};

    fn open(fixture: &str) -> Upscaler {
        let weights = Fixture::open(fixture).weights(str::to_owned).shared();
        Upscaler::detect(weights).unwrap().unwrap()
    }

    fn case(fixture: &str, run: fn(&Case)) {
        let upscaler = open(fixture);
        let build = |g: &Graph, w: &Scope, inputs: &[Var]| Ok(vec![("image", upscaler.build(g, w, inputs[0])?)]);
        run(&Case { fixture, source: upscaler.source(), prefix: "", build: &build });
    }

    #[test]
    fn rrdb_networks_agree_with_spandrel() {
        for fixture in ["upscale_rrdb_x4", "upscale_rrdb_x2", "upscale_rrdb_x1", "upscale_rrdb_once"] {
            case(fixture, check);
        }
    }

    #[test]
    fn compact_networks_agree_with_spandrel() {
        case("upscale_compact_x4", check);
        case("upscale_compact_x2", check);
    }

    #[test]
    fn cuts_change_nothing() {
        case("upscale_rrdb_x2", check_cuts);
        case("upscale_compact_x2", check_cuts);
    }

    #[test]
    fn scales_are_read_off_the_weights() {
        for (fixture, scale, multiple) in [
            ("upscale_rrdb_x4", 4, 1),
            ("upscale_rrdb_x2", 2, 2),
            ("upscale_rrdb_x1", 1, 4),
            ("upscale_rrdb_once", 2, 1),
            ("upscale_compact_x4", 4, 1),
            ("upscale_compact_x2", 2, 1),
        ] {
            let upscaler = open(fixture);
            assert_eq!((upscaler.scale(), upscaler.multiple()), (scale, multiple), "{fixture}");
            upscaler.program(8, 8).unwrap();
            assert_eq!(upscaler.scope.unused(), [""; 0], "{fixture}");
        }
    }

    #[test]
    fn every_spelling_names_the_same_tensors() {
        let names: serde_json::Value =
            serde_json::from_str(include_str!("../../../../oracle/fixtures/upscale_names.json")).unwrap();
        for (file, rows) in names.as_object().unwrap() {
            let rows: Vec<[String; 3]> = serde_json::from_value(rows.clone()).unwrap();
            for spelling in 0..3 {
                let files: Vec<&str> = rows.iter().map(|row| row[spelling].as_str()).collect();
                let table = names::spelling(&files);
                for row in &rows {
                    let here: Vec<String> = table.here(&row[spelling]).into_iter().map(|h| h.0).collect();
                    assert_eq!(here, [row[0].clone()], "{file} {}", row[spelling]);
                    assert_eq!(table.file(&row[0]), [row[spelling].clone()], "{file}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_upscaler_for_colours_is_named() {
        let detect = |list: &[(&str, &[usize])]| Upscaler::detect(crate::testing::Tensors::shapes(list).shared());
        assert!(detect(&[("a.weight", &[1])]).unwrap().is_none());
        let grey = detect(&[
            ("body.0.weight", &[16, 1, 3, 3]),
            ("body.1.weight", &[16]),
            ("body.2.weight", &[4, 16, 3, 3]),
        ]);
        let e = grey.err().unwrap().to_string();
        assert!(e.contains("body.0.weight reads 1 channels"), "{e}");
        let odd = detect(&[
            ("body.0.weight", &[16, 3, 3, 3]),
            ("body.1.weight", &[16]),
            ("body.2.weight", &[10, 16, 3, 3]),
        ]);
        let e = odd.err().unwrap().to_string();
        assert!(e.contains("body.2.weight gives 10 channels"), "{e}");
        let first = ("conv_first.weight", &[16usize, 5, 3, 3][..]);
        let e = detect(&[first]).err().unwrap().to_string();
        assert!(e.contains("conv_first.weight reads 5 channels"), "{e}");
    }
}
