//! Requests wait here for the one worker that owns the engine.

use crate::app::unix_time;
use crate::fields::{picture_bytes, shortened};
use crate::limits;
use sd_io::Image;
use sd_runtime::{
    CancelToken, Engine, Error, GeneratedImage, ImageRequest, InputImage, Observer, Parameters, PreviewPicture,
    Progress, UpscaleOptions,
};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::oneshot;
use tracing::{error, info, warn};

/// The most requests that wait or run.
pub(crate) const MAX_QUEUE: usize = 64;

/// How pictures are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Png,
    /// With a quality from 1 to 100.
    Jpeg(u8),
    /// Without loss.
    Webp,
}

impl Format {
    /// As clients spell it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Format::Png => "png",
            Format::Jpeg(_) => "jpeg",
            Format::Webp => "webp",
        }
    }

    /// The format that clients call so.
    pub(crate) fn parse(name: &str, quality: u32) -> Result<Format, String> {
        match name.to_ascii_lowercase().as_str() {
            "png" => Ok(Format::Png),
            "jpeg" | "jpg" => Ok(Format::Jpeg(u8::try_from(quality.clamp(1, 100)).unwrap_or(100))),
            "webp" => Ok(Format::Webp),
            _ => Err(format!("want png, jpeg or webp, got {:?}", shortened(name))),
        }
    }

    fn encode(self, image: &GeneratedImage) -> Result<Picture, Error> {
        let text = image.parameters.to_text();
        let picture = Image::new(image.width, image.height, image.rgb.clone())?;
        let bytes = match self {
            Format::Png => picture.to_png(Some(&text))?,
            Format::Jpeg(quality) => picture.to_jpeg(quality, Some(&text))?,
            Format::Webp => picture.to_webp(Some(&text))?,
        };
        Ok(Picture { bytes, parameters: image.parameters.clone() })
    }
}

/// A finished picture as a file.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) bytes: Vec<u8>,
    pub(crate) parameters: Parameters,
}

/// What became of a request. An interrupted one has the pictures that were finished.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) pictures: Vec<Picture>,
    /// A picture that was made larger, a PNG file.
    pub(crate) enlarged: Option<Vec<u8>>,
    pub(crate) warnings: Vec<String>,
    pub(crate) error: Option<Error>,
    /// When it began, in seconds since 1970.
    pub(crate) started: u64,
}

/// How far the running request is.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub(crate) id: u64,
    pub(crate) progress: Option<Progress>,
    /// The last preview, a PNG file.
    pub(crate) preview: Option<Arc<Vec<u8>>>,
    pub(crate) started: Instant,
    /// When it began, in seconds since 1970.
    pub(crate) since: u64,
    bytes: usize,
    pub(crate) interrupted: bool,
    cancel: CancelToken,
}

/// What a client wants of the engine.
pub(crate) enum Work {
    Draw(Box<ImageRequest>),
    Enlarge(Enlarge),
}

/// A picture that becomes larger.
#[derive(Debug)]
pub(crate) struct Enlarge {
    pub(crate) image: InputImage,
    /// Whether the engine's upscaler does it, before the picture is fitted to its size.
    pub(crate) by_network: bool,
    /// Width and height of the result.
    pub(crate) size: [u32; 2],
}

impl From<ImageRequest> for Work {
    fn from(request: ImageRequest) -> Work {
        Work::Draw(Box::new(request))
    }
}

impl Work {
    /// Of the pictures that it brings along.
    fn bytes(&self) -> usize {
        match self {
            Work::Draw(request) => picture_bytes(request),
            Work::Enlarge(enlarge) => enlarge.image.rgb.len(),
        }
    }
}

impl Enlarge {
    /// A PNG file of the result.
    fn run(
        &self,
        engine: &mut Engine,
        observer: &mut dyn Observer,
        cancel: &CancelToken,
    ) -> Result<Vec<u8>, Error> {
        let [width, height] = self.size;
        let mut image = self.image.clone();
        if self.by_network {
            let scale = engine.upscaler_scale().unwrap_or(1).max(1);
            let wanted = f64::from(width) / f64::from(image.width.max(1));
            let passes = if scale > 1 { wanted.log(f64::from(scale)).ceil().max(1.0) as u32 } else { 1 };
            let options = UpscaleOptions { repeats: passes, ..UpscaleOptions::default() };
            image = engine.upscale(&image, options, observer, cancel)?;
        }
        let image = image.fitted(width, height)?;
        Image::new(image.width, image.height, image.rgb)?.to_png(None)
    }
}

struct Job {
    id: u64,
    work: Work,
    /// Of its pictures.
    bytes: usize,
    format: Format,
    cancel: CancelToken,
    answer: oneshot::Sender<Outcome>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    running: Option<Running>,
    submitted: u64,
    closed: bool,
}

