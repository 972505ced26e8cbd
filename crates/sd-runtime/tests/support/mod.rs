//! Reads the oracle's fixtures, and runs the engine on what they describe.

#![allow(dead_code)] // Every test file uses a part.

pub(crate) mod layouts;
pub(crate) mod sd1;

use std::net::TcpListener;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use sd_core::convert::from_f32;
use sd_core::{DType, Shape};
use sd_io::{TensorSpec, write_safetensors};
use sd_runtime::{
    CancelToken, Engine, EngineBuilder, GeneratedImage, ImageRequest, Observer, Progress, RngKind, Stage,
    StepLatent, add_rpc_server,
};
use serde_json::Value;

/// A GPU-type device: ggml's RPC server in this process, on the processor.
pub(crate) fn remote_device() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let endpoint = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let at = endpoint.clone();
        std::thread::spawn(move || sd_core::device::serve_rpc(&at, 1, &[sd_core::Device::cpu().unwrap()]));
        for _ in 0..200 {
            if let Ok(devices) = add_rpc_server(&endpoint) {
                return devices[0].name().to_owned();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("no RPC server at {endpoint}");
    })
}

/// A fixture in safetensors form: an eight-byte length, a JSON header, the elements.
pub(crate) struct Fixture {
    bytes: Vec<u8>,
    header: Value,
    data: usize,
}

fn read(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../oracle/fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A fixture that is not tensors.
pub(crate) fn json(name: &str) -> Value {
    serde_json::from_slice(&read(name)).unwrap()
}

impl Fixture {
    pub(crate) fn open(name: &str) -> Fixture {
        let bytes = read(name);
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..data]).unwrap();
        Fixture { bytes, header, data }
    }

    /// A metadata entry that holds JSON.
    pub(crate) fn metadata(&self, key: &str) -> Value {
        serde_json::from_str(self.header["__metadata__"][key].as_str().unwrap()).unwrap()
    }

    /// Every tensor's name.
    pub(crate) fn names(&self) -> Vec<&str> {
        let names = self.header.as_object().unwrap().keys().map(String::as_str);
        names.filter(|n| *n != "__metadata__").collect()
    }

    pub(crate) fn f32s(&self, name: &str) -> Vec<f32> {
        self.elements(name, "F32").as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub(crate) fn f64s(&self, name: &str) -> Vec<f64> {
        self.elements(name, "F64").as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }

    pub(crate) fn u8s(&self, name: &str) -> &[u8] {
        self.elements(name, "U8")
    }

    fn elements(&self, name: &str, dtype: &str) -> &[u8] {
        let tensor = &self.header[name];
        assert_eq!(tensor["dtype"], dtype, "{name}");
        let offset = |i: usize| self.data + tensor["data_offsets"][i].as_u64().unwrap() as usize;
        let range: Range<usize> = offset(0)..offset(1);
        &self.bytes[range]
    }
}

/// A tensor that is made by the oracle's rule from its name (`oracle/README.md`).
pub(crate) fn procedural(name: &str, elements: usize, exponent: i32, shift: f32) -> Vec<f32> {
    let fnv = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3);
    let mut state = name.bytes().fold(0xCBF2_9CE4_8422_2325, fnv);
    let scale = 2f32.powi(exponent);
    let value = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let z = z ^ (z >> 31);
        shift + ((z >> 53) as i32 - 1024) as f32 * scale
    };
    std::iter::repeat_with(value).take(elements).collect()
}

/// A tensor to write: its name, its shape, its values.
pub(crate) type Tensor = (String, Vec<usize>, Vec<f32>);

