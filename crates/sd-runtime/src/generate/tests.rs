//! The loop with networks that have a closed form.

use super::*;
use crate::observer::StepLatent;
use crate::request::Defaults;
use crate::resolve::Given;
use crate::rng::Rng;
use crate::sampler::SamplerKind;
use crate::schedule::SchedulerKind;

/// Data are N(0, 1) whatever the prompt, so the best denoiser is x / (1 + sigma^2). Prompts and pictures can be made
/// to break.
struct Fake {
    facts: Facts,
    table: SigmaTable,
    /// Decodes with weights as stored fail.
    narrow_vae: bool,
    cancel_at: Option<(usize, CancelToken)>,
    /// The device cannot hold the autoencoder's work at once.
    /// Latent positions that have room in one piece, when that is asked and when a latent is decoded.
    room: [usize; 2],
    /// What was last decoded at once.
    piece: Option<[usize; 2]>,
    evaluations: usize,
}

impl Fake {
    fn new() -> Fake {
        let table = SigmaTable::scaled_linear();
        let facts = Facts {
            family: "fake",
            channels: 4,
            pixels: 8,
            multiple: 8,
            prediction: Prediction::Eps,
            levels: Levels::Table(table.clone()),
            guidance: false,
            joined: Joined::None,
            references: false,
            blocks: 0,
            ays: None,
            picture_scale: 1.0,
        };
        Fake {
            facts,
            table,
            narrow_vae: false,
            cancel_at: None,
            room: [usize::MAX; 2],
            piece: None,
            evaluations: 0,
        }
    }
}

impl Networks for Fake {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn fits(&mut self, evaluation: &Evaluation) -> Result<()> {
        assert!((1..=4).contains(&evaluation.batch));
        Ok(())
    }

    fn fits_coding(&mut self, evaluation: &Evaluation, _encodes: bool, coding: Coding) -> Result<()> {
        let [h, w] = coding.piece.unwrap_or(evaluation.size);
        if h * w > self.room[0] { Err(Error::device("no room")) } else { Ok(()) }
    }

    fn condition(&mut self, prompt: &Prompt<'_>, _cancel: &CancelToken) -> Result<Conditioning> {
        let value = match prompt.text {
            "broken" => f32::NAN,
            "unet" => 1.0,
            "vae" => 2.0,
            _ => 0.0,
        };
        Ok(Conditioning { context: Tensor::f32(&[1, 1, 1], vec![value])?, vector: None })
    }

    fn hint(&mut self, _net: usize, _picture: &Tensor, _cancel: &CancelToken) -> Result<Tensor> {
        Tensor::zeros(&[1, 1, 1, 1])
    }

    fn predict(
        &mut self,
        call: &Call<'_>,
        _blocks: Option<&mut BlockCache>,
        _cancel: &CancelToken,
    ) -> Result<Vec<Tensor>> {
        let (x, t) = (call.x, call.timestep);
        self.evaluations += 1;
        if let Some((_, token)) = self.cancel_at.as_ref().filter(|(at, _)| *at == self.evaluations) {
            token.cancel();
        }
        let sigma = self.table.sigma(t);
        let one = |branch: &Branch<'_>| {
            // eps = (x - D) / sigma with x = input * sqrt(1 + sigma^2).
            let v2 = 1.0 + sigma * sigma;
            let broken = branch.conditioning.context.values() == [1.0] && self.evaluations == 2;
            let eps = |v: &f32| {
                let x = f64::from(*v) * v2.sqrt();
                if broken { f32::INFINITY } else { ((x - x / v2) / sigma) as f32 }
            };
            Tensor::f32(x.dims(), x.values().iter().map(eps).collect())
        };
        call.branches.iter().map(one).collect()
    }

    /// Every channel is the mean of a cell's pixels over all colours; there is no spread.
    fn encode(&mut self, picture: &Tensor, _coding: Coding, _cancel: &CancelToken) -> Result<Moments> {
        let [_, _, height, width] = picture.shape().array().unwrap();
        let (h, w) = (height / 8, width / 8);
        let cell = |i: usize| {
            let (y, x) = (i / w % h * 8, i % w * 8);
            let pixels = (0..3 * 64).map(|p| (p / 64 * height + y + p / 8 % 8) * width + x + p % 8);
            pixels.map(|at| picture.values()[at]).sum::<f32>() / 192.0
        };
        let mean = Tensor::f32(&[1, 4, h, w], (0..4 * h * w).map(cell).collect())?;
        Ok(Moments { mean, deviation: Tensor::zeros(&[1, 4, h, w])? })
    }

    fn decode(&mut self, latent: &Tensor, coding: Coding, _cancel: &CancelToken) -> Result<Tensor> {
        self.piece = coding.piece;
        let [_, _, h, w] = latent.shape().array().unwrap();
        if coding.piece.unwrap_or([h, w]).iter().product::<usize>() > self.room[1] {
            return Err(Error::device("no room"));
        }
        let value = |i: usize| latent.values()[i % latent.values().len()] / 4.0;
        let broken = self.narrow_vae && !coding.precise;
        let values = (0..3 * 64 * h * w).map(|i| if broken { f32::NAN } else { value(i) }).collect();
        Tensor::f32(&[1, 3, 8 * h, 8 * w], values)
    }

    fn preview(
        &mut self,
        latent: &Tensor,
        _mode: PreviewMode,
        _circular: [bool; 2],
        _cancel: &CancelToken,
    ) -> Result<InputImage> {
        let byte = latent.values()[0].abs() as u8;
        Ok(InputImage { width: 1, height: 1, rgb: vec![byte; 3] })
    }

    fn broken_weight(&self, stage: Stage) -> Option<String> {
        (stage == Stage::TextEncode).then(|| "a.weight (x.safetensors)".into())
    }
}

