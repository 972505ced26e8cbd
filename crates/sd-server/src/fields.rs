//! The fields of a JSON request, taken one by one, so that every complaint names its field and what nobody took is
//! known.

use crate::failure::Failure;
use crate::limits;
use base64::Engine as _;
use sd_io::Image;
use sd_runtime::{ImageRequest, InputImage};
use serde_json::{Map, Value};

/// The fields of a JSON object that have not been taken yet. `null` counts as absent.
#[derive(Debug)]
pub(crate) struct Fields {
    /// What names are prefixed with in messages.
    prefix: String,
    left: Map<String, Value>,
    /// Of the pictures that were read, which are bounded together.
    pixels: u64,
}

impl Fields {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Fields, Failure> {
        let left = object("the body", body)?;
        Ok(Fields { prefix: String::new(), left, pixels: 0 })
    }

    /// Reads an object that stands elsewhere, after which its fields are named, for a request that has pictures of
    /// `pixels` already.
    pub(crate) fn parse_in(name: &str, text: &[u8], pixels: u64) -> Result<Fields, Failure> {
        let left = object(name, text)?;
        Ok(Fields { prefix: format!("{name}."), left, pixels })
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.left.remove(name).filter(|v| !v.is_null())
    }

    fn wrong(&self, name: &str, want: impl std::fmt::Display, got: &Value) -> Failure {
        let prefix = &self.prefix;
        match got {
            Value::Number(n) => Failure::bad(format!("{prefix}{name}: want {want}, got {n}")),
            got => Failure::bad(format!("{prefix}{name}: want {want}, got {}", kind(got))),
        }
    }

