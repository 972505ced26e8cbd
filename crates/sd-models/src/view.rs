//! The tensors of one part of a model under the names that the networks use, however the file spells and lays them out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use sd_core::{Bytes, DType, Error, Origin, Result, Shape, TensorMeta, WeightSource, convert};

use crate::names::{Form, Spelling};

/// A file's tensors of one part, renamed, and joined, cut or turned where the file lays them out otherwise.
pub(crate) struct View {
    file: Arc<dyn WeightSource>,
    /// The file, what is scaled in it as values.
    values: Arc<dyn WeightSource>,
    spelling: Spelling,
    entries: BTreeMap<String, Entry>,
    /// Names of tensors that cannot be made of what the file has, with what is wrong. They are listed without shape, so
    /// that asking for one fails even where a network could do without.
    broken: BTreeMap<String, String>,
}

/// How a tensor is made.
struct Entry {
    /// Names in the file, in the order they are joined.
    sources: Vec<String>,
    form: Form,
    meta: TensorMeta,
}

impl Entry {
    /// Whether elements stand elsewhere than in the file.
    fn moves(&self) -> bool {
        !matches!(self.form, Form::Same | Form::Slice { .. })
    }
}

impl View {
    /// The tensors `names` of `file`, which `values` reads.
    pub(crate) fn new(
        file: Arc<dyn WeightSource>,
        values: Arc<dyn WeightSource>,
        spelling: Spelling,
        names: &[&str],
    ) -> View {
        let mut found: BTreeMap<String, BTreeMap<usize, (Form, String)>> = BTreeMap::new();
        for name in names {
            for (here, form) in spelling.here(name) {
                let place = if let Form::Part(i) = form { i } else { 0 };
                found.entry(here).or_default().entry(place).or_insert_with(|| (form, (*name).to_owned()));
            }
        }
        let (mut entries, mut broken) = (BTreeMap::new(), BTreeMap::new());
        for (here, parts) in found {
            let forms: BTreeSet<Form> = parts.values().map(|p| p.0.whole()).collect();
            let sources: Vec<String> = parts.into_values().map(|p| p.1).collect();
            let absent: Vec<String> =
                spelling.file(&here).into_iter().filter(|n| values.meta(n).is_none()).collect();
            if matches!(forms.first(), Some(Form::Part(_))) && !absent.is_empty() {
                broken.insert(here, absent.join(" + "));
                continue;
            }
            let metas: Vec<TensorMeta> = sources.iter().filter_map(|n| values.meta(n)).collect();
            let made = match forms.first() {
                Some(&form) if forms.len() == 1 && metas.len() == sources.len() => {
                    meta_of(form, &metas).map(|meta| (form, meta))
                }
                _ => None,
            };
            if let Some((form, meta)) = made {
                entries.insert(here, Entry { sources, form, meta });
            } else {
                let list = sources.iter().zip(&metas).map(|(n, m)| format!("{n} {} {}", m.shape, m.dtype));
                let what = format!("{here} (of {})", list.collect::<Vec<_>>().join(" + "));
                broken.insert(here, what);
            }
        }
        View { file, values, spelling, entries, broken }
    }

    /// The file.
    pub(crate) fn file(&self) -> &Arc<dyn WeightSource> {
        &self.file
    }

    /// The names in the file of the tensors that make one here.
    pub(crate) fn sources(&self, here: &str) -> &[String] {
        self.entries.get(here).map_or(&[], |e| &e.sources)
    }

    /// How many bytes the tensors take in the file.
    pub(crate) fn file_bytes(&self) -> u64 {
        let metas = self.file_metas().into_iter();
        metas.filter_map(|m| m.dtype.bytes(m.shape.elements(), m.shape.last())).map(|n| n as u64).sum()
    }

    /// Shapes and types of the tensors in the file.
    pub(crate) fn file_metas(&self) -> Vec<TensorMeta> {
        let names: BTreeSet<&String> = self.entries.values().flat_map(|e| &e.sources).collect();
        names.into_iter().filter_map(|n| self.file.meta(n)).collect()
    }