const DEFAULTS: Defaults = Defaults {
    width: 64,
    height: 64,
    steps: 3,
    cfg_scale: 7.0,
    guidance: None,
    sampler: SamplerKind::EulerA,
    scheduler: SchedulerKind::Discrete,
    clip_skip: 1,
};

#[derive(Default)]
struct Log {
    progress: Vec<(Stage, usize, usize, usize)>,
    warnings: Vec<String>,
    images: Vec<usize>,
    steps: usize,
}

impl Observer for Log {
    fn progress(&mut self, p: Progress) {
        self.progress.push((p.stage, p.image, p.step, p.total));
    }

    fn warning(&mut self, message: &str) {
        self.warnings.push(message.into());
    }

    fn step(&mut self, _latent: StepLatent<'_>) {
        self.steps += 1;
    }

    fn image(&mut self, index: usize, _image: &GeneratedImage) {
        self.images.push(index);
    }
}

fn generate(net: &mut Fake, request: &ImageRequest, log: &mut Log) -> Result<Vec<GeneratedImage>> {
    let cancel = net.cancel_at.as_ref().map(|(_, token)| token.clone()).unwrap_or_default();
    drive(net, request, log, &cancel)
}

fn drive(
    net: &mut Fake,
    request: &ImageRequest,
    observer: &mut dyn Observer,
    cancel: &CancelToken,
) -> Result<Vec<GeneratedImage>> {
    let facts = net.facts.clone();
    let given = Given {
        model: "fake",
        defaults: &DEFAULTS,
        facts: &facts,
        refiner: None,
        upscaler: None,
        hires_upscaler: false,
        tags: false,
        controls: &[],
        random_seed: 7,
    };
    let resolved = request.resolve(&given)?;
    let mut images = Vec::new();
    let mut watch = Watch { observer, cancel, preview: request.preview };
    run(
        Models { net, refiner: None, upscaler: None, hires: None },
        request,
        &resolved,
        &mut watch,
        &mut |image| images.push(image),
    )?;
    Ok(images)
}

fn prompt(prompt: &str) -> ImageRequest {
    ImageRequest { prompt: prompt.into(), ..Default::default() }
}

#[test]
fn stages_and_steps_are_reported() {
    let mut log = Log::default();
    let images =
        generate(&mut Fake::new(), &ImageRequest { batch_count: Some(2), ..prompt("a") }, &mut log).unwrap();
    assert_eq!((images.len(), log.images, log.steps), (2, vec![0, 1], 6));
    let mut want = vec![(Stage::TextEncode, 0, 0, 2), (Stage::TextEncode, 0, 1, 2), (Stage::TextEncode, 0, 2, 2)];
    for image in 0..2 {
        want.extend((0..=3).map(|step| (Stage::Denoise, image, step, 3)));
        want.extend([(Stage::Decode, image, 0, 1), (Stage::Decode, image, 1, 1)]);
    }
    assert_eq!(log.progress, want);
    assert!(log.warnings.is_empty());
    assert_eq!(images[1].parameters.seed, 43);
    assert_eq!(images[0].rgb.len(), 64 * 64 * 3);
}

