//! Checkpoints and images in and out. Reading a checkpoint reads headers; tensor bytes are mapped on demand.
//! Every length, offset and count in a file is checked before it is used.
//!
//! Absent on purpose: graphs, devices, what any tensor means.

#![deny(unsafe_code)] // the one exception is `map`

mod atomic;
mod checkpoint;
mod cursor;
mod file;
mod form;
pub mod gguf;
pub mod image;
mod importance;
mod listing;
mod map;
mod metadata;
mod output;
pub mod safetensors;
mod text;
mod torch;

pub use atomic::Sink;
pub use checkpoint::{Checkpoint, Format, parse_index};
pub use file::Access;
pub use gguf::{EmbeddedTokenizer, parse_gguf, stream_gguf, write_gguf};
pub use image::{
    Container, Entry, EntryType, Generation, Generator, Image, PictureText, read_generation, read_parameters,
    read_texts,
};
pub use importance::Importance;
pub use listing::{Listing, TensorEntry, TensorSpec};
pub use metadata::{Array, ArrayType, Metadata, Value};
pub use output::output_path;
pub use safetensors::{parse_safetensors, stream_safetensors, write_safetensors};