impl State {
    fn takes(&self, bytes: usize) -> Result<(), Refused> {
        if self.closed {
            return Err(Refused::Stopping);
        }
        let running = self.running.iter().map(|running| running.bytes);
        let held: usize = self.waiting.iter().map(|job| job.bytes).chain(running).sum();
        if self.waiting.len() + usize::from(self.running.is_some()) >= MAX_QUEUE
            || (bytes > 0 && held + bytes > limits::QUEUE_BYTES)
        {
            return Err(Refused::Full);
        }
        Ok(())
    }
}

/// Where a request is.
#[derive(Debug)]
pub(crate) enum Place {
    /// Behind that many others.
    Waiting(usize),
    /// It is drawn.
    Running(Running),
    /// Served, or given up.
    Gone,
}

/// Why a request was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Full,
    Stopping,
}

/// The queue, first come, first served.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a request that brings pictures of that many bytes would not be taken.
    pub(crate) fn takes(&self, bytes: usize) -> Result<(), Refused> {
        self.state().takes(bytes)
    }

    /// Puts a request at the end.
    pub(crate) fn submit(self: &Arc<Queue>, work: impl Into<Work>, format: Format) -> Result<Ticket, Refused> {
        let work = work.into();
        let bytes = work.bytes();
        let mut state = self.state();
        state.takes(bytes)?;
        state.submitted += 1;
        let (id, cancel) = (state.submitted, CancelToken::new());
        let (answer, outcome) = oneshot::channel();
        state.waiting.push_back(Job { id, work, bytes, format, cancel: cancel.clone(), answer });
        drop(state);
        self.wake.notify_one();
        Ok(Ticket { queue: self.clone(), id, cancel, outcome })
    }

    /// The running request, and how many wait.
    pub(crate) fn progress(&self) -> (Option<Running>, usize) {
        let state = self.state();
        (state.running.clone(), state.waiting.len())
    }

    /// Where the request of that number is.
    pub(crate) fn place(&self, id: u64) -> Place {
        let state = self.state();
        match (&state.running, state.waiting.iter().position(|job| job.id == id)) {
            (Some(running), _) if running.id == id => Place::Running(running.clone()),
            (running, Some(at)) => Place::Waiting(at + usize::from(running.is_some())),
            (_, None) => Place::Gone,
        }
    }

    /// Gives up the request of that number, wherever it is.
    pub(crate) fn cancel(&self, id: u64) {
        let mut state = self.state();
        state.waiting.retain(|job| job.id != id);
        if let Some(running) = state.running.as_mut().filter(|running| running.id == id) {
            running.interrupted = true;
            running.cancel.cancel();
        }
    }

    /// Stops the running request. Those that wait are not affected.
    pub(crate) fn interrupt(&self) {
        if let Some(running) = &mut self.state().running {
            running.interrupted = true;
            running.cancel.cancel();
        }
    }

    /// Takes no more requests and drops those that wait; the running one goes on.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        // A dropped job answers that the server stops.
        state.waiting.clear();
        drop(state);
        self.wake.notify_all();
    }

    /// Serves requests until the queue is closed.
    pub(crate) fn work(&self, engine: &mut Engine) {
        while let Some(job) = self.next() {
            let mut outcome = Outcome { started: unix_time(), ..Outcome::default() };
            let mut watcher =
                Watcher { queue: self, format: job.format, cancel: &job.cancel, outcome: &mut outcome };
            // A bug of one request must not end the service of the others.
            let run = catch_unwind(AssertUnwindSafe(|| match &job.work {
                Work::Draw(request) => engine.generate_each(request, &mut watcher, &job.cancel),
                Work::Enlarge(enlarge) => {
                    let file = enlarge.run(engine, &mut watcher, &job.cancel)?;
                    watcher.outcome.enlarged = Some(file);
                    Ok(())
                }
            }));
            let error = match run {
                Ok(result) => result.err(),
                Err(_) => {
                    engine.release();
                    Some(Error::internal("the request ended in a panic"))
                }
            };
            // A picture that could not be encoded has stopped the request.
            outcome.error = outcome.error.or(error);
            let seconds = self.state().running.take().map_or(0.0, |r| r.started.elapsed().as_secs_f64());
            match &outcome.error {
                None => info!("request {}: {} pictures in {seconds:.1} s", job.id, outcome.pictures.len()),
                Some(e) if e.is_cancelled() => info!("request {}: stopped after {seconds:.1} s", job.id),
                Some(e) if e.is_request() => info!("request {}: {e}", job.id),
                Some(e) => error!("request {}: {e}", job.id),
            }
            // Nobody waits for the answer when the client has gone.
            let _ = job.answer.send(outcome);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.state();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.waiting.pop_front() {
                let (cancel, started, since) = (job.cancel.clone(), Instant::now(), unix_time());
                state.running = Some(Running {
                    id: job.id,
                    progress: None,
                    preview: None,
                    started,
                    since,
                    bytes: job.bytes,
                    interrupted: false,
                    cancel,
                });
                return Some(job);
            }
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A request's place in the queue. Dropping it, as when the client goes away, gives the place up.
pub(crate) struct Ticket {
    queue: Arc<Queue>,
    id: u64,
    cancel: CancelToken,
    outcome: oneshot::Receiver<Outcome>,
}

impl Ticket {
    /// The request's number.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// What becomes of the request; nothing if the server stops before its turn.
    pub(crate) async fn outcome(mut self) -> Option<Outcome> {
        (&mut self.outcome).await.ok()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancel.cancel();
        self.queue.cancel(self.id);
    }
}

/// Collects what the engine tells about one request.
struct Watcher<'a> {
    queue: &'a Queue,
    format: Format,
    cancel: &'a CancelToken,
    outcome: &'a mut Outcome,
}

impl Observer for Watcher<'_> {
    fn progress(&mut self, progress: Progress) {
        if let Some(running) = &mut self.queue.state().running {
            running.progress = Some(progress);
        }
    }

    fn preview(&mut self, picture: PreviewPicture<'_>) {
        let image = Image::new(picture.width, picture.height, picture.rgb.to_vec());
        match (image.and_then(|image| image.to_png(None)), &mut self.queue.state().running) {
            (Ok(file), Some(running)) => running.preview = Some(Arc::new(file)),
            (Err(e), _) => warn!("preview: {e}"),
            (Ok(_), None) => {}
        }
    }

    fn warning(&mut self, message: &str) {
        warn!("{message}");
        self.outcome.warnings.push(message.to_owned());
    }

    fn image(&mut self, _index: usize, image: &GeneratedImage) {
        match self.format.encode(image) {
            Ok(picture) => self.outcome.pictures.push(picture),
            Err(e) => {
                self.outcome.error = Some(e);
                self.cancel.cancel();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submit(queue: &Arc<Queue>) -> Result<Ticket, Refused> {
        queue.submit(ImageRequest::default(), Format::Png)
    }

    #[test]
    fn a_full_queue_and_a_closed_one_refuse() {
        let queue = Arc::new(Queue::default());
        let mut tickets: Vec<Ticket> = (0..MAX_QUEUE).map(|_| submit(&queue).unwrap()).collect();
        assert_eq!(submit(&queue).err(), Some(Refused::Full));
        tickets.pop();
        assert_eq!(queue.progress().1, MAX_QUEUE - 1);
        let _again = submit(&queue).unwrap();
        queue.close();
        assert_eq!(queue.progress().1, 0);
        assert_eq!(submit(&queue).err(), Some(Refused::Stopping));
        assert!(queue.next().is_none());
    }

    #[test]
    fn pictures_of_all_requests_are_bounded() {
        let queue = Arc::new(Queue::default());
        let _waiting = submit(&queue).unwrap();
        queue.state().waiting.iter_mut().for_each(|job| job.bytes = limits::QUEUE_BYTES - 5);
        assert_eq!((queue.takes(5), queue.takes(6)), (Ok(()), Err(Refused::Full)));
        let job = queue.next().unwrap();
        assert_eq!((queue.takes(5), queue.takes(6)), (Ok(()), Err(Refused::Full)), "running, {} counts", job.id);
        let request = ImageRequest {
            ref_images: vec![InputImage { width: 2, height: 1, rgb: vec![0; 6] }],
            mask: Some(sd_runtime::InputMask { width: 1, height: 1, values: vec![0] }),
            ..ImageRequest::default()
        };
        assert_eq!(picture_bytes(&request), 7);
    }

    #[test]
    fn who_goes_away_gives_the_place_up() {
        let queue = Arc::new(Queue::default());
        let (first, second) = (submit(&queue).unwrap(), submit(&queue).unwrap());
        assert!(matches!(queue.place(second.id), Place::Waiting(1)));
        drop(first);
        let job = queue.next().unwrap();
        assert!(matches!(queue.place(second.id), Place::Running(_)));
        assert!(matches!(queue.place(99), Place::Gone));
        assert_eq!((job.id, queue.progress().1), (second.id, 0));
        assert!(!job.cancel.is_cancelled());
        drop(second);
        assert!(job.cancel.is_cancelled());
    }

    #[test]
    fn only_the_running_request_is_interrupted() {
        let queue = Arc::new(Queue::default());
        let _tickets = (submit(&queue).unwrap(), submit(&queue).unwrap());
        queue.interrupt();
        let job = queue.next().unwrap();
        assert!(!job.cancel.is_cancelled());
        queue.interrupt();
        assert!(job.cancel.is_cancelled());
        let (running, waiting) = queue.progress();
        assert!(running.unwrap().interrupted && waiting == 1);
    }
}