    /// A tensor of the file, as `dtype`.
    fn read(&self, name: &str, dtype: DType) -> Result<Bytes> {
        let bytes = self.values.bytes(name)?;
        match self.values.meta(name) {
            Some(m) if m.dtype != dtype => {
                let values = convert::to_f32(m.dtype, &bytes.read()?, m.shape.elements())?;
                convert::from_f32(dtype, &values, m.shape.last()).map(Bytes::from)
            }
            _ => Ok(bytes),
        }
    }
}

impl WeightSource for View {
    fn names(&self) -> Vec<&str> {
        self.entries.keys().chain(self.broken.keys()).map(String::as_str).collect()
    }

    fn meta(&self, name: &str) -> Option<TensorMeta> {
        self.entries.get(name).map(|e| e.meta)
    }

    fn bytes(&self, name: &str) -> Result<Bytes> {
        let Some(entry) = self.entries.get(name) else {
            let Origin { name, file } = self.origin(name);
            return Err(Error::missing(name, file));
        };
        let mut parts = Vec::with_capacity(entry.sources.len());
        for source in &entry.sources {
            let part = self.read(source, entry.meta.dtype)?;
            // What is only passed on stays where it is mapped.
            parts.push(if entry.moves() { part.read()? } else { part });
        }
        laid_out(entry.form, &entry.meta, &parts).ok_or_else(|| {
            let Origin { name, file } = self.origin(name);
            Error::bad_file(file, format!("{name} has {} bytes", parts.iter().map(|p| p.len()).sum::<usize>()))
        })
    }

    fn is_made(&self, name: &str) -> bool {
        let converted =
            |source: &String, e: &Entry| self.values.meta(source).is_none_or(|m| m.dtype != e.meta.dtype);
        let made = |source: &String, e: &Entry| self.values.is_made(source) || converted(source, e);
        self.entries.get(name).is_some_and(|e| e.moves() || e.sources.iter().any(|s| made(s, e)))
    }

    fn origin(&self, name: &str) -> Origin {
        let sources = match self.entries.get(name) {
            Some(e) => e.sources.clone(),
            None => self.spelling.file(name),
        };
        let origins: Vec<Origin> = sources.iter().map(|n| self.file.origin(n)).collect();
        let file = origins.first().map(|o| o.file.clone()).unwrap_or_default();
        let names = match self.broken.get(name) {
            Some(what) => what.clone(),
            None => origins.into_iter().map(|o| o.name).collect::<Vec<_>>().join(" + "),
        };
        Origin { name: names, file }
    }
}

/// Shape and type of what `form` makes; `None` if it makes nothing of these.
fn meta_of(form: Form, sources: &[TensorMeta]) -> Option<TensorMeta> {
    let first = sources.first()?;
    if form == Form::Same {
        return Some(*first);
    }
    let rows = *first.shape.dims().first()?;
    let shape = match form {
        Form::Same => first.shape,
        Form::Part(_) => {
            let mut rows = 0usize;
            for s in sources {
                let n = *s.shape.dims().first()?;
                if s.shape.with_dim(0, 1).ok()? != first.shape.with_dim(0, 1).ok()? {
                    return None;
                }
                rows = rows.checked_add(n)?;
            }
            first.shape.with_dim(0, rows).ok()?
        }
        Form::Slice { part, of } if part < of && rows.is_multiple_of(of) => {
            first.shape.with_dim(0, rows / of).ok()?
        }
        Form::Swap if rows.is_multiple_of(2) => first.shape,
        Form::Transpose => {
            let [n, k] = first.shape.array()?;
            Shape::new(&[k, n]).ok()?
        }
        Form::Slice { .. } | Form::Swap => return None,
    };
    // Blocks lie within rows, so that rows move whole whatever their type. Else all is done in f32.
    let row = first.shape.elements() / rows.max(1);
    let keeps = match form {
        Form::Transpose => first.dtype.block() == 1,
        _ => sources.iter().all(|s| s.dtype == first.dtype) && first.dtype.bytes(row, first.shape.last()).is_some(),
    };
    Some(TensorMeta { shape, dtype: if keeps { first.dtype } else { DType::F32 } })
}

