//! The pickle machine, reduced to what builds data. Values live in an arena, so that shared and cyclic ones cost
//! nothing and nothing recurses. Source of the opcodes: `pickletools` of the Python standard library.

use std::collections::HashMap;

use sd_core::DType;

use super::classes::{self, Class};
use crate::cursor::{Cursor, Fault};
use crate::text::shown;

/// The most values a pickle may build; the largest checkpoints need some hundred thousand.
const MAX_VALUES: usize = 1 << 21;

/// A value's place in the arena.
pub(crate) type Id = u32;

/// What a pickle can build.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Box<str>),
    /// A number of more than 64 bits, low byte first.
    Long(Box<[u8]>),
    Tuple(Box<[Id]>),
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Class(Class),
    Storage(Box<StorageRef>),
    Tensor(Box<TensorRef>),
    /// Something that is not looked into, and what it is.
    Opaque(&'static str),
}

impl Value {
    /// The items of a tuple or a list.
    pub(crate) fn items(&self) -> Option<&[Id]> {
        match self {
            Value::Tuple(items) => Some(items),
            Value::List(items) => Some(items),
            _ => None,
        }
    }

    /// The value, if it is a number.
    pub(crate) fn int(&self) -> Option<i64> {
        match self {
            Value::Int(v) => Some(*v),
            _ => None,
        }
    }
}

/// A storage as a pickle refers to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StorageRef {
    /// Its name among the storages of the file.
    pub(crate) key: String,
    /// Its elements; `None` for one that is counted in bytes.
    pub(crate) dtype: Option<DType>,
    /// How many elements there are.
    pub(crate) numel: u64,
    /// The part of it that is meant, in elements, if it is not all.
    pub(crate) view: Option<std::ops::Range<u64>>,
}

/// A tensor: part of a storage.
#[derive(Debug, Clone)]
pub(crate) struct TensorRef {
    pub(crate) storage: StorageRef,
    pub(crate) dtype: DType,
    /// The first element.
    pub(crate) offset: u64,
    pub(crate) dims: Vec<u64>,
    pub(crate) strides: Vec<u64>,
}

/// What stands for objects that a pickle leaves to its container.
pub(crate) enum Persistent<'a> {
    /// The file has none.
    None,
    /// Tuples that name storages.
    Storages,
    /// Numbers of tensors and storages that were read before.
    Known(&'a HashMap<i64, Value>),
}

/// A machine that has stopped: every value, and which one is the result.
pub(crate) struct Pickled {
    values: Vec<Value>,
    root: Id,
}

impl Pickled {
    pub(crate) fn root(&self) -> &Value {
        self.get(self.root)
    }

    pub(crate) fn get(&self, id: Id) -> &Value {
        value(&self.values, id)
    }

    /// How many values there are.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Every storage that is referred to.
    pub(crate) fn storages(&self) -> impl Iterator<Item = &StorageRef> {
        self.values.iter().filter_map(|v| match v {
            Value::Storage(s) => Some(&**s),
            _ => None,
        })
    }
}

/// The value with this id.
pub(crate) fn value(values: &[Value], id: Id) -> &Value {
    // Ids come from `push` only; the fallback is never taken.
    values.get(id as usize).unwrap_or(&Value::None)
}

/// Runs the pickle at the cursor, which then stands behind it.
pub(crate) fn run(c: &mut Cursor<'_>, persistent: &Persistent<'_>) -> Result<Pickled, Fault> {
    let (values, stack, marks) = (Vec::new(), Vec::new(), Vec::new());
    let mut m = Machine { values, stack, marks, memo: HashMap::new(), pairs_left: MAX_VALUES, persistent };
    loop {
        let at = c.at();
        let op = c.u8("pickle")?;
        if op == b'.' {
            let root = m.pop()?;
            return Ok(Pickled { values: m.values, root });
        }
        m.step(c, op).map_err(|fault| match fault {
            Fault::Bad(what) => Fault::Bad(format!("pickle, byte {at}: {what}")),
            more => more,
        })?;
    }
}

struct Machine<'a> {
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
    /// How many pairs of lists may still be copied into dictionaries.
    pairs_left: usize,
    persistent: &'a Persistent<'a>,
}

const UNDERFLOW: &str = "takes more values than there are";

