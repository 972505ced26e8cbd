//! Names of an oracle's network in two spellings.

use crate::names::{Form, Part, Spelling};

/// `[original name, shape, operation, [diffusers name, ..]]` of a tensor.
pub(crate) type Place = (String, Vec<usize>, String, Vec<String>);

/// Holds the detected spelling to every place of a diffusion network, both ways.
pub(crate) fn check_places(places: &[Place]) {
    let files: Vec<&str> = places.iter().flat_map(|p| &p.3).map(String::as_str).collect();
    assert!(!files.is_empty());
    let spelling = Spelling::detect(Part::Diffusion, "", &files);
    for (here, _, operation, sources) in places {
        assert_eq!(&spelling.file(here), sources);
        for (i, source) in sources.iter().enumerate() {
            let form = match operation.as_str() {
                "same" => Form::Same,
                "rows" => Form::Part(i),
                "swap" => Form::Swap,
                other => panic!("{other}"),
            };
            assert_eq!(spelling.here(source), [(here.clone(), form)]);
        }
    }
}
