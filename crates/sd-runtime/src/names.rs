//! Options that are picked by name: parsing, printing, and the message for a name that does not exist.

use sd_core::{Error, Result};
use sd_models::text::similar::distance;

/// How much of a wrong name a message repeats.
const LONGEST_SHOWN: usize = 60;

/// A named choice among `all`, or a request error that lists them and suggests the nearest one.
pub(crate) fn pick<T: Copy>(option: &str, given: &str, all: &[(&'static str, T)]) -> Result<T> {
    if let Some((_, value)) = all.iter().find(|(name, _)| *name == given) {
        return Ok(*value);
    }
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let shown: String = given.chars().take(LONGEST_SHOWN).collect();
    let mut message = format!("{option}: no {shown:?}");
    if let Some(name) = nearest(given, names.iter().copied()) {
        message.push_str(&format!(", did you mean {name}?"));
    }
    message.push_str(&format!(" (one of {})", names.join(", ")));
    Err(Error::request(message))
}

/// The name most like `given`, if one is like it at all.
pub fn nearest<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let lower: String = given.chars().take(LONGEST_SHOWN).flat_map(char::to_lowercase).collect();
    let near = names.map(|name| (distance(&name.to_lowercase(), &lower), name)).min();
    near.filter(|(d, name)| *d * 2 <= name.len()).map(|(_, name)| name)
}

/// The name of `value` in a table: the first one when it has several.
pub(crate) fn name_of<T: PartialEq>(all: &[(&'static str, T)], value: &T) -> &'static str {
    all.iter().find(|(_, v)| v == value).map_or("?", |(name, _)| name)
}

/// Gives an option type its `NAME` table: `FromStr`, `Display`, serde by name, and `names()`.
macro_rules! named {
    ($type:ident, $option:literal, [$(($name:literal, $value:expr)),+ $(,)?]) => {
        impl $type {
            const NAMES: &[(&'static str, $type)] = &[$(($name, $value)),+];

            /// Every name the option takes, in order.
            pub fn names() -> impl Iterator<Item = &'static str> {
                Self::NAMES.iter().map(|(name, _)| *name)
            }

            /// The option's value as the command line spells it.
            pub fn name(self) -> &'static str {
                $crate::names::name_of(Self::NAMES, &self)
            }
        }

        impl std::str::FromStr for $type {
            type Err = sd_core::Error;

            fn from_str(s: &str) -> sd_core::Result<$type> {
                $crate::names::pick($option, s, Self::NAMES)
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<$type, D::Error> {
                let name = <std::borrow::Cow<'de, str>>::deserialize(d)?;
                name.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use named;

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &[(&str, u8)] = &[("euler", 1), ("euler_a", 2), ("dpm++2m", 3)];

    #[test]
    fn wrong_names_are_answered_with_the_nearest() {
        assert_eq!(pick("s", "dpm++2m", ALL).unwrap(), 3);
        let e = pick("sampler", "euler_b", ALL).unwrap_err();
        assert!(e.is_request());
        assert_eq!(
            e.to_string(),
            "sampler: no \"euler_b\", did you mean euler_a? (one of euler, euler_a, dpm++2m)"
        );
        assert!(pick("sampler", &"x".repeat(1 << 20), ALL).unwrap_err().to_string().len() < 200);
        let e = pick("sampler", "plms", ALL).unwrap_err();
        assert_eq!(e.to_string(), "sampler: no \"plms\" (one of euler, euler_a, dpm++2m)");
    }
}
