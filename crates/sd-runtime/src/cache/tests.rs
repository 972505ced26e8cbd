use super::*;
use crate::testing::Fixture;

fn near(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let far = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 2e-5, "{what}: off by {far}");
}

#[test]
fn whole_predictions_and_forecasts_agree_with_numpy() {
    let fixture = Fixture::open("caches.safetensors");
    let read = |name: &str| fixture.f32s(name);
    let (inputs, outputs, estimates) = (read("input.inputs"), read("input.outputs"), read("input.estimates"));
    let sigmas = fixture.f64s("input.sigmas");
    let cases = fixture.metadata("config")["cases"].as_object().unwrap().clone();
    assert_eq!(cases.len(), 8);
    let (steps, size) = (sigmas.len(), inputs.len() / sigmas.len());
    for (name, case) in &cases {
        let mode: CacheMode = case["mode"].as_str().unwrap().parse().unwrap();
        let cache = StepCache { option: case["option"].as_str().unwrap().into(), ..StepCache::new(mode) };
        let window: Option<[f64; 2]> = serde_json::from_value(case["window"].clone()).unwrap();
        // The share of the steps is not what is tested here.
        let window = window.unwrap_or([0.0, f64::INFINITY]);
        let level = |share: f64| if share > 0.5 { window[0] } else { window[1] };
        let mut cache = Cache::new(&CacheOptions::new(&cache).unwrap(), steps, 0, &level).unwrap();
        let want = read(&format!("output.{name}"));
        let mut computed = Vec::new();
        for step in 0..steps {
            let row = |all: &[f32], i: usize| all[i * size..(i + 1) * size].to_vec();
            let input = row(&inputs, step);
            let both = [(0, row(&outputs, 2 * step)), (1, row(&outputs, 2 * step + 1))];
            let (got, reused) = match &mut cache {
                Cache::Whole(whole) => match whole.reuse(step, sigmas[step], &input, &[0, 1]) {
                    Some(got) => (got.concat(), true),
                    None => {
                        whole.store(&input, &both);
                        ([both[0].1.clone(), both[1].1.clone()].concat(), false)
                    }
                },
                Cache::Spectrum(spectrum) => match spectrum.forecast(step) {
                    Some(got) => (got, true),
                    None => {
                        spectrum.store(step, row(&estimates, step));
                        (row(&estimates, step), false)
                    }
                },
                Cache::Blocks(_) => panic!("{name}"),
            };
            computed.push(!reused);
            let each = want.len() / steps;
            near(&got, &want[step * each..(step + 1) * each], &format!("{name} step {step}"));
        }
        assert_eq!(computed, serde_json::from_value::<Vec<bool>>(case["computed"].clone()).unwrap(), "{name}");
    }
}

#[test]
fn options_are_read_and_wrong_ones_named() {
    let read = |mode: &str, option: &str| {
        let cache = StepCache { option: option.into(), ..StepCache::new(mode.parse().unwrap()) };
        CacheOptions::new(&cache)
    };
    read("cache-dit", " Fn=2, bn=1,threshold=0.1,warmup=3,max_cached=-1,max_continuous=2,order=2,").unwrap();
    for (mode, option, want) in [
        ("easycache", "threshold", "cache_option: want key=value, got \"threshold\""),
        ("easycache", "decay=1", "cache_option: easycache has no \"decay\", want one of threshold, start, end"),
        ("ucache", "start=0.9,end=0.5", "cache_option: start must be below end"),
        ("ucache", "threshold=-1", "cache_option: threshold wants at least 0"),
        ("ucache", "reset=2", "cache_option: reset wants 0 to 1"),
        ("dbcache", "order=1", "cache_option: dbcache has no \"order\""),
        ("dbcache", "Fn=0", "cache_option: Fn wants 1 to 10000"),
        ("spectrum", "m=x", "cache_option: m wants 1 to 16, got \"x\""),
    ] {
        let e = read(mode, option).unwrap_err();
        assert!(e.is_request() && e.to_string().starts_with(want), "{e}");
    }
    let masked = |mode, count| StepCache { scm_mask: vec![true; count], ..StepCache::new(mode) };
    let e = CacheOptions::new(&masked(CacheMode::UCache, 3)).unwrap_err();
    assert!(e.to_string().starts_with("scm_mask: ucache has none"), "{e}");
    let options = CacheOptions::new(&masked(CacheMode::DbCache, 3)).unwrap();
    let of =
        |steps, blocks| Cache::<usize>::new(&options, steps, blocks, &|share| share).err().map(|e| e.to_string());
    assert_eq!(of(4, 20).unwrap(), "scm_mask: want 4 values, one for each step, got 3");
    assert_eq!(of(3, 8).unwrap(), "cache_option: Fn=8 and Bn=0 leave none of 8 blocks to be cached");
    assert_eq!(of(3, 9), None);
}