/// The bytes that `form` makes of `sources`, all of the type in `meta`; `None` if there are not enough of them.
fn laid_out(form: Form, meta: &TensorMeta, sources: &[Bytes]) -> Option<Bytes> {
    let first = sources.first()?;
    let out = match form {
        Form::Same => return Some(first.clone()),
        Form::Slice { part, of } => {
            let n = first.len() / of.max(1);
            return first.slice(part * n..(part + 1) * n);
        }
        Form::Part(_) => sources.iter().map(|s| &**s).collect::<Vec<_>>().concat(),
        Form::Swap => {
            let (a, b) = first.split_at_checked(first.len() / 2)?;
            [b, a].concat()
        }
        Form::Transpose => {
            let [k, n] = meta.shape.array()?;
            let size = meta.dtype.block_bytes();
            let mut out = Vec::with_capacity(first.len());
            for column in 0..k {
                for row in 0..n {
                    let at = (row * k + column) * size;
                    out.extend_from_slice(first.get(at..at + size)?);
                }
            }
            out
        }
    };
    Some(Bytes::from(out))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Row;

    /// Tensors of given types, and a table of rows for them.
    struct File(Vec<(&'static str, Vec<usize>, DType, Vec<u8>)>);

    impl WeightSource for File {
        fn names(&self) -> Vec<&str> {
            self.0.iter().map(|t| t.0).collect()
        }

        fn meta(&self, name: &str) -> Option<TensorMeta> {
            let t = self.0.iter().find(|t| t.0 == name)?;
            Some(TensorMeta { shape: Shape::new(&t.1).unwrap(), dtype: t.2 })
        }

        fn bytes(&self, name: &str) -> Result<Bytes> {
            Ok(Bytes::from(self.0.iter().find(|t| t.0 == name).unwrap().3.clone()))
        }

        fn origin(&self, name: &str) -> Origin {
            Origin { name: name.into(), file: "heron.gguf".into() }
        }
    }

    fn tensor(
        name: &'static str,
        dims: &[usize],
        dtype: DType,
        from: usize,
    ) -> (&'static str, Vec<usize>, DType, Vec<u8>) {
        let n: usize = dims.iter().product();
        let values: Vec<f32> = (from..from + n).map(|v| v as f32).collect();
        (name, dims.to_vec(), dtype, convert::from_f32(dtype, &values, *dims.last().unwrap()).unwrap())
    }

    fn view(file: File, rows: &[(&str, &str, Form)]) -> View {
        let rows = rows.iter().map(|(file, here, form)| Row::new(*file, *here, &[]).form(*form)).collect();
        let names: Vec<&str> = file.0.iter().map(|t| t.0).collect();
        let file: Arc<dyn WeightSource> = Arc::new(File(file.0.clone()));
        View::new(file.clone(), file, Spelling::new("", rows), &names)
    }

    fn values(v: &View, name: &str) -> Vec<f32> {
        let m = v.meta(name).unwrap();
        convert::to_f32(m.dtype, &v.bytes(name).unwrap(), m.shape.elements()).unwrap()
    }

    const QKV: &[(&str, &str, Form)] =
        &[("q", "qkv", Form::Part(0)), ("k", "qkv", Form::Part(1)), ("v", "qkv", Form::Part(2))];

    #[test]
    fn rows_of_several_tensors_are_joined_in_their_order() {
        for dtype in [DType::F32, DType::BF16] {
            let file = vec![
                tensor("v.w", &[2, 2], dtype, 6),
                tensor("q.w", &[1, 2], dtype, 0),
                tensor("k.w", &[2, 2], dtype, 2),
            ];
            let v = view(File(file), QKV);
            assert_eq!(v.names(), ["qkv.w"]);
            assert_eq!(v.meta("qkv.w").unwrap(), TensorMeta { shape: Shape::new(&[5, 2]).unwrap(), dtype });
            assert_eq!(values(&v, "qkv.w"), (0..10).map(|v| v as f32).collect::<Vec<_>>());
            assert_eq!(v.origin("qkv.w"), Origin { name: "q.w + k.w + v.w".into(), file: "heron.gguf".into() });
            assert_eq!(v.sources("qkv.w"), ["q.w", "k.w", "v.w"]);
        }
    }

    #[test]
    fn quantised_rows_stay_quantised_unless_their_types_differ() {
        let make = |types: [DType; 3]| {
            let parts = ["q.w", "k.w", "v.w"].into_iter().zip(types).enumerate();
            view(File(parts.map(|(i, (n, t))| tensor(n, &[1, 64], t, 64 * i)).collect()), QKV)
        };
        let same = make([DType::Q8_0; 3]);
        assert_eq!(same.meta("qkv.w").unwrap().dtype, DType::Q8_0);
        let mixed = make([DType::Q8_0, DType::F16, DType::Q8_0]);
        assert_eq!(mixed.meta("qkv.w").unwrap().dtype, DType::F32);
        assert_eq!(values(&same, "qkv.w")[..64], values(&mixed, "qkv.w")[..64]);
        assert_eq!(values(&mixed, "qkv.w")[64..128], (64..128).map(|v| v as f32).collect::<Vec<_>>());
        // 96 quantised values in one row are not halves of whole blocks.
        let one = view(File(vec![tensor("a", &[96], DType::Q8_0, 0)]), &[("a", "b", Form::Swap)]);
        assert_eq!(one.meta("b").unwrap().dtype, DType::F32);
        assert!((values(&one, "b")[0] - 48.0).abs() < 0.5);
    }

    #[test]
    fn halves_slices_and_axes_move() {
        let file = || File(vec![tensor("a", &[2, 3], DType::F16, 0)]);
        let v = view(file(), &[("a", "b", Form::Swap)]);
        assert_eq!(values(&v, "b"), [3.0, 4.0, 5.0, 0.0, 1.0, 2.0]);
        let v = view(file(), &[("a", "b", Form::Transpose)]);
        assert_eq!(v.meta("b").unwrap().shape.dims(), [3, 2]);
        assert_eq!(values(&v, "b"), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        let halves = [("a", "b", Form::Slice { part: 0, of: 2 }), ("a", "c", Form::Slice { part: 1, of: 2 })];
        let v = view(file(), &halves);
        assert_eq!((values(&v, "b"), values(&v, "c")), (vec![0.0, 1.0, 2.0], vec![3.0, 4.0, 5.0]));
        assert_eq!(v.file_bytes(), 12);
        assert_eq!(v.origin("c").name, "a");
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let v = view(File(vec![tensor("q.w", &[1, 2], DType::F32, 0), tensor("v.w", &[1, 2], DType::F32, 0)]), QKV);
        assert_eq!((v.names(), v.meta("qkv.w")), (vec!["qkv.w"], None));
        assert_eq!(v.bytes("qkv.w").unwrap_err().to_string(), "k.w: missing from heron.gguf");
        assert_eq!(v.bytes("qkv.b").unwrap_err().to_string(), "q.b + k.b + v.b: missing from heron.gguf");
        let parts = ["q.w", "k.w", "v.w"].map(|n| tensor(n, &[1, if n == "k.w" { 3 } else { 2 }], DType::F32, 0));
        let v = view(File(parts.to_vec()), QKV);
        assert_eq!(
            v.bytes("qkv.w").unwrap_err().to_string(),
            "qkv.w (of q.w [1, 2] f32 + k.w [1, 3] f32 + v.w [1, 2] f32): missing from heron.gguf"
        );
    }
}