/// Writes a file of f32.
pub(crate) fn write_tensors(path: &Path, tensors: &[Tensor]) {
    let spec = |(name, shape, _): &Tensor| TensorSpec {
        name: name.clone(),
        dtype: DType::F32,
        shape: Shape::new(shape).unwrap(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    write_safetensors(path, &[], &specs, |spec| {
        let (_, _, values) = tensors.iter().find(|t| t.0 == spec.name).unwrap();
        from_f32(spec.dtype, values, values.len())
    })
    .unwrap();
}

/// The request that a pipeline's fixture was made with.
pub(crate) fn oracle_request(fixture: &str) -> ImageRequest {
    let config = Fixture::open(fixture).metadata("config");
    let text = |key: &str| config[key].as_str().unwrap().to_owned();
    let number = |key: &str| Some(u32::try_from(config[key].as_u64().unwrap()).unwrap());
    ImageRequest {
        prompt: text("prompt"),
        negative_prompt: text("negative_prompt"),
        width: number("width"),
        height: number("height"),
        steps: number("steps"),
        cfg_scale: Some(config["cfg"].as_f64().unwrap() as f32),
        seed: config["seed"].as_i64(),
        rng: Some(RngKind::Cpu),
        ..Default::default()
    }
}

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) latents: Vec<Vec<f32>>,
    pub(crate) warnings: Vec<String>,
    /// Evaluations that were computed, and all.
    pub(crate) computed: Option<(usize, usize)>,
    /// Cancelled when the given stage reports the given step.
    pub(crate) cancel: Option<(Stage, usize, CancelToken)>,
}

impl Observer for Log {
    fn progress(&mut self, p: Progress) {
        if let Some((_, _, token)) =
            self.cancel.as_ref().filter(|(stage, step, _)| (*stage, *step) == (p.stage, p.step))
        {
            token.cancel();
        }
    }

    fn computed(&mut self, _image: usize, computed: usize, evaluations: usize) {
        self.computed = Some((computed, evaluations));
    }

    fn warning(&mut self, message: &str) {
        self.warnings.push(message.into());
    }

    fn step(&mut self, s: StepLatent<'_>) {
        self.latents.push(s.latent.values().to_vec());
    }
}

pub(crate) fn generate(
    engine: &mut Engine,
    request: &ImageRequest,
    log: &mut Log,
) -> sd_runtime::Result<Vec<GeneratedImage>> {
    let token = log.cancel.as_ref().map(|c| c.2.clone()).unwrap_or_default();
    engine.generate(request, log, &token)
}

pub(crate) fn one(builder: EngineBuilder, request: &ImageRequest) -> GeneratedImage {
    generate(&mut builder.build().unwrap(), request, &mut Log::default()).unwrap().remove(0)
}

/// ||got - want|| / ||want||.
pub(crate) fn relative(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |v: f64| v * v;
    let off: f64 = got.iter().zip(want).map(|(g, w)| square(f64::from(*g) - f64::from(*w))).sum();
    (off / want.iter().map(|w| square(f64::from(*w))).sum::<f64>()).sqrt()
}

pub(crate) fn psnr(got: &[u8], want: &[u8]) -> f64 {
    assert_eq!(got.len(), want.len());
    let off: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - f64::from(*w)).powi(2)).sum();
    10.0 * (255.0f64.powi(2) * got.len() as f64 / off.max(1e-9)).log10()
}

/// Compares latents and picture with the run `key` of a pipeline's fixture.
pub(crate) fn agrees(engine: &mut Engine, pipeline: &str, key: &str, request: &ImageRequest) {
    let fixture = Fixture::open(&format!("{pipeline}.safetensors"));
    agrees_with(engine, pipeline, key, request, fixture.u8s(&format!("output.{key}.image_u8")));
}

/// The same with another picture.
pub(crate) fn agrees_with(engine: &mut Engine, pipeline: &str, key: &str, request: &ImageRequest, picture: &[u8]) {
    let fixture = Fixture::open(&format!("{pipeline}.safetensors"));
    let mut log = Log::default();
    let image = generate(engine, request, &mut log).unwrap().remove(0);
    let want = fixture.f32s(&format!("output.{key}.latents"));
    let size = want.len() / log.latents.len();
    for (step, (got, want)) in log.latents.iter().zip(want.chunks(size)).enumerate() {
        let off = relative(got, want);
        assert!(off < 1e-4, "{pipeline} {key} step {step}: the latent is off by {off:.2e}");
    }
    let db = psnr(&image.rgb, picture);
    assert!(db >= 60.0, "{pipeline} {key}: the picture has {db:.1} dB");
    assert!(log.warnings.is_empty(), "{:?}", log.warnings);
}