/// The flow of this denoiser keeps x / sqrt(1 + sigma^2), so a fine Euler run ends near noise * sigma / sqrt(1 + sigma^2).
#[test]
fn a_fine_run_follows_the_exact_flow() {
    struct Last(Vec<f32>);
    impl Observer for Last {
        fn step(&mut self, s: StepLatent<'_>) {
            self.0 = s.latent.values().to_vec();
        }
    }
    let request = ImageRequest { steps: Some(400), sampler: Some(SamplerKind::Euler), ..prompt("") };
    let mut last = Last(Vec::new());
    drive(&mut Fake::new(), &request, &mut last, &CancelToken::new()).unwrap();
    let noise = Rng::new(crate::rng::RngKind::Cuda, 42).randn(4 * 64);
    let sigma = SigmaTable::scaled_linear().max();
    let factor = sigma / (1.0 + sigma * sigma).sqrt();
    for (got, noise) in last.0.iter().zip(&noise) {
        let want = f64::from(*noise) * factor;
        assert!((f64::from(*got) - want).abs() < 0.03 * want.abs() + 1e-4, "{got} {want}");
    }
}

#[test]
fn an_image_of_a_batch_is_the_image_alone() {
    let batch = ImageRequest { batch_count: Some(3), seed: Some(5), ..prompt("a") };
    let mut net = Fake::new();
    let batch = generate(&mut net, &batch, &mut Log::default()).unwrap();
    for (i, image) in batch.iter().enumerate() {
        let alone = ImageRequest { seed: Some(5 + i as i64), ..prompt("a") };
        assert_eq!(&generate(&mut net, &alone, &mut Log::default()).unwrap()[0], image);
    }
    assert_ne!(batch[0].rgb, batch[1].rgb);
}

#[test]
fn what_is_not_finite_is_named() {
    let e = generate(&mut Fake::new(), &prompt("broken"), &mut Log::default()).unwrap_err().to_string();
    assert_eq!(
        e,
        "text encoding: NaN or infinite values in the prompt's states, because there are such in a.weight (x.safetensors)"
    );
    let negative = ImageRequest { negative_prompt: "broken".into(), ..Default::default() };
    let e = generate(&mut Fake::new(), &negative, &mut Log::default()).unwrap_err().to_string();
    assert!(e.contains("the negative prompt's states"), "{e}");
    let e = generate(&mut Fake::new(), &prompt("unet"), &mut Log::default()).unwrap_err().to_string();
    assert!(e.starts_with("denoising: NaN or infinite values in the prediction of step 2 of 3"), "{e}");
}

#[test]
fn a_broken_picture_is_decoded_again_in_f32() {
    let mut log = Log::default();
    let mut net = Fake { narrow_vae: true, ..Fake::new() };
    let images = generate(&mut net, &prompt("a"), &mut log).unwrap();
    assert_eq!(images, generate(&mut Fake::new(), &prompt("a"), &mut Log::default()).unwrap());
    assert!(log.warnings.iter().any(|w| w.contains("again with f32")), "{:?}", log.warnings);
}

#[test]
fn the_autoencoder_runs_in_pieces_where_it_must() {
    let long = ImageRequest { width: Some(512), ..prompt("a") };
    for (room, want) in [
        ([511, usize::MAX], Ok(Some([8, 32]))),
        // Found out when it is tried.
        ([usize::MAX, 511], Ok(Some([8, 32]))),
        ([511, 255], Ok(Some([8, 16]))),
        ([64, 64], Ok(Some([8, 8]))),
        ([63, 64], Err("no room")),
        ([64, 63], Err("decoding: no room")),
    ] {
        let mut log = Log::default();
        let mut net = Fake { room, ..Fake::new() };
        match (generate(&mut net, &long, &mut log), want) {
            (Ok(_), Ok(piece)) => {
                assert_eq!(net.piece, piece, "{room:?}");
                assert!(log.warnings.iter().all(|w| w.contains("in pieces of ")), "{:?}", log.warnings);
            }
            (Err(e), Err(want)) => assert!(e.to_string().starts_with(want), "{e}"),
            (got, _) => panic!("{room:?}: {:?}", got.map(|images| images.len())),
        }
    }
    let mut net = Fake::new();
    generate(&mut net, &prompt("a"), &mut Log::default()).unwrap();
    assert_eq!(net.piece, None);
    let tiling = |tile, relative| {
        let vae_tiling = Some(VaeTiling { tile, relative });
        let mut net = Fake::new();
        let r = ImageRequest { vae_tiling, width: Some(512), height: Some(320), ..prompt("a") };
        generate(&mut net, &r, &mut Log::default()).map(|_| net.piece.unwrap())
    };
    // Width before height; below 4 is the default, a share, or a number of pieces.
    assert_eq!(tiling([10, 20], [0.0; 2]).unwrap(), [20, 10]);
    assert_eq!(tiling([0, 3], [0.0; 2]).unwrap(), [32, 32]);
    assert_eq!(tiling([0, 0], [0.5, 3.0]).unwrap(), [14, 32]);
    assert!(tiling([0, 0], [-1.0, 0.0]).unwrap_err().to_string().starts_with("vae_tiling.relative: want"));
}

