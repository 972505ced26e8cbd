//! Pictures in and out. `tests/data/make.py` made the files with Pillow.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers outside of test functions

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::Dir;
use sd_io::{Image, read_parameters};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn near(image: &Image, x: u32, y: u32, want: [u8; 3], within: u8) {
    let got = image.pixel(x, y).unwrap();
    let off = got.iter().zip(want).map(|(a, b)| a.abs_diff(b)).max().unwrap();
    assert!(off <= within, "({x}, {y}) is {got:?}, want {want:?} within {within}");
}

#[test]
fn formats() {
    // Each is 8 wide and 16 high, red above blue.
    let cases = [
        ("lossless.webp", 0),
        ("lossy.webp", 6),
        ("palette.gif", 0),
        ("palette.png", 0),
        ("plain.tga", 0),
        ("packed.tga", 0),
        ("plain.bmp", 0),
        ("plain.ppm", 0),
        ("turned.jpg", 6),
        ("turned.png", 0),
        ("turned.webp", 0),
    ];
    for (name, within) in cases {
        let image = Image::open(data(name)).unwrap();
        assert_eq!((image.width(), image.height()), (8, 16), "{name}");
        for (y, colour) in [(0, [255, 0, 0]), (6, [255, 0, 0]), (9, [0, 0, 255]), (15, [0, 0, 255])] {
            near(&image, 0, y, colour, within);
            near(&image, 7, y, colour, within);
        }
    }
    let image = Image::open(data("cmyk.jpg")).unwrap();
    assert_eq!((image.width(), image.height()), (16, 8));
    near(&image, 1, 1, [0, 255, 255], 4);
    near(&image, 14, 6, [255, 255, 0], 4);
    // 16 bits scale by 255 / 65535, so 0x80ff is 128.49; grey repeats, alpha goes.
    assert_eq!(Image::open(data("grey16.png")).unwrap().rgb(), [0, 0, 0, 128, 128, 128, 255, 255, 255]);
    assert_eq!(Image::open(data("alpha.png")).unwrap().rgb(), [10, 20, 30, 40, 50, 60]);
    assert_eq!(Image::open(data("grey-alpha.png")).unwrap().rgb(), [10, 10, 10, 40, 40, 40]);
    // Red and blue in grey are 0.299 and 0.114 of 255.
    let image = Image::open(data("grey.jpg")).unwrap();
    near(&image, 3, 2, [76; 3], 3);
    near(&image, 3, 13, [29; 3], 3);
}

/// A smooth picture, kind to JPEG.
fn gradient(width: u32, height: u32) -> Image {
    let pixels = (0..height).flat_map(|y| (0..width).map(move |x| [(x * 2) as u8, (y * 3) as u8, (x + y) as u8]));
    Image::new(width, height, pixels.flatten().collect()).unwrap()
}

#[test]
fn alpha_is_kept_apart_and_written_where_a_format_has_it() {
    let image = Image::open(data("alpha.png")).unwrap();
    let alpha = image.alpha().unwrap().to_vec();
    assert_eq!(alpha.len(), 2);
    assert!(alpha.iter().any(|a| *a != 255), "{alpha:?}");
    for bytes in [image.to_png(None).unwrap(), image.to_webp(None).unwrap()] {
        assert_eq!(Image::decode(&bytes).unwrap(), image);
    }
    assert_eq!(Image::decode(&image.to_jpeg(90, None).unwrap()).unwrap().alpha(), None);
    assert_eq!(Image::open(data("plain.bmp")).unwrap().alpha(), None);
    let opaque = gradient(2, 1).with_alpha(vec![255, 255]).unwrap();
    assert_eq!(Image::decode(&opaque.to_png(None).unwrap()).unwrap(), gradient(2, 1));
    assert!(gradient(2, 1).with_alpha(vec![1]).is_err());
}