impl Machine<'_> {
    fn step(&mut self, c: &mut Cursor<'_>, op: u8) -> Result<(), Fault> {
        match op {
            0x80 => match c.u8("protocol")? {
                0..=5 => {}
                p => return Err(format!("protocol {p} is not known, only 0 to 5").into()),
            },
            0x95 => {
                c.u64("frame")?; // only says how much to read at once
            }
            b'(' => self.marks.push(self.stack.len()),
            b'0' => {
                self.pop()?;
            }
            b'1' => {
                self.pop_mark()?;
            }
            b'2' => {
                let top = *self.stack.last().ok_or(UNDERFLOW)?;
                self.stack.push(top);
            }
            b'N' => self.push(Value::None)?,
            0x88 => self.push(Value::Bool(true))?,
            0x89 => self.push(Value::Bool(false))?,
            b'J' => {
                let v = i32::from_le_bytes(c.array("number")?);
                self.push(Value::Int(v.into()))?;
            }
            b'K' => {
                let v = c.u8("number")?;
                self.push(Value::Int(v.into()))?;
            }
            b'M' => {
                let v = c.u16("number")?;
                self.push(Value::Int(v.into()))?;
            }
            0x8a => {
                let len = c.u8("length")?;
                self.long(c, len.into())?;
            }
            0x8b => {
                let len = c.u32("length")?;
                self.long(c, len.into())?;
            }
            b'I' => match c.line("number")? {
                b"00" => self.push(Value::Bool(false))?,
                b"01" => self.push(Value::Bool(true))?,
                line => self.decimal(line)?,
            },
            b'L' => {
                let line = c.line("number")?;
                self.decimal(line.strip_suffix(b"L").unwrap_or(line))?;
            }
            b'F' => {
                let line = c.line("number")?;
                let v = std::str::from_utf8(line).ok().and_then(|s| s.parse().ok());
                self.push(Value::Float(v.ok_or("a real number that is none")?))?;
            }
            b'G' => {
                let v = f64::from_be_bytes(c.array("number")?);
                self.push(Value::Float(v))?;
            }
            b'S' | b'V' => {
                let line = c.line("text")?;
                let line = if op == b'S' { unquoted(line) } else { line };
                self.text(line)?;
            }
            b'U' | 0x8c => {
                let len = c.u8("length")?;
                let text = c.take(len.into(), "text")?;
                self.text(text)?;
            }
            b'T' | b'X' => {
                let len = c.u32("length")?;
                let text = c.take(len.into(), "text")?;
                self.text(text)?;
            }
            0x8d => {
                let len = c.u64("length")?;
                let text = c.take(len, "text")?;
                self.text(text)?;
            }
            b'C' => {
                let len = c.u8("length")?;
                self.bytes(c, len.into())?;
            }
            b'B' => {
                let len = c.u32("length")?;
                self.bytes(c, len.into())?;
            }
            0x8e | 0x96 => {
                let len = c.u64("length")?;
                self.bytes(c, len)?;
            }
            b')' => self.push(Value::Tuple([].into()))?,
            0x85..=0x87 => {
                let from = self.stack.len().checked_sub(usize::from(op - 0x84)).ok_or(UNDERFLOW)?;
                let items = self.stack.split_off(from);
                self.push(Value::Tuple(items.into()))?;
            }
            b't' => {
                let items = self.pop_mark()?;
                self.push(Value::Tuple(items.into()))?;
            }
            b']' => self.push(Value::List(Vec::new()))?,
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Value::List(items))?;
            }
            b'a' => {
                let item = self.pop()?;
                self.extend(vec![item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.extend(items)?;
            }
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Value::Dict(Vec::new()))?;
                self.set(&items)?;
            }
            b's' => {
                let (v, k) = (self.pop()?, self.pop()?);
                self.set(&[k, v])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            0x8f => self.push(Value::Opaque("a set"))?,
            0x90 => {
                self.pop_mark()?;
            }
            0x91 => {
                self.pop_mark()?;
                self.push(Value::Opaque("a set"))?;
            }
            b'c' => {
                let module = line(c)?;
                let name = line(c)?;
                self.class(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let class = match (value(&self.values, module), value(&self.values, name)) {
                    (Value::Text(module), Value::Text(name)) => classes::known(module, name)?,
                    _ => return Err("a class whose name is no text".into()),
                };
                self.push(Value::Class(class))?;
            }
            b'R' | 0x81 => {
                let (args, class) = (self.pop()?, self.pop()?);
                self.call(class, args)?;
            }
            0x92 => {
                let (_keywords, args, class) = (self.pop()?, self.pop()?, self.pop()?);
                self.call(class, args)?;
            }
            b'i' => {
                let module = line(c)?;
                let name = line(c)?;
                let items = self.pop_mark()?;
                self.class(module, name)?;
                let class = self.pop()?;
                let args = self.push_id(Value::Tuple(items.into()))?;
                self.call(class, args)?;
            }
            b'o' => {
                let mut items = self.pop_mark()?;
                if items.is_empty() {
                    return Err(UNDERFLOW.into());
                }
                let class = items.remove(0);
                let args = self.push_id(Value::Tuple(items.into()))?;
                self.call(class, args)?;
            }
            // The state of an object: attributes, of which none changes what a tensor or a dictionary holds.
            b'b' => {
                let state = self.pop()?;
                self.build(state)?;
            }
            b'Q' => {
                let id = self.pop()?;
                let found = self.persistent(value(&self.values, id))?;
                self.push(found)?;
            }
            b'P' => {
                let line = c.line("identifier")?;
                let number = std::str::from_utf8(line).ok().and_then(|s| s.parse().ok());
                let found = self.persistent(&number.map_or(Value::None, Value::Int))?;
                self.push(found)?;
            }
            b'g' => {
                let index = index(c)?;
                self.recall(index)?;
            }
            b'h' => {
                let index = c.u8("index")?;
                self.recall(index.into())?;
            }
            b'j' => {
                let index = c.u32("index")?;
                self.recall(index)?;
            }
            b'p' => {
                let index = index(c)?;
                self.memoize(index)?;
            }
            b'q' => {
                let index = c.u8("index")?;
                self.memoize(index.into())?;
            }
            b'r' => {
                let index = c.u32("index")?;
                self.memoize(index)?;
            }
            0x94 => self.memoize(u32::try_from(self.memo.len()).unwrap_or(u32::MAX))?,
            0x82..=0x84 => return Err("an extension code, which no checkpoint has".into()),
            0x97 | 0x98 => return Err("a buffer outside of the pickle, which no file has".into()),
            op => return Err(format!("unknown opcode {op:#04x}; the file is damaged").into()),
        }
        Ok(())
    }

    fn push_id(&mut self, v: Value) -> Result<Id, Fault> {
        if self.values.len() >= MAX_VALUES {
            return Err(format!("builds more than {MAX_VALUES} values").into());
        }
        self.values.push(v);
        Ok((self.values.len() - 1) as Id)
    }

    fn push(&mut self, v: Value) -> Result<(), Fault> {
        let id = self.push_id(v)?;
        self.stack.push(id);
        Ok(())
    }

    fn pop(&mut self) -> Result<Id, Fault> {
        // What lies below a mark belongs to what the mark has begun.
        if self.marks.last().is_some_and(|&m| m >= self.stack.len()) {
            return Err(UNDERFLOW.into());
        }
        self.stack.pop().ok_or_else(|| UNDERFLOW.into())
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>, Fault> {
        let mark = self.marks.pop().ok_or("ends a group that has not begun")?;
        if mark > self.stack.len() {
            return Err(UNDERFLOW.into());
        }
        Ok(self.stack.split_off(mark))
    }

    /// Appends to the list below.
    fn extend(&mut self, items: Vec<Id>) -> Result<(), Fault> {
        let top = *self.stack.last().ok_or(UNDERFLOW)?;
        match self.values.get_mut(top as usize) {
            Some(Value::List(list)) => list.extend(items),
            Some(Value::Opaque(_)) => {}
            _ => return Err("appends to what is no list".into()),
        }
        Ok(())
    }

    /// Sets keys of the dictionary below, given keys and values in turn.
    fn set(&mut self, items: &[Id]) -> Result<(), Fault> {
        let top = *self.stack.last().ok_or(UNDERFLOW)?;
        let (pairs, []) = items.as_chunks::<2>() else { return Err("a key without a value".into()) };
        match self.values.get_mut(top as usize) {
            Some(Value::Dict(dict)) => dict.extend(pairs.iter().map(|[k, v]| (*k, *v))),
            Some(Value::Opaque(_)) => {}
            _ => return Err("sets a key of what is no dictionary".into()),
        }
        Ok(())
    }

    fn long(&mut self, c: &mut Cursor<'_>, len: u64) -> Result<(), Fault> {
        let bytes = c.take(len, "number")?;
        let fill = if bytes.last().is_some_and(|b| b & 0x80 != 0) { 0xff } else { 0 };
        let mut wide = [fill; 8];
        match wide.get_mut(..bytes.len()) {
            Some(low) => {
                low.copy_from_slice(bytes);
                self.push(Value::Int(i64::from_le_bytes(wide)))
            }
            None => self.push(Value::Long(bytes.into())),
        }
    }

    fn decimal(&mut self, line: &[u8]) -> Result<(), Fault> {
        let number = std::str::from_utf8(line).ok().filter(|s| !s.is_empty());
        let number = number.ok_or("a number that is none")?;
        match number.parse() {
            Ok(v) => self.push(Value::Int(v)),
            Err(_) => self.push(Value::Opaque("a number")),
        }
    }

    /// Text: UTF-8, or the Latin-1 of Python 2.
    fn text(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => bytes.iter().copied().map(char::from).collect::<String>().into(),
        };
        self.push(Value::Text(text))
    }

    fn bytes(&mut self, c: &mut Cursor<'_>, len: u64) -> Result<(), Fault> {
        c.take(len, "bytes")?;
        self.push(Value::Opaque("bytes"))
    }

    fn class(&mut self, module: &str, name: &str) -> Result<(), Fault> {
        self.push(Value::Class(classes::known(module, name)?))
    }

    fn call(&mut self, class: Id, args: Id) -> Result<(), Fault> {
        let made = classes::call(&self.values, value(&self.values, class), value(&self.values, args))?;
        // One list may become any number of dictionaries.
        if let Value::Dict(pairs) = &made {
            let left = self.pairs_left.checked_sub(pairs.len());
            self.pairs_left =
                left.ok_or_else(|| format!("copies more than {MAX_VALUES} pairs into dictionaries"))?;
        }
        self.push(made)
    }

    /// Gives the dictionary on the stack what the state of an object holds as its parameters, as PyTorch's `ParameterDict`
    /// has them. No other state says anything of tensors.
    fn build(&mut self, state: Id) -> Result<(), Fault> {
        let entries = |id: Id| match value(&self.values, id) {
            Value::Dict(entries) => entries.as_slice(),
            _ => &[],
        };
        let is_named = |id: Id| matches!(value(&self.values, id), Value::Text(name) if &**name == "_parameters");
        let Some((_, parameters)) = entries(state).iter().rfind(|(key, _)| is_named(*key)) else { return Ok(()) };
        let pairs = entries(*parameters).to_vec();
        let left = self.pairs_left.checked_sub(pairs.len());
        self.pairs_left = left.ok_or_else(|| format!("copies more than {MAX_VALUES} pairs into dictionaries"))?;
        let top = self.stack.last().and_then(|&top| self.values.get_mut(top as usize));
        if let Some(Value::Dict(dict)) = top.filter(|top| matches!(top, Value::Dict(dict) if dict.is_empty())) {
            *dict = pairs;
        }
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Result<(), Fault> {
        let id = *self.memo.get(&index).ok_or_else(|| format!("recalls value {index}, which was not kept"))?;
        self.stack.push(id);
        Ok(())
    }

    fn memoize(&mut self, index: u32) -> Result<(), Fault> {
        let top = *self.stack.last().ok_or(UNDERFLOW)?;
        self.memo.insert(index, top);
        Ok(())
    }

    /// What an object that the pickle leaves to its container is.
    fn persistent(&self, id: &Value) -> Result<Value, Fault> {
        Ok(match (self.persistent, id) {
            (Persistent::Storages, Value::Tuple(parts)) => {
                Value::Storage(Box::new(classes::storage(&self.values, parts)?))
            }
            (Persistent::Known(known), Value::Int(i)) => {
                known.get(i).cloned().ok_or_else(|| format!("refers to object {i}, which the file lacks"))?
            }
            // Source code of a class, which the tar layout keeps beside the class.
            (Persistent::Known(_), Value::Tuple(parts)) => match parts.first().map(|&id| value(&self.values, id)) {
                Some(Value::Class(class)) => Value::Class(*class),
                _ => return Err("refers to no object".into()),
            },
            _ => return Err("refers to an object outside of the pickle that is no storage".into()),
        })
    }
}

fn index(c: &mut Cursor<'_>) -> Result<u32, Fault> {
    let line = line(c)?;
    line.parse().map_err(|_| Fault::Bad(format!("{} is no index", shown(line))))
}

fn line<'a>(c: &mut Cursor<'a>) -> Result<&'a str, Fault> {
    std::str::from_utf8(c.line("name")?).map_err(|_| "a name that is not UTF-8".into())
}

fn unquoted(line: &[u8]) -> &[u8] {
    match line {
        [a, inner @ .., b] if a == b && matches!(a, b'\'' | b'"') => inner,
        _ => line,
    }
}
