//! What one request may ask for, so that one client cannot keep the others waiting for hours.

use std::time::Duration;

/// The most images.
pub(crate) const IMAGES: u32 = 8;
/// The most sampler steps.
pub(crate) const STEPS: u32 = 150;
/// The most times that results go through an upscaler.
pub(crate) const UPSCALES: u32 = 2;
/// The longest side in pixels.
pub(crate) const SIDE: u32 = 4096;
/// The most bytes of a body, which may hold pictures.
pub(crate) const BODY: usize = 64 << 20;
/// The most commas of a body, which bound its values; two prompts of the greatest length have fewer.
pub(crate) const COMMAS: usize = 1 << 18;
/// The most bytes of a body that an answer repeats.
pub(crate) const ECHO: usize = 1 << 20;
/// The most bytes of a prompt.
pub(crate) const PROMPT: usize = 1 << 16;
/// The most pixels of a picture that a request brings along, two times those of the largest result.
pub(crate) const PICTURE_PIXELS: u64 = 1 << 24;
/// The most pixels of all pictures that a request brings along.
pub(crate) const REQUEST_PIXELS: u64 = 1 << 25;
/// The most bytes of the pictures of all requests that wait or run.
pub(crate) const QUEUE_BYTES: usize = 1 << 30;
/// The most pictures in one list.
pub(crate) const PICTURES: usize = 16;
/// The most LoRAs in a list.
pub(crate) const LORAS: usize = 32;
/// The most layers in a list.
pub(crate) const LAYERS: usize = 256;
/// How long a body may take to arrive.
pub(crate) const BODY_TIME: Duration = Duration::from_secs(30);

/// Sides are multiples of this: autoencoders shrink them eight times.
const SIDE_STEP: u32 = 8;

/// `pixels` rounded up to a size that networks can have.
pub(crate) fn whole_blocks(pixels: u32) -> u32 {
    pixels.next_multiple_of(SIDE_STEP)
}