#[test]
fn png_keeps_pixels_and_jpeg_nearly() {
    let image = gradient(100, 70);
    let back = Image::decode(&image.to_png(Some("p")).unwrap()).unwrap();
    assert_eq!(back, image);
    for (quality, within) in [(0, 12), (90, 12), (100, 4), (255, 4)] {
        let back = Image::decode(&image.to_jpeg(quality, Some("p")).unwrap()).unwrap();
        assert_eq!((back.width(), back.height()), (100, 70));
        for (x, y) in [(3, 3), (50, 40), (99, 69)] {
            near(&back, x, y, image.pixel(x, y).unwrap(), within);
        }
    }
    let len = |q| image.to_jpeg(q, None).unwrap().len();
    assert!(len(10) < len(90) && len(90) < len(100));
    assert_eq!(len(0), len(90));
}

#[test]
fn parameters_written_by_pillow() {
    let text = |name: &str| read_parameters(&fs::read(data(name)).unwrap());
    assert_eq!(text("text-ascii.png").as_deref(), Some("a cat\nSteps: 20"));
    assert_eq!(text("text-latin.png").as_deref(), Some("café\nSteps: 20"));
    assert_eq!(text("text-wide.png").as_deref(), Some("猫 🐈\nSteps: 20"));
    assert_eq!(text("text-packed.png"), Some("a cat ".repeat(50)));
    assert_eq!(text("text-packed-wide.png"), Some("猫 ".repeat(50)));
    assert_eq!(text("alpha.png"), None);
    assert_eq!(text("turned.jpg"), None);
    assert_eq!(text("plain.bmp"), None);
}

#[test]
fn our_chunk_is_pillows_chunk() {
    let image = Image::new(1, 1, vec![0; 3]).unwrap();
    for (name, text) in [("ascii", "a cat\nSteps: 20"), ("latin", "café\nSteps: 20"), ("wide", "猫 🐈\nSteps: 20")]
    {
        let theirs = fs::read(data(&format!("text-{name}.png"))).unwrap();
        let ours = image.to_png(Some(text)).unwrap();
        // From the end of IHDR to the end of the text chunk, checksum included.
        let len = u32::from_be_bytes(theirs[33..37].try_into().unwrap()) as usize;
        assert_eq!(ours[33..33 + 12 + len], theirs[33..33 + 12 + len], "{name}");
    }
}

#[test]
fn parameters_round_trip() {
    let image = gradient(16, 16);
    let long = "word, ".repeat(5_000);
    let odd = "Ã© is what é in UTF-8 looks like in Latin-1";
    for text in ["", "a cat", "multi\nline: <lora:x:1>, \"q\"", "café", "猫 🐈 ё", odd, &long] {
        let png = image.to_png(Some(text)).unwrap();
        assert_eq!(read_parameters(&png).as_deref(), Some(text));
        assert_eq!(Image::decode(&png).unwrap(), image);
        let jpeg = image.to_jpeg(90, Some(text)).unwrap();
        assert_eq!(read_parameters(&jpeg).as_deref(), Some(text));
        let webp = image.to_webp(Some(text)).unwrap();
        assert_eq!(read_parameters(&webp).as_deref(), Some(text));
        assert_eq!(Image::decode(&webp).unwrap(), image);
    }
    assert_eq!(read_parameters(&image.to_webp(None).unwrap()), None);
    assert!(image.to_webp(Some("a\0b")).unwrap_err().to_string().contains("NUL"));
    assert_eq!(read_parameters(&image.to_png(None).unwrap()), None);
    assert_eq!(read_parameters(&image.to_jpeg(90, None).unwrap()), None);
    assert!(image.to_png(Some("a\0b")).unwrap_err().to_string().contains("NUL"));
    // Longer than any JPEG segment: the picture is written without it.
    let jpeg = image.to_jpeg(90, Some(&"w".repeat(70_000))).unwrap();
    assert_eq!(read_parameters(&jpeg), None);
    assert_eq!(Image::decode(&jpeg).unwrap().width(), 16);
}