#[test]
fn previews_come_when_they_are_due() {
    #[derive(Default)]
    struct Shown(Vec<(usize, usize)>);
    impl Observer for Shown {
        fn preview(&mut self, p: PreviewPicture<'_>) {
            assert_eq!((p.width, p.height, p.rgb.len()), (1, 1, 3));
            self.0.push((p.image, p.step));
        }
    }
    let shown = |interval, hires: bool| {
        let preview = Some(Preview { mode: PreviewMode::Proj, interval, noisy: false });
        let hires = hires.then(Hires::default);
        let r = ImageRequest { preview, hires, batch_count: Some(2), ..prompt("a") };
        let mut shown = Shown::default();
        drive(&mut Fake::new(), &r, &mut shown, &CancelToken::new()).unwrap();
        shown.0
    };
    assert_eq!(shown(2, false), [(0, 2), (1, 2)]);
    assert_eq!(shown(-3, false), [(0, 3), (1, 3)]);
    assert_eq!(shown(0, true), [(0, 3), (1, 3)]);
    assert_eq!(shown(3, true), [(0, 3), (0, 3), (1, 3), (1, 3)]);
}

#[test]
fn cancelling_stops_before_the_next_step() {
    let mut net = Fake { cancel_at: Some((2, CancelToken::new())), ..Fake::new() };
    let e = generate(&mut net, &prompt("a"), &mut Log::default()).unwrap_err();
    assert!(e.is_cancelled());
    assert_eq!(net.evaluations, 2);
}

#[test]
fn guidance_of_one_needs_no_negative_prompt() {
    let request = ImageRequest { cfg_scale: Some(1.0), negative_prompt: "broken".into(), ..prompt("a") };
    assert!(generate(&mut Fake::new(), &request, &mut Log::default()).is_ok());
}

#[test]
fn any_multiple_of_eight_gives_its_size() {
    let mut log = Log::default();
    let request = ImageRequest { width: Some(72), height: Some(40), ..prompt("a") };
    let image = &generate(&mut Fake::new(), &request, &mut log).unwrap()[0];
    assert_eq!((image.width, image.height, image.rgb.len()), (72, 40, 72 * 40 * 3));
    // It is the middle of the picture that the network computes.
    let whole = ImageRequest { width: Some(128), height: Some(64), ..prompt("a") };
    let whole = &generate(&mut Fake::new(), &whole, &mut Log::default()).unwrap()[0];
    for (y, row) in image.rgb.chunks(72 * 3).enumerate() {
        let from = ((y + 12) * 128 + 28) * 3;
        assert_eq!(row, &whole.rgb[from..from + 72 * 3]);
    }
    assert_eq!(log.warnings, ["width, height: the network computes 128x64; the picture is its middle 72x40"]);
}

#[test]
fn another_sampler_generator_changes_only_the_samplers_noise() {
    use crate::rng::RngKind::{Cpu, Cuda};
    let with = |rng, sampler_rng| ImageRequest { rng: Some(rng), sampler_rng, ..prompt("a") };
    let first = |r: &ImageRequest| {
        struct First(Option<Vec<f32>>);
        impl Observer for First {
            fn step(&mut self, s: StepLatent<'_>) {
                self.0.get_or_insert_with(|| s.denoised.values().to_vec());
            }
        }
        let mut o = First(None);
        let images = drive(&mut Fake::new(), r, &mut o, &CancelToken::new());
        (o.0.unwrap(), images.unwrap().remove(0).rgb)
    };
    let (same, other) = (first(&with(Cuda, Some(Cuda))), first(&with(Cuda, Some(Cpu))));
    assert_eq!(first(&with(Cuda, None)), same);
    assert_eq!(same.0, other.0);
    assert_ne!(same.1, other.1);
    assert_ne!(first(&with(Cpu, None)).0, same.0);
}
