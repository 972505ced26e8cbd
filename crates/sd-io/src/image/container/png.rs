//! Chunks of PNG. Source: PNG specification, third edition, section 11.

use std::io::Read;

use flate2::Crc;
use flate2::read::ZlibDecoder;
use serde_json::{Value, json};

use super::super::texts::{MAX_TEXT, utf8_or_latin1};
use super::{Decoded, Entry, EntryType, be32, count, exif};

/// The chunks after the signature.
pub(super) fn entries(mut rest: &[u8]) -> Result<Vec<Entry>, String> {
    let mut out = Vec::new();
    loop {
        count(&out)?;
        let head = rest.split_first_chunk::<8>();
        let ([a, b, c, d, name @ ..], tail) = head.ok_or("the file ends without IEND")?;
        let shown = utf8_or_latin1(name);
        let len = u32::from_be_bytes([*a, *b, *c, *d]);
        let cut = || format!("chunk {shown:?} of {len} bytes leaves the file");
        let (data, tail) = usize::try_from(len).ok().and_then(|n| tail.split_at_checked(n)).ok_or_else(cut)?;
        let (crc, tail) = tail.split_first_chunk::<4>().ok_or_else(cut)?;
        rest = tail;
        let mut sum = Crc::new();
        sum.update(name);
        sum.update(data);
        let stored = u32::from_be_bytes(*crc);
        let decoded = match stored == sum.sum() {
            true => decode(name, data),
            false => Err(format!("its checksum is {stored:08x}, its bytes give {:08x}", sum.sum())),
        };
        let structural = matches!(name, b"IHDR" | b"PLTE" | b"IDAT" | b"IEND");
        let mut entry = Entry::new(EntryType::Chunk, &shown, data, decoded, structural);
        entry.crc = Some(format!("{stored:08x}"));
        entry.critical = Some(name.first().is_some_and(u8::is_ascii_uppercase));
        out.push(entry);
        if name == b"IEND" {
            return Ok(out);
        }
    }
}

fn decode(name: &[u8; 4], data: &[u8]) -> Decoded {
    let short = || format!("is {} bytes long, which is too short", data.len());
    let value = match name {
        b"IHDR" => header(data).ok_or_else(short)?,
        b"tEXt" => {
            let (keyword, text) = split(data)?;
            json!({"keyword": utf8_or_latin1(keyword), "text": utf8_or_latin1(text)})
        }
        b"zTXt" => {
            let (keyword, text) = split(data)?;
            let text = inflate(text)?;
            json!({"keyword": utf8_or_latin1(keyword), "text": utf8_or_latin1(&text)})
        }
        b"iTXt" => international(data)?,
        b"eXIf" => exif::tree(data)?,
        b"iCCP" => {
            let (name, profile) = split(data)?;
            json!({"name": utf8_or_latin1(name), "bytes": inflate(profile)?.len()})
        }
        b"gAMA" => json!({"gamma": f64::from(be32(data, 0).ok_or_else(short)?) / 1e5}),
        b"cHRM" => {
            let point = |i: usize| Some([be32(data, i)?, be32(data, i + 4)?].map(|v| f64::from(v) / 1e5));
            let points = || Some([point(0)?, point(8)?, point(16)?, point(24)?]);
            let [white, red, green, blue] = points().ok_or_else(short)?;
            json!({"white": white, "red": red, "green": green, "blue": blue})
        }
        b"sRGB" => {
            let intents = ["perceptual", "relative colorimetric", "saturation", "absolute colorimetric"];
            let code = data.first().ok_or_else(short)?;
            let intent = intents.get(usize::from(*code)).ok_or_else(|| format!("names the intent {code}"))?;
            json!({"rendering_intent": intent})
        }
        b"pHYs" => {
            let unit = if data.get(8).ok_or_else(short)? == &1 { "metre" } else { "unknown" };
            json!({"x": be32(data, 0), "y": be32(data, 4), "unit": unit})
        }
        b"tIME" => {
            let &[a, b, month, day, hour, minute, second] = data.first_chunk().ok_or_else(short)?;
            let year = u16::from_be_bytes([a, b]);
            json!({"time": format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")})
        }
        _ => return Ok(None),
    };
    Ok(Some(value))
}

fn header(data: &[u8]) -> Option<Value> {
    let &[depth, color, compression, filter, interlace] = data.get(8..)?.first_chunk()?;
    let color = match color {
        0 => "grey".to_owned(),
        2 => "RGB".to_owned(),
        3 => "palette".to_owned(),
        4 => "grey and alpha".to_owned(),
        6 => "RGBA".to_owned(),
        other => other.to_string(),
    };
    Some(json!({"width": be32(data, 0)?, "height": be32(data, 4)?, "bit_depth": depth, "color_type": color,
        "compression": compression, "filter": filter, "interlace": interlace}))
}

/// A keyword and what follows the NUL after it.
fn split(data: &[u8]) -> Result<(&[u8], &[u8]), String> {
    let end = data.iter().position(|b| *b == 0).ok_or("has no end of its keyword")?;
    Ok((data.get(..end).unwrap_or_default(), data.get(end + 1..).unwrap_or_default()))
}

/// What follows a byte that names the method of compression, of which there is one.
fn inflate(data: &[u8]) -> Result<Vec<u8>, String> {
    let packed = data.strip_prefix(b"\0").ok_or("is compressed in a way that is not known")?;
    unpack(packed)
}

fn unpack(packed: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    ZlibDecoder::new(packed)
        .take(MAX_TEXT + 1)
        .read_to_end(&mut out)
        .map_err(|e| format!("does not unpack: {e}"))?;
    if out.len() as u64 > MAX_TEXT {
        return Err(format!("unpacks to more than {MAX_TEXT} bytes"));
    }
    Ok(out)
}

fn international(data: &[u8]) -> Result<Value, String> {
    let (keyword, rest) = split(data)?;
    let (&[compressed, _method], rest) = rest.split_first_chunk().ok_or("is too short")?;
    let (language, rest) = split(rest)?;
    let (translated, text) = split(rest)?;
    let text = if compressed == 1 { unpack(text)? } else { text.to_vec() };
    let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(json!({"keyword": utf8_or_latin1(keyword), "compressed": compressed == 1, "language": lossy(language),
        "translated_keyword": lossy(translated), "text": lossy(&text)}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        // The values of sRGB: PNG specification, section 11.3.3.3.
        let numbers = [31270u32, 32900, 64000, 33000, 30000, 60000, 15000, 6000];
        let data: Vec<u8> = numbers.iter().flat_map(|v| v.to_be_bytes()).collect();
        let got = decode(b"cHRM", &data).unwrap().unwrap();
        assert_eq!(got["white"], json!([0.3127, 0.329]));
        assert_eq!(got["blue"], json!([0.15, 0.06]));
        assert_eq!(decode(b"gAMA", &45455u32.to_be_bytes()), Ok(Some(json!({"gamma": 0.45455}))));
        assert_eq!(decode(b"sRGB", &[1]), Ok(Some(json!({"rendering_intent": "relative colorimetric"}))));
        let time = decode(b"tIME", &[7, 208, 2, 29, 23, 59, 60]).unwrap().unwrap();
        assert_eq!(time["time"], "2000-02-29T23:59:60Z");
        for name in
            [b"IHDR", b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"iCCP", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"tIME"]
        {
            assert!(decode(name, &[]).is_err(), "{name:?}");
        }
    }
}
