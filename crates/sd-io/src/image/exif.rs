//! The EXIF fields that carry generation parameters: UserComment, tag 0x9286 of the Exif directory, and the texts of the
//! main directory that ComfyUI uses. Source: Exif 2.3, sections 4.6.3 to 4.6.5.

const EXIF_DIRECTORY: u16 = 0x8769;
const USER_COMMENT: u16 = 0x9286;
const BYTE: u16 = 1;
const ASCII: u16 = 2;
const LONG: u16 = 4;
const UNDEFINED: u16 = 7;

/// The EXIF block of a picture whose only field is the comment `text`, in UTF-16 with the high byte first, which is
/// how the web UIs that read this field expect it.
pub(crate) fn with_comment(text: &str) -> Vec<u8> {
    let mut comment = b"UNICODE\0".to_vec();
    comment.extend(text.encode_utf16().flat_map(u16::to_be_bytes));
    let mut out = b"MM\0\x2a".to_vec();
    out.extend_from_slice(&8u32.to_be_bytes());
    let mut directory = |tag: u16, kind: u16, count: u32, value: u32| {
        out.extend_from_slice(&1u16.to_be_bytes());
        out.extend_from_slice(&tag.to_be_bytes());
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&count.to_be_bytes());
        out.extend_from_slice(&value.to_be_bytes());
        out.extend_from_slice(&0u32.to_be_bytes()); // no next directory
    };
    directory(EXIF_DIRECTORY, LONG, 1, 26);
    directory(USER_COMMENT, UNDEFINED, u32::try_from(comment.len()).unwrap_or(u32::MAX), 44);
    out.extend_from_slice(&comment);
    out
}

/// The comment in an EXIF block, if there is one that is text.
pub(crate) fn comment(exif: &[u8]) -> Option<String> {
    let (tiff, main) = Tiff::open(exif)?;
    let (_, _, directory) = tiff.field(main, EXIF_DIRECTORY)?;
    let at = tiff.u32(directory)?;
    let (kind, count, value) = tiff.field(at, USER_COMMENT)?;
    // Up to four bytes of a value stand in the field itself; the character code alone takes eight. Some writers call
    // the value bytes.
    if !matches!(kind, UNDEFINED | BYTE) || count < 8 {
        return None;
    }
    let start = tiff.u32(value)?;
    let bytes = exif.get(start..start.checked_add(count)?)?;
    let (code, text) = bytes.split_first_chunk::<8>()?;
    match code {
        b"UNICODE\0" => Some(utf16(text)),
        b"ASCII\0\0\0" | [0, 0, 0, 0, 0, 0, 0, 0] => {
            let text = String::from_utf8_lossy(text);
            Some(text.trim_end_matches('\0').to_owned())
        }
        _ => None,
    }
}

/// Fields of the main directory that hold texts.
const TEXTS: [(u16, &str); 4] =
    [(0x010e, "ImageDescription"), (0x010f, "Make"), (0x0110, "Model"), (0x0131, "Software")];

/// The texts of the main directory, by the names of their fields.
pub(crate) fn texts(exif: &[u8]) -> Vec<(&'static str, String)> {
    let Some((tiff, main)) = Tiff::open(exif) else { return Vec::new() };
    let text = |tag: u16| {
        let (kind, count, value) = tiff.field(main, tag)?;
        let start = if count > 4 { tiff.u32(value)? } else { value };
        let bytes = exif.get(start..start.checked_add(count)?).filter(|_| kind == ASCII)?;
        Some(String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned())
    };
    TEXTS.iter().filter_map(|(tag, name)| Some((*name, text(*tag)?))).collect()
}

/// Writers disagree on the byte order, so the one with more Latin characters counts.
pub(crate) fn utf16(text: &[u8]) -> String {
    let units = text.as_chunks::<2>().0;
    let latin_be = units.iter().filter(|u| u[0] == 0).count();
    let latin_le = units.iter().filter(|u| u[1] == 0).count();
    let decode = if latin_le > latin_be { u16::from_le_bytes } else { u16::from_be_bytes };
    let units: Vec<u16> = units.iter().map(|u| decode(*u)).collect();
    String::from_utf16_lossy(&units).trim_end_matches('\0').to_owned()
}

/// A block of directories.
pub(crate) struct Tiff<'a> {
    pub(crate) bytes: &'a [u8],
    /// Whether the high byte of a number comes first.
    pub(crate) big: bool,
}

impl<'a> Tiff<'a> {
    /// The block, and where its main directory is.
    pub(crate) fn open(bytes: &'a [u8]) -> Option<(Tiff<'a>, usize)> {
        let big = match bytes.first_chunk()? {
            b"MM\0\x2a" => true,
            b"II\x2a\0" => false,
            _ => return None,
        };
        let tiff = Tiff { bytes, big };
        let main = tiff.u32(4)?;
        Some((tiff, main))
    }

    pub(crate) fn u16(&self, at: usize) -> Option<u16> {
        let b = *self.bytes.get(at..)?.first_chunk()?;
        Some(if self.big { u16::from_be_bytes(b) } else { u16::from_le_bytes(b) })
    }

    pub(crate) fn u32(&self, at: usize) -> Option<usize> {
        let b = *self.bytes.get(at..)?.first_chunk()?;
        usize::try_from(if self.big { u32::from_be_bytes(b) } else { u32::from_le_bytes(b) }).ok()
    }

    /// Type, count and place of the value of a field in the directory at `at`.
    fn field(&self, at: usize, tag: u16) -> Option<(u16, usize, usize)> {
        let entries = usize::from(self.u16(at)?);
        for i in 0..entries {
            let at = at.checked_add(2 + 12 * i)?;
            if self.u16(at)? == tag {
                return Some((self.u16(at + 2)?, self.u32(at + 4)?, at + 8));
            }
        }
        None
    }
}
