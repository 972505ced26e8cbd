//! The repository keeps its own rules.

#[test]
fn the_repository_is_tidy() {
    let found = xtask::tidy::run(&xtask::repo_root()).unwrap();
    let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert!(lines.is_empty(), "{} findings:\n{}", lines.len(), lines.join("\n"));
}
