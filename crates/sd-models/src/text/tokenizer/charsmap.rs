//! The character maps that SentencePiece models carry: a double array of byte strings and what replaces each.
//!
//! ```text
//! u32      bytes of the array
//! u32 ..   units of the array (darts-clone's layout)
//! u8 ..    replacements in UTF-8, each ended by NUL; a value of the array is the offset of one
//! ```

use unicode_segmentation::UnicodeSegmentation;

/// A map from characters, or short runs of them, to text.
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

impl Charsmap {
    /// The map in `bytes`, the `precompiled_charsmap` of a model.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub(super) fn parse(bytes: &[u8]) -> Result<Charsmap, String> {
        let (size, rest) = bytes.split_first_chunk().ok_or("the map is cut short")?;
        let size = u32::from_le_bytes(*size) as usize;
        let (array, text) = rest.split_at_checked(size).ok_or("the map is cut short")?;
        let (units, []) = array.as_chunks() else { return Err(format!("an array of {size} bytes")) };
        let replacements = std::str::from_utf8(text).map_err(|e| format!("replacements: {e}"))?;
        Ok(Charsmap {
            units: units.iter().map(|u| u32::from_le_bytes(*u)).collect(),
            replacements: replacements.into(),
        })
    }

    /// `text` with its characters replaced, as `tokenizers` does it: a short cluster of characters whose start is in
    /// the map is replaced whole, others character by character.
    pub(super) fn apply(&self, text: &str) -> String {
        /// Clusters of this many bytes are taken apart without being looked up.
        const LONG: usize = 6;
        let mut out = String::with_capacity(text.len());
        for cluster in text.graphemes(true) {
            if let Some(new) = Some(cluster).filter(|c| c.len() < LONG).and_then(|c| self.replacement(c)) {
                out.push_str(new);
                continue;
            }
            for part in cluster.split_inclusive(|_| true) {
                out.push_str(self.replacement(part).unwrap_or(part));
            }
        }
        out
    }

    /// What replaces the shortest key that `text` starts with.
    fn replacement(&self, text: &str) -> Option<&str> {
        let start = self.shortest(text.as_bytes())?;
        self.replacements.get(start..)?.split('\0').next()
    }

    /// The value of the shortest key that `text` starts with. A unit holds the byte that leads to it, the distance
    /// to its children and whether a key ends there; the value of a key is the child of byte 0.
    fn shortest(&self, text: &[u8]) -> Option<usize> {
        const BYTE: u32 = 0x8000_00ff;
        const VALUE: u32 = 0x7fff_ffff;
        let ends = |unit: u32| unit >> 8 & 1 == 1;
        let distance = |unit: u32| (unit >> 10) << ((unit & 1 << 9) >> 6);

        let mut at = distance(*self.units.first()?);
        for &byte in text.iter().take_while(|b| **b != 0) {
            at ^= u32::from(byte);
            let unit = *self.units.get(at as usize)?;
            if unit & BYTE != u32::from(byte) {
                return None;
            }
            at ^= distance(unit);
            if ends(unit) {
                return Some((self.units.get(at as usize)? & VALUE) as usize);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_maps_are_refused_or_harmless() {
        assert!(Charsmap::parse(&[]).is_err());
        assert!(Charsmap::parse(&[5, 0, 0, 0, 1, 2]).is_err());
        assert!(Charsmap::parse(&[5, 0, 0, 0, 1, 2, 3, 4, 5]).is_err());
        assert!(Charsmap::parse(&[0, 0, 0, 0, 0xff]).is_err());
        let texts = ["", "a", "é猫", "\0", "e\u{301}"];
        for unit in [0, 0x161, u32::MAX, 1 << 8, 1 << 9, 0x7fff_ffff, 0x8000_00ff] {
            let mut bytes = vec![0, 4, 0, 0];
            bytes.extend(std::iter::repeat_n(u32::to_le_bytes(unit), 256).flatten());
            bytes.extend("é".as_bytes());
            let map = Charsmap::parse(&bytes).unwrap();
            texts.iter().for_each(|t| drop(map.apply(t)));
        }
    }
}
