//! `-M metadata` on pictures of this program and of others, and on broken ones.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

mod support;

use sd_io::Image;
use serde_json::Value;
use support::{files, folder, sd_cli};

const TEXT: &str = "a \u{1b}[31mred fox\nNegative prompt: blurry\nSteps: 25, Sampler: DPM++ 2M, CFG scale: 6.5, Seed: 7, Size: 64x48";

/// A picture that carries `text`.
fn picture(extension: &str, text: &str) -> Vec<u8> {
    let image = Image::new(64, 48, vec![90; 64 * 48 * 3]).unwrap();
    match extension {
        "jpg" => image.to_jpeg(90, Some(text)).unwrap(),
        "webp" => image.to_webp(Some(text)).unwrap(),
        _ => image.to_png(Some(text)).unwrap(),
    }
}

#[test]
fn every_format_is_described_in_both_forms() {
    let dir = folder("metadata");
    for (extension, format, entry, structural) in [
        ("png", "PNG", "Chunk: tEXt", "Chunk: IHDR"),
        ("jpg", "JPEG", "Segment: COM", "Segment: SOF0"),
        ("webp", "WEBP", "Chunk: EXIF", "Chunk: VP8X"),
    ] {
        let name = format!("a.{extension}");
        std::fs::write(dir.join(&name), picture(extension, TEXT)).unwrap();
        let run = sd_cli(&dir, &["-M", "metadata", "--image", &name]);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
        let head = format!("File: {name}\nFormat: {format}\n\n");
        assert!(run.stdout.starts_with(&head) && run.stdout.contains(entry), "{}", run.stdout);
        for want in
            ["Generation:\n", "  generator: A1111\n", "  steps: 25\n", "  seed: 7\n", "  negative_prompt: blurry\n"]
        {
            assert!(run.stdout.contains(want), "{extension} {want}: {}", run.stdout);
        }
        assert!(!run.stdout.contains('\u{1b}') && run.stdout.contains("\\u{1b}[31mred fox"), "{}", run.stdout);
        assert!(!run.stdout.contains(structural), "{}", run.stdout);

        let run = sd_cli(&dir, &["-M", "metadata", "--image", &name, "--metadata-all", "--metadata-raw"]);
        assert!(run.stdout.contains(structural) && run.stdout.contains("  raw: "), "{}", run.stdout);

        let run = sd_cli(&dir, &["-M", "metadata", "--image", &name, "--metadata-format", "json"]);
        assert!(run.stdout.starts_with(&format!("{{\n  \"file\": \"{name}\",\n  \"format\": \"{format}\"")));
        let json: Value = serde_json::from_str(&run.stdout).unwrap();
        assert_eq!(json["generation"]["sampler"], "DPM++ 2M");
        let texts = json["entries"].as_array().unwrap().iter().filter(|e| e.to_string().contains("red fox"));
        assert!(texts.count() > 0, "{json}");
    }
    assert_eq!(files(&dir), ["a.jpg", "a.png", "a.webp"], "nothing is written");
}

#[test]
fn brief_reports_cut_long_texts() {
    let dir = folder("metadata-brief");
    let long = format!("{}{}", "x".repeat(239), "é and more");
    std::fs::write(dir.join("a.png"), picture("png", &long)).unwrap();
    let run = sd_cli(&dir, &["-M", "metadata", "--image", "a.png", "--metadata-brief"]);
    assert!(run.stdout.contains(&format!("  text: {}...\n", "x".repeat(239))), "{}", run.stdout);
    let run = sd_cli(&dir, &["-M", "metadata", "--image", "a.png"]);
    assert!(run.stdout.contains("é and more"), "{}", run.stdout);
    std::fs::write(dir.join("b.png"), Image::new(1, 1, vec![0; 3]).unwrap().to_png(None).unwrap()).unwrap();
    let run = sd_cli(&dir, &["-M", "metadata", "--image", "b.png"]);
    assert_eq!(run.stdout, "File: b.png\nFormat: PNG\n\nNo metadata entries found.\n");
}

#[test]
fn broken_pictures_are_errors() {
    let dir = folder("metadata-broken");
    let [png, jpg, webp] = ["png", "jpg", "webp"].map(|e| picture(e, TEXT));
    for (name, bytes, want) in [
        ("cut.png", &png[..60], "PNG: chunk \"tEXt\""),
        ("noend.png", &png[..png.len() - 12], "PNG: the file ends without IEND"),
        ("cut.jpg", &jpg[..jpg.len() - 2], "JPEG: the file ends without EOI"),
        ("marker.jpg", b"\xff\xd8\x00\x00", "JPEG: has 00 00 where a segment begins"),
        ("cut.webp", &webp[..webp.len() - 4], "WEBP: its header claims"),
        ("text.png", b"hello", "unsupported image format"),
        ("empty.png", b"", "unsupported image format"),
    ] {
        std::fs::write(dir.join(name), bytes).unwrap();
        let run = sd_cli(&dir, &["-M", "metadata", "--image", name]);
        assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{name}");
        assert!(run.stderr.contains(want) && run.stderr.contains(name), "{name}: {}", run.stderr);
    }
    // A part that makes no sense is no reason to hide the others.
    let mut bad = png.clone();
    bad[50] ^= 1; // in the text, whose checksum stays
    std::fs::write(dir.join("sum.png"), bad).unwrap();
    let run = sd_cli(&dir, &["-M", "metadata", "--image", "sum.png"]);
    assert!(run.code == Some(0) && run.stdout.contains("  error: its checksum is "), "{}", run.stdout);
    for args in [&["-M", "metadata"][..], &["-M", "metadata", "--image", "absent.png"]] {
        let run = sd_cli(&dir, args);
        assert!(run.code == Some(1) && run.stderr.contains("--image"), "{}", run.stderr);
    }
    let run = sd_cli(&dir, &["-M", "metadata", "--image", "sum.png", "--metadata-format", "xml"]);
    assert!(run.code == Some(1) && run.stderr.contains("--metadata-format"), "{}", run.stderr);
}
