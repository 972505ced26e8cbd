//! From the value a pickle has built to named tensors.

use std::collections::BTreeSet;

use super::pickle::{Id, Pickled, TensorRef, Value};
use crate::cursor::Fault;
use crate::metadata::{Metadata, Value as Meta};
use crate::text::shown;

/// Dictionaries within dictionaries deeper than this are refused.
const MAX_DEPTH: usize = 16;

/// The longest name of a tensor.
const MAX_NAME: usize = 1024;

/// The most tensors, counting those with several names.
const MAX_TENSORS: usize = 1 << 18;

/// The most bytes of text that are kept as metadata, all together.
const MAX_TEXT: usize = 1 << 20;

/// Keys under which training programs keep the state dict, the one to be taken first. The averaged weights of an
/// upscaler are those its authors publish.
const WRAPPERS: &[&str] =
    &["params_ema", "state_dict", "model_state_dict", "params", "model", "module", "net", "generator"];

/// Keys of what only training needs.
const TRAINING: &[&str] =
    &["optimizer", "optimizer_states", "optimizers", "lr_schedulers", "callbacks", "loops", "scaler"];

/// What a tensor is called that is not in any dictionary.
const BARE: &str = "tensor";

/// The named tensors of a pickle, and the numbers and texts beside them.
pub(crate) struct Tree<'a> {
    pub(crate) tensors: Vec<(String, &'a TensorRef)>,
    pub(crate) metadata: Metadata,
}

/// Looks for the state dict in what a pickle has built, and names its tensors, those of dictionaries within it with
/// the outer key and a dot in front.
pub(crate) fn tensors(pickled: &Pickled) -> Result<Tree<'_>, Fault> {
    let mut walk = Walk {
        pickled,
        name: String::new(),
        left: pickled.len(),
        text_left: MAX_TEXT,
        opaque: BTreeSet::new(),
        tree: Tree { tensors: Vec::new(), metadata: Metadata::default() },
    };
    let mut root = pickled.root();
    for _ in 0..MAX_DEPTH {
        match inner(pickled, root) {
            Some(found) => {
                walk.scalars(root)?;
                root = found;
            }
            None => break,
        }
    }
    match root {
        Value::Tensor(_) => {
            walk.name.push_str(BARE);
            walk.value(root, 0)?;
        }
        _ => walk.value(root, 0)?,
    }
    if walk.tree.tensors.is_empty() {
        let held: Vec<&str> = walk.opaque.into_iter().collect();
        let held = if held.is_empty() { String::new() } else { format!("; it holds {}", held.join(", ")) };
        return Err(format!("there is no tensor in this PyTorch file{held}").into());
    }
    Ok(walk.tree)
}

/// The dictionary of tensors in one that wraps it.
fn inner<'a>(pickled: &'a Pickled, root: &Value) -> Option<&'a Value> {
    let Value::Dict(pairs) = root else { return None };
    let keyed = |key: &str| {
        let found = pairs.iter().find(|(k, _)| matches!(pickled.get(*k), Value::Text(t) if **t == *key));
        found.map(|(_, v)| pickled.get(*v))
    };
    // A dictionary that has tensors of its own is a state dict, whatever its keys are called.
    if pairs.iter().any(|(_, v)| matches!(pickled.get(*v), Value::Tensor(_))) {
        return None;
    }
    let full = |v: &&Value| matches!(v, Value::Dict(pairs) if !pairs.is_empty());
    WRAPPERS.iter().find_map(|key| keyed(key).filter(full))
}

struct Walk<'a> {
    pickled: &'a Pickled,
    /// The keys that lead to the present value, with dots between.
    name: String,
    /// How many values may still be looked at. Each is met once, unless dictionaries are shared.
    left: usize,
    /// How many bytes of metadata may still be kept.
    text_left: usize,
    opaque: BTreeSet<&'static str>,
    tree: Tree<'a>,
}

impl<'a> Walk<'a> {
    fn value(&mut self, v: &'a Value, depth: usize) -> Result<(), Fault> {
        self.left = self.left.checked_sub(1).ok_or("its dictionaries share so much that they do not end")?;
        if depth > MAX_DEPTH {
            return Err(
                format!("dictionaries within {} are nested deeper than {MAX_DEPTH}", shown(&self.name)).into()
            );
        }
        match v {
            Value::Tensor(t) => {
                if self.tree.tensors.len() >= MAX_TENSORS {
                    return Err(format!("more than {MAX_TENSORS} tensors").into());
                }
                self.tree.tensors.push((self.name.clone(), t));
            }
            Value::Dict(pairs) => {
                for (k, v) in pairs {
                    let v = self.pickled.get(*v);
                    match self.pickled.get(*k) {
                        Value::Text(key) if depth == 0 && TRAINING.contains(&&**key) => {}
                        Value::Text(key) => self.child(key, v, depth)?,
                        Value::Int(key) => self.child(&key.to_string(), v, depth)?,
                        _ if matches!(v, Value::Tensor(_)) => {
                            let name = shown(&self.name);
                            return Err(format!("a tensor within {name} has a key that is no text").into());
                        }
                        _ => {}
                    }
                }
            }
            other => match other.items() {
                Some(items) => self.items(items, depth)?,
                None => self.scalar(other),
            },
        }
        Ok(())
    }

    fn items(&mut self, items: &'a [Id], depth: usize) -> Result<(), Fault> {
        for (i, id) in items.iter().enumerate() {
            self.child(&i.to_string(), self.pickled.get(*id), depth)?;
        }
        Ok(())
    }

    fn child(&mut self, key: &str, v: &'a Value, depth: usize) -> Result<(), Fault> {
        let len = self.name.len();
        if len + key.len() >= MAX_NAME {
            return Err(format!("a name of {} bytes: {}.{}", len + key.len(), shown(&self.name), shown(key)).into());
        }
        if len > 0 {
            self.name.push('.');
        }
        self.name.push_str(key);
        self.value(v, depth + 1)?;
        self.name.truncate(len);
        Ok(())
    }

    /// Keeps what stands beside a wrapped state dict.
    fn scalars(&mut self, root: &Value) -> Result<(), Fault> {
        let Value::Dict(pairs) = root else { return Ok(()) };
        for (k, v) in pairs {
            self.left = self.left.checked_sub(1).ok_or("its dictionaries share so much that they do not end")?;
            if let Value::Text(key) = self.pickled.get(*k)
                && key.len() < MAX_NAME
            {
                self.name.push_str(key);
                self.scalar(self.pickled.get(*v));
                self.name.clear();
            }
        }
        Ok(())
    }

    fn scalar(&mut self, v: &Value) {
        let meta = match v {
            Value::Bool(v) => Meta::Bool(*v),
            Value::Int(v) => Meta::I64(*v),
            Value::Float(v) => Meta::F64(*v),
            Value::Text(v) => {
                let Some(left) = self.text_left.checked_sub(v.len()) else { return };
                self.text_left = left;
                Meta::String(v.to_string())
            }
            Value::Opaque(what) => {
                self.opaque.insert(what);
                return;
            }
            _ => return,
        };
        if let Some(left) = self.text_left.checked_sub(self.name.len()) {
            self.text_left = left;
            self.tree.metadata.insert(self.name.clone(), meta);
        }
    }
}