/// The start of a JPEG file with an EXIF user comment, laid out as Exif 2.3 says.
fn with_exif(big: bool, code: &[u8; 8], text: &[u8]) -> Vec<u8> {
    let n16 = |v: u16| if big { v.to_be_bytes() } else { v.to_le_bytes() };
    let n32 = |v: u32| if big { v.to_be_bytes() } else { v.to_le_bytes() };
    let mut tiff = if big { b"MM\0\x2a".to_vec() } else { b"II\x2a\0".to_vec() };
    tiff.extend(n32(8));
    // Two fields, the second a pointer to the Exif directory at 8 + 2 + 24 + 4.
    tiff.extend(n16(2));
    tiff.extend([&n16(0x0112)[..], &n16(3), &n32(1), &n16(1), &[0, 0]].concat());
    tiff.extend([&n16(0x8769)[..], &n16(4), &n32(1), &n32(38), &n32(0)].concat());
    tiff.extend(n16(1));
    tiff.extend([&n16(0x9286)[..], &n16(7), &n32(8 + text.len() as u32), &n32(56), &n32(0)].concat());
    tiff.extend_from_slice(code);
    tiff.extend_from_slice(text);
    let mut out = vec![0xff, 0xd8, 0xff, 0xe1];
    out.extend((tiff.len() as u16 + 8).to_be_bytes());
    out.extend(b"Exif\0\0");
    out.extend(tiff);
    out.extend([0xff, 0xd9]);
    out
}

#[test]
fn exif_comments_of_other_programs() {
    let text = "café 猫, Steps: 20";
    let be: Vec<u8> = text.encode_utf16().flat_map(u16::to_be_bytes).collect();
    let le: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for big in [false, true] {
        for utf16 in [&be, &le] {
            assert_eq!(read_parameters(&with_exif(big, b"UNICODE\0", utf16)).as_deref(), Some(text));
        }
        assert_eq!(read_parameters(&with_exif(big, b"ASCII\0\0\0", b"a cat\0")).as_deref(), Some("a cat"));
        assert_eq!(read_parameters(&with_exif(big, b"JIS\0\0\0\0\0", b"a cat")), None);
    }
    // Our own block reads as one with the same layout and a single field.
    let jpeg = gradient(8, 8).to_jpeg(90, Some("é")).unwrap();
    let at = jpeg.windows(8).position(|w| w == b"UNICODE\0").unwrap();
    assert_eq!(jpeg[at + 8..at + 10], [0x00, 0xe9]);
    let comment = [&[0xff, 0xfe, 0, 15][..], b"parameters\0", "é".as_bytes()].concat();
    assert!(jpeg.windows(comment.len()).any(|w| w == comment));
}

#[test]
fn saving() {
    let dir = Dir::new();
    let image = gradient(20, 10);
    for name in ["a/b/x.png", "x.PNG", "x.jpg", "x.JPEG", "x.jpe", "x.webp"] {
        let path = dir.path().join(name);
        image.save(&path, 95, Some("text")).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.starts_with(b"\x89PNG"), name.to_lowercase().ends_with("png"), "{name}");
        assert_eq!(read_parameters(&bytes).as_deref(), Some("text"));
    }
    for name in ["x.gif", "x"] {
        let path = dir.path().join(name);
        let e = image.save(&path, 90, None).unwrap_err().to_string();
        assert!(e.contains(name) && e.contains("written as .png, .jpg"), "{e}");
        assert!(!path.exists());
    }
    dir.write("file", b"");
    let e = image.save(dir.path().join("file/x.png"), 90, None).unwrap_err().to_string();
    assert!(e.contains("file"), "{e}");
}

/// A PNG header that claims a size; the checksum is right.
fn png_of(width: u32, height: u32) -> Vec<u8> {
    let mut png = fs::read(data("alpha.png")).unwrap();
    png[16..20].copy_from_slice(&width.to_be_bytes());
    png[20..24].copy_from_slice(&height.to_be_bytes());
    let mut crc = flate2::Crc::new();
    crc.update(&png[12..29]);
    png[29..33].copy_from_slice(&crc.sum().to_be_bytes());
    png
}