    /// A string.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Failure> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", &other)),
        }
    }

    /// A whole number from `least` to `most`.
    pub(crate) fn whole(&mut self, name: &str, least: i64, most: i64) -> Result<Option<i64>, Failure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        // JavaScript and Lua clients write 20.0 for 20. Every whole f64 below 2^53 is exact.
        let float = value.as_f64().filter(|v| v.fract() == 0.0 && v.abs() < (1u64 << 53) as f64);
        match value.as_i64().or(float.map(|v| v as i64)).filter(|v| (least..=most).contains(v)) {
            Some(number) => Ok(Some(number)),
            None if (least, most) == (i64::MIN, i64::MAX) => Err(self.wrong(name, "a whole number", &value)),
            None => Err(self.wrong(name, format_args!("a whole number from {least} to {most}"), &value)),
        }
    }

    /// A whole number from `least` to `most`, which fit into 32 bits.
    pub(crate) fn small(&mut self, name: &str, least: u32, most: u32) -> Result<Option<u32>, Failure> {
        let number = self.whole(name, least.into(), most.into())?;
        Ok(number.and_then(|n| u32::try_from(n).ok()))
    }

    /// A number.
    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f32>, Failure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().map(|v| v as f32).filter(|v| v.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, "a number", &value)),
        }
    }

    /// A number in full precision.
    pub(crate) fn double(&mut self, name: &str) -> Result<Option<f64>, Failure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong(name, "a number", &value))
    }

    /// A list of at most `most` numbers.
    pub(crate) fn numbers(&mut self, name: &str, most: usize) -> Result<Option<Vec<f64>>, Failure> {
        self.list(name, most, "numbers", Value::as_f64)
    }

    /// A list of at most `most` whole numbers of 0 or more.
    pub(crate) fn indices(&mut self, name: &str, most: usize) -> Result<Option<Vec<usize>>, Failure> {
        self.list(name, most, "whole numbers of 0 or more", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn list<T>(
        &mut self,
        name: &str,
        most: usize,
        want: &str,
        one: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, Failure> {
        let want = format!("a list of at most {most} {want}");
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) if list.len() <= most => {
                let one = |item| one(item).ok_or_else(|| self.wrong(name, &want, item));
                list.iter().map(one).collect::<Result<_, _>>().map(Some)
            }
            Some(other) => Err(self.wrong(name, want, &other)),
        }
    }

    /// A number of 0 or more.
    pub(crate) fn not_negative(&mut self, name: &str) -> Result<Option<f32>, Failure> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().map(|v| v as f32).filter(|v| v.is_finite() && *v >= 0.0) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(name, "a number of 0 or more", &value)),
        }
    }

    /// An object, whose fields are named after it.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields>, Failure> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(left)) => {
                Ok(Some(Fields { prefix: format!("{}{name}.", self.prefix), left, pixels: self.pixels }))
            }
            Some(other) => Err(self.wrong(name, "an object", &other)),
        }
    }

    /// A list of at most `most` objects, whose fields are named after it.
    pub(crate) fn objects(&mut self, name: &str, most: usize) -> Result<Option<Vec<Fields>>, Failure> {
        const WANT: &str = "a list of objects";
        let list = match self.take(name) {
            None => return Ok(None),
            Some(Value::Array(list)) if list.len() <= most => list,
            Some(Value::Array(_)) => {
                return Err(Failure::bad(format!("{}{name}: want at most {most} objects", self.prefix)));
            }
            Some(other) => return Err(self.wrong(name, WANT, &other)),
        };
        let prefix = format!("{}{name}.", self.prefix);
        let one = |item: Value| match item {
            Value::Object(left) => Ok(Fields { prefix: prefix.clone(), left, pixels: self.pixels }),
            other => Err(self.wrong(name, WANT, &other)),
        };
        list.into_iter().map(one).collect::<Result<_, _>>().map(Some)
    }

    /// A name that `find` knows, which may also be empty for none.
    pub(crate) fn choice<T>(
        &mut self,
        name: &str,
        find: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, Failure> {
        let Some(text) = self.text(name)?.filter(|t| !t.is_empty()) else { return Ok(None) };
        find(&text).map(Some).map_err(|e| Failure::bad(format!("{}{name}: {e}", self.prefix)))
    }

    /// `true` or `false`; numbers count as in Python.
    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, Failure> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(Value::Number(n)) => Ok(Some(n.as_f64() != Some(0.0))),
            Some(other) => Err(self.wrong(name, "true or false", &other)),
        }
    }

    /// A picture in base64, with or without the beginning of a data URL.
    pub(crate) fn picture(&mut self, name: &str) -> Result<Option<InputImage>, Failure> {
        let Some(text) = self.text(name)?.filter(|text| !text.is_empty()) else { return Ok(None) };
        self.decode(name, &text).map(Some)
    }

    /// Pictures, as [`Fields::picture`] reads them.
    pub(crate) fn pictures(&mut self, name: &str) -> Result<Vec<InputImage>, Failure> {
        let list = match self.take(name) {
            None => return Ok(Vec::new()),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(self.wrong(name, "a list of pictures", &other)),
        };
        if list.len() > limits::PICTURES {
            let prefix = &self.prefix;
            return Err(Failure::bad(format!("{prefix}{name}: want at most {} pictures", limits::PICTURES)));
        }
        let one = |item: Value| match item {
            Value::String(text) => self.decode(name, &text),
            other => Err(self.wrong(name, "a list of strings", &other)),
        };
        list.into_iter().map(one).collect()
    }

    fn decode(&mut self, name: &str, text: &str) -> Result<InputImage, Failure> {
        let wrong = |what: String| Failure::bad(format!("{}{name}: {what}", self.prefix));
        let text = match text.split_once(',') {
            Some((head, rest)) if head.starts_with("data:") => rest,
            _ => text,
        };
        let bytes = base64::prelude::BASE64_STANDARD.decode(text.trim());
        let bytes = bytes.map_err(|e| wrong(format!("want base64: {e}")))?;
        let image = Image::decode_within(&bytes, limits::PICTURE_PIXELS).map_err(|e| wrong(e.to_string()))?;
        let (width, height) = (image.width(), image.height());
        let pixels = u64::from(width) * u64::from(height);
        let all = self.pixels + pixels;
        if all > limits::REQUEST_PIXELS {
            let most = limits::REQUEST_PIXELS;
            return Err(wrong(format!("want at most {most} pixels in all pictures together, got {all}")));
        }
        self.pixels = all;
        Ok(InputImage { width, height, rgb: image.rgb().to_vec() })
    }

    /// An error if one of these fields asks for something; false, zero, -1 and what is empty do not.
    pub(crate) fn unsupported(&mut self, names: &[&str]) -> Result<(), Failure> {
        for name in names {
            if self.take(name).is_some_and(|v| !is_neutral(&v)) {
                return Err(Failure::bad(format!("{}{name}: not supported yet", self.prefix)));
            }
        }
        Ok(())
    }

    /// Drops fields that cannot change a picture.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        self.left.retain(|name, _| !names.contains(&name.as_str()));
    }

    /// An error if a field that nobody took asks for something.
    pub(crate) fn refuse_rest(&self) -> Result<(), Failure> {
        match self.left.iter().find(|(_, v)| !is_neutral(v)) {
            Some((name, _)) => Err(Failure::bad(format!("{}{}: not supported yet", self.prefix, shortened(name)))),
            None => Ok(()),
        }
    }

    /// A message for each field that nobody took.
    pub(crate) fn unknown(&self) -> Vec<String> {
        let asks = self.left.iter().filter(|(_, v)| !is_neutral(v));
        asks.map(|(name, _)| format!("{}{}: unknown, ignored", self.prefix, shortened(name))).collect()
    }
}

/// Bytes of the pictures that a request brings along.
pub(crate) fn picture_bytes(request: &ImageRequest) -> usize {
    let single = request.init_image.iter().chain(&request.control_image);
    let controls = request.controls.iter().map(|c| &c.image);
    let pictures: usize = single.chain(&request.ref_images).chain(controls).map(|image| image.rgb.len()).sum();
    pictures + request.mask.as_ref().map_or(0, |mask| mask.values.len())
}

