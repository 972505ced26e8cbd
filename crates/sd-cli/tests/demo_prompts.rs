//! The demo model draws what the prompt says: shape, colour, background and place, judged from the pixels.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod judge;
mod support;

use judge::{PALETTE, SHAPES, Seen, look};
use sd_runtime::{
    CacheMode, CancelToken, DType, Engine, EngineBuilder, ImageRequest, Observer, SamplerKind, SchedulerKind,
    StepCache,
};

const POSITIONS: [(&str, &str); 9] = [
    ("center", "in the center"),
    ("left", "on the left"),
    ("right", "on the right"),
    ("top", "at the top"),
    ("bottom", "at the bottom"),
    ("top left", "in the top left"),
    ("top right", "in the top right"),
    ("bottom left", "in the bottom left"),
    ("bottom right", "in the bottom right"),
];

/// Every shape four times and every colour and place at least twice, each with what the picture must show.
fn cases() -> Vec<(String, Seen)> {
    (0..36)
        .map(|i| {
            let shape = SHAPES[i % SHAPES.len()];
            let (color, rgb) = PALETTE[(5 * i + i / 12) % PALETTE.len()];
            let (position, place) = POSITIONS[(i + 3 * (i / SHAPES.len())) % POSITIONS.len()];
            // The next palette entry that is clearly another colour.
            let far = |c: &[f64; 3]| c.iter().zip(rgb).map(|(a, b)| (a - b).powi(2)).sum::<f64>() > 150f64.powi(2);
            let around = PALETTE.iter().cycle().skip(7 * i % PALETTE.len());
            let (background, _) = around.into_iter().find(|(_, c)| far(c)).unwrap();
            let seen = Seen { shape, color, background, position: position.into() };
            (format!("{} {shape} {place} on {} background", a(color), a(background)), seen)
        })
        .collect()
}

/// The word with its article.
fn a(word: &str) -> String {
    let article = if word == "orange" { "an" } else { "a" };
    format!("{article} {word}")
}

/// Draws all cases and returns those that show something else.
fn wrong(builder: EngineBuilder) -> Vec<String> {
    let mut engine = builder.model(support::DEMO).threads(1).build().unwrap();
    let mut wrong = Vec::new();
    for (prompt, want) in cases() {
        let request = ImageRequest {
            prompt: prompt.clone(),
            steps: Some(20),
            sampler: Some(SamplerKind::EulerA),
            ..Default::default()
        };
        let images = engine.generate(&request, &mut (), &CancelToken::new()).unwrap();
        let image = &images[0];
        let seen = look(image.width as usize, image.height as usize, &image.rgb);
        if seen.as_ref() != Some(&want) {
            wrong.push(format!("{prompt}: {seen:?}"));
        }
    }
    wrong
}

/// The share of pictures that must be right, in percent.
fn check(builder: EngineBuilder, percent: usize) {
    let (wrong, all) = (wrong(builder), cases().len());
    let right = all - wrong.len();
    assert!(
        100 * right >= percent * all,
        "{right} of {all} are right, want {percent} %; wrong:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn pictures_show_what_the_prompt_says() {
    check(Engine::builder(), 90);
}

#[test]
fn pictures_show_it_with_q8_0_weights_too() {
    check(Engine::builder().weight_type(DType::Q8_0), 85);
}

/// Draws every fifth case and returns those that show something else, of how many.
fn wrong_of_few(engine: &mut Engine, request: &ImageRequest, observer: &mut dyn Observer) -> (Vec<String>, usize) {
    let few: Vec<(String, Seen)> = cases().into_iter().step_by(5).take(7).collect();
    let mut wrong = Vec::new();
    for (prompt, want) in &few {
        let request = ImageRequest { prompt: prompt.clone(), steps: Some(20), ..request.clone() };
        let image = engine.generate(&request, observer, &CancelToken::new()).unwrap().remove(0);
        let seen = look(image.width as usize, image.height as usize, &image.rgb);
        if seen.as_ref() != Some(want) {
            wrong.push(format!("{prompt}: {seen:?}"));
        }
    }
    (wrong, few.len())
}

/// Samplers that extrapolate from earlier steps, for which those of the default schedule are too far apart.
const KARRAS: &[SamplerKind] =
    &[SamplerKind::Ipndm, SamplerKind::IpndmV, SamplerKind::Lms, SamplerKind::DpmPp2mSde, SamplerKind::DpmPp3mSde];
/// CFG++ follows the prompt at scales where plain guidance does little (Chung et al. 2024).
const CFG_PP: f32 = 2.0;

#[test]
fn every_sampler_draws_what_the_prompt_says() {
    let mut engine = Engine::builder().model(support::DEMO).threads(1).build().unwrap();
    let mut failed = Vec::new();
    for name in SamplerKind::names() {
        let sampler: SamplerKind = name.parse().unwrap();
        let request = ImageRequest {
            sampler: Some(sampler),
            scheduler: KARRAS.contains(&sampler).then_some(SchedulerKind::Karras),
            cfg_scale: sampler.uses_base().then_some(CFG_PP),
            ..Default::default()
        };
        let (wrong, all) = wrong_of_few(&mut engine, &request, &mut ());
        if 100 * (all - wrong.len()) < 85 * all {
            failed.push(format!("{name}: {} of {all} are wrong:\n{}", wrong.len(), wrong.join("\n")));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Evaluations that were computed, and all.
#[derive(Default)]
struct Saved(usize, usize);

impl Observer for Saved {
    fn computed(&mut self, _image: usize, computed: usize, evaluations: usize) {
        *self = Saved(self.0 + computed, self.1 + evaluations);
    }
}

/// The most evaluations, in percent, that each mode computes by its defaults.
#[test]
fn step_caches_draw_what_the_prompt_says() {
    let mut engine = Engine::builder().model(support::DEMO).threads(1).build().unwrap();
    for (mode, most) in [(CacheMode::EasyCache, 50), (CacheMode::UCache, 50), (CacheMode::Spectrum, 60)] {
        let sampler = Some(SamplerKind::Euler);
        let request = ImageRequest { sampler, cache: Some(StepCache::new(mode)), ..Default::default() };
        let mut saved = Saved::default();
        let (wrong, all) = wrong_of_few(&mut engine, &request, &mut saved);
        let Saved(computed, evaluations) = saved;
        assert!(100 * (all - wrong.len()) >= 85 * all, "{mode}: {}", wrong.join("\n"));
        assert_eq!(evaluations, 20 * all);
        assert!(100 * computed <= most * evaluations, "{mode} computed {computed} of {evaluations}");
    }
}

#[test]
fn the_cases_cover_shapes_colours_and_places() {
    let cases = cases();
    for shape in SHAPES {
        assert!(cases.iter().filter(|(_, s)| s.shape == shape).count() >= 4, "{shape}");
    }
    for (color, _) in PALETTE {
        assert!(cases.iter().filter(|(_, s)| s.color == color).count() >= 2, "{color}");
    }
    for (position, _) in POSITIONS {
        assert!(cases.iter().filter(|(_, s)| s.position == position).count() >= 2, "{position}");
    }
    assert!(cases.iter().all(|(_, s)| s.color != s.background));
}