#[test]
fn broken_pictures_are_errors() {
    let dir = Dir::new();
    let good = fs::read(data("lossless.webp")).unwrap();
    let mut bmp = fs::read(data("plain.bmp")).unwrap();
    bmp[18..26].copy_from_slice(&[0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 0x7f]);
    // The frame header is a marker, its length, the bits per sample, the height and the width.
    let mut jpeg = fs::read(data("cmyk.jpg")).unwrap();
    let frame = jpeg.windows(2).position(|w| w == [0xff, 0xc0]).unwrap();
    jpeg[frame + 5..frame + 7].copy_from_slice(&4_000u16.to_be_bytes());
    jpeg[frame + 7..frame + 9].copy_from_slice(&30_000u16.to_be_bytes());
    jpeg.resize(444, 0);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty.png", vec![], "the picture is empty"),
        ("text.png", b"hello, this is no picture at all".to_vec(), "not a picture: expected PNG"),
        ("bomb.png", png_of(100_000, 100_000), "100000x100000 pixels"),
        ("wide.png", png_of(2_000_000_000, 1), "Png: Memory limit exceeded"),
        ("zero.png", png_of(0, 5), "Png: "),
        ("bomb.bmp", bmp, ""),
        ("bomb.ppm", b"P6 400000000 400000000 255\n".to_vec(), ""),
        ("hdr.png", b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 1 +X 1\n".to_vec(), "not supported: expected PNG"),
        ("tiff.png", b"II*\0\x08\0\0\0".to_vec(), "not supported: expected PNG"),
        ("claims.jpg", jpeg, "444 bytes cannot hold 30000x4000 pixels"),
        ("claims.png", png_of(11_000, 11_000), "bytes cannot hold 11000x11000 pixels"),
        ("cut.webp", good[..30].to_vec(), "WebP: "),
        ("cut.png", fs::read(data("alpha.png")).unwrap()[..40].to_vec(), "Png: "),
        ("cut.gif", fs::read(data("palette.gif")).unwrap()[..30].to_vec(), "Gif: "),
    ];
    for (name, bytes, want) in cases {
        let path = dir.write(name, &bytes);
        let message = match Image::open(&path) {
            Ok(image) => panic!("{name} opened as a {image:?}"),
            Err(e) => e.to_string(),
        };
        assert!(message.contains(name) && message.contains(want), "{name}: {message:?} lacks {want:?}");
        assert!(Image::decode(&bytes).unwrap_err().is_request());
    }
    // The most a file can hold in few bytes is still read.
    let plain = Image::new(2_000, 2_000, vec![9; 12_000_000]).unwrap();
    assert_eq!(Image::decode(&plain.to_png(None).unwrap()).unwrap(), plain);
    assert_eq!(Image::decode(&plain.to_jpeg(1, None).unwrap()).unwrap().width(), 2_000);
    assert!(Image::open(dir.path()).unwrap_err().to_string().contains("not a regular file"));
    assert!(Image::new(2, 2, vec![0; 11]).is_err() && Image::new(0, 2, vec![]).is_err());
}

#[test]
fn what_is_cut_off_is_an_error_and_sizes_are_refused_before_decoding() {
    let image = gradient(64, 48);
    let progressive = fs::read(data("turned.jpg")).unwrap();
    for jpeg in [image.to_jpeg(90, None).unwrap(), image.to_jpeg(90, Some("a text")).unwrap(), progressive] {
        assert!(Image::decode(&jpeg).is_ok());
        for missing in [2, 3, 10, jpeg.len() / 4] {
            let e = Image::decode(&jpeg[..jpeg.len() - missing]).unwrap_err().to_string();
            assert!(e.contains("Jpeg"), "{missing}: {e}");
        }
        // What stands after the end is no part of the picture.
        assert!(Image::decode(&[&jpeg[..], b"\0\0trailer"].concat()).is_ok());
    }
    let e = Image::decode(&image.to_jpeg(90, None).unwrap()[..900]).unwrap_err().to_string();
    assert!(e.contains("the end is missing"), "{e}");

    let png = image.to_png(None).unwrap();
    assert!(Image::decode_within(&png, 64 * 48).is_ok());
    // The header says enough: the pixels are not there.
    let e = Image::decode_within(&png[..60], 64 * 48 - 1).unwrap_err();
    assert!(e.is_request() && e.to_string().contains("64x48 pixels, between 1 and 3071 are read"), "{e}");
}