fn object(what: &str, text: &[u8]) -> Result<Map<String, Value>, Failure> {
    if text.is_empty() {
        return Err(Failure::bad(format!("{what} is empty, want a JSON object")));
    }
    // In memory a value takes up to sixteen times its two bytes of text.
    if text.iter().filter(|byte| **byte == b',').count() > limits::COMMAS {
        return Err(Failure::bad(format!("{what} has more than {} commas", limits::COMMAS)));
    }
    match serde_json::from_slice(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(Failure::bad(format!("{what} is {}, want a JSON object", kind(&other)))),
        Err(e) => Err(Failure::bad(format!("{what} is not JSON: {e}"))),
    }
}

fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_f64().is_some_and(|v| v == 0.0 || v == -1.0),
        Value::String(s) => s.is_empty() || s == "None",
        Value::Array(a) => a.is_empty(),
        Value::Object(o) => o.is_empty(),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The beginning of a text that a client chose, for messages.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(json: &str) -> Fields {
        Fields::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn bodies() {
        for (body, part) in [
            ("", "empty"),
            ("[1]", "is a list, want a JSON object"),
            ("{\"a\":", "not JSON"),
            ("\u{0}", "not JSON"),
            (&"[".repeat(100_000), "not JSON"),
            (&format!("{{\"a\":[{}1]}}", "1,".repeat(limits::COMMAS + 1)), "commas"),
        ] {
            let e = Fields::parse(body.as_bytes()).unwrap_err();
            assert!(e.message().contains(part), "{part}: {}", e.message());
        }
    }

    #[test]
    fn pictures_are_bounded_one_by_one_and_together() {
        let file = |width, height| {
            let rgb = vec![0; width as usize * height as usize * 3];
            crate::app::base64(&Image::new(width, height, rgb).unwrap().to_png(None).unwrap())
        };
        let mut f = Fields::parse(serde_json::json!({"a": file(4097, 4096)}).to_string().as_bytes()).unwrap();
        assert_eq!(
            f.picture("a").unwrap_err().message(),
            "a: picture: 4097x4096 pixels, between 1 and 16777216 are read"
        );
        let (large, small) = (file(4096, 4096), file(1, 1));
        let json = serde_json::json!({"a": large, "b": [large], "c": small}).to_string();
        let mut f = Fields::parse(json.as_bytes()).unwrap();
        assert_eq!(f.picture("a").unwrap().unwrap().width, 4096);
        assert_eq!(f.pictures("b").unwrap().len(), 1);
        let e = f.picture("c").unwrap_err();
        assert_eq!(e.message(), "c: want at most 33554432 pixels in all pictures together, got 33554433");
        let json = serde_json::json!({"c": small}).to_string();
        let mut f = Fields::parse_in("x", json.as_bytes(), limits::REQUEST_PIXELS).unwrap();
        assert!(f.picture("c").unwrap_err().message().starts_with("x.c: want at most 33554432"));
    }

    #[test]
    fn values_of_another_kind_name_the_field() {
        let json = r#"{"a":"x","b":1.5,"c":-3,"d":1e400,"e":[],"f":true,"g":9007199254740993}"#;
        // 1e400 is no f64, so this is not JSON to the parser.
        assert!(Fields::parse(json.as_bytes()).is_err());
        let mut f = fields(r#"{"a":"x","b":1.5,"c":-3,"e":[],"f":true,"g":20.0,"h":null,"i":3e38}"#);
        assert_eq!(f.whole("a", 0, 5).unwrap_err().message(), "a: want a whole number from 0 to 5, got a string");
        assert_eq!(f.whole("b", 0, 5).unwrap_err().message(), "b: want a whole number from 0 to 5, got 1.5");
        assert_eq!(f.not_negative("c").unwrap_err().message(), "c: want a number of 0 or more, got -3");
        assert_eq!(f.text("e").unwrap_err().message(), "e: want a string, got a list");
        assert_eq!(f.object("f").unwrap_err().message(), "f: want an object, got a boolean");
        assert_eq!(f.small("g", 1, 20).unwrap(), Some(20));
        assert_eq!(f.small("h", 1, 20).unwrap(), None);
        assert_eq!(f.not_negative("i").unwrap(), Some(3e38));
        assert!(f.unknown().is_empty());
    }

    #[test]
    fn what_asks_for_nothing_may_be_there() {
        let mut f = fields(r#"{"a":false,"b":[],"c":-1,"d":{"x":1},"e":"None","odd":7,"even":0}"#);
        f.unsupported(&["a", "b", "c", "e", "missing"]).unwrap();
        assert_eq!(f.unsupported(&["d"]).unwrap_err().message(), "d: not supported yet");
        assert_eq!(f.unknown(), ["odd: unknown, ignored"]);
        let mut inner = fields(r#"{"o":{"p":true}}"#).object("o").unwrap().unwrap();
        assert_eq!(inner.text("p").unwrap_err().message(), "o.p: want a string, got a boolean");
    }
}
