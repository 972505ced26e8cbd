//! What happens when a page of a map is not there.
//!
//! The system then raises SIGBUS in the thread that looked, which ends the process unless somebody handles it. The handler
//! here puts zeros in the place of the rest of the map and notes that it did; the thread goes on with the zeros. What
//! is none of these maps' is left to whoever handled the signal before.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A map that is watched until this is dropped.
pub(super) struct Watched(&'static Slot);

/// A place in the list of maps. Slots are never freed, so that the handler can walk the list at any moment; a new map takes
/// one that is free.
struct Slot {
    /// Where the map begins; 0 for a free slot.
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
    next: *const Slot,
}

// SAFETY: `next` is written before the slot is shared and never after, and slots live as long as the process.
unsafe impl Sync for Slot {}

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
/// Held by those who take slots; not by the handler.
static TAKING: Mutex<()> = Mutex::new(());
static PAGE: AtomicUsize = AtomicUsize::new(0);
/// Who handled the signal before.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Watches a map, which must not be unmapped before this is dropped.
pub(super) fn watch(map: &[u8]) -> io::Result<Watched> {
    static HANDLES: OnceLock<Result<(), i32>> = OnceLock::new();
    HANDLES.get_or_init(handle).map_err(io::Error::from_raw_os_error)?;
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let free = slots().find(|s| s.start.load(Ordering::Acquire) == 0);
    let slot = free.unwrap_or_else(|| {
        let (start, end, lost) = Default::default();
        let slot = Box::leak(Box::new(Slot { start, end, lost, next: SLOTS.load(Ordering::Acquire) }));
        SLOTS.store(slot, Ordering::Release);
        slot
    });
    let start = map.as_ptr() as usize;
    slot.lost.store(false, Ordering::Relaxed);
    slot.end.store(start + map.len(), Ordering::Relaxed);
    slot.start.store(start, Ordering::Release);
    Ok(Watched(slot))
}

impl Watched {
    /// Whether some of it was not there when somebody looked.
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.start.store(0, Ordering::Release);
    }
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: the list holds leaked slots only.
    let first = unsafe { SLOTS.load(Ordering::Acquire).as_ref() };
    // SAFETY: as above.
    std::iter::successors(first, |s| unsafe { s.next.as_ref() })
}

/// Installs the handler; the system's error number if it refuses.
fn handle() -> Result<(), i32> {
    let done = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    };
    // SAFETY: the structures are plain data, for which zeros are valid, and the handler has the signature that
    // SA_SIGINFO asks for and does only what a handler may: it reads atomics and makes system calls.
    unsafe {
        PAGE.store(usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)).unwrap_or(4096), Ordering::Release);
        let mut before: libc::sigaction = std::mem::zeroed();
        done(libc::sigaction(libc::SIGBUS, ptr::null(), &mut before))?;
        BEFORE.store(Box::leak(Box::new(before)), Ordering::Release);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus_error as *const () as usize;
        // On the thread's stack for signals where it has one.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        done(libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()))
    }
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes a valid structure, whose address is that of the access for this signal.
    let address = unsafe { (*info).si_addr() } as usize;
    if !(address != 0 && put_zeros(address)) {
        pass_on(signal, info, context);
    }
}

/// Puts zeros in the place of all pages from that of `address` to the end of its map; whether there is such a map.
fn put_zeros(address: usize) -> bool {
    let page = PAGE.load(Ordering::Acquire).max(1);
    let from = address - address % page;
    let inside = |s: &&Slot| {
        let start = s.start.load(Ordering::Acquire);
        let within = start != 0 && start <= address && address < s.end.load(Ordering::Acquire);
        // A slot may have been taken again between the two.
        within && start == s.start.load(Ordering::Acquire)
    };
    let Some(slot) = slots().find(inside) else { return false };
    let len = (slot.end.load(Ordering::Acquire) - from).next_multiple_of(page);
    slot.lost.store(true, Ordering::Release);
    let (protection, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: the pages belong to a map that is alive, whose owner unmaps them later as before; somebody looks at its
    // bytes right now, which were never promised to be any in particular.
    unsafe { libc::mmap(from as *mut libc::c_void, len, protection, flags, -1, 0) != libc::MAP_FAILED }
}

/// Leaves the signal to whoever handled it before.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.load(Ordering::Acquire);
    // SAFETY: it was stored before this handler was installed, and a handler has the signature that its flags say.
    unsafe {
        let action = (*before).sa_sigaction;
        if action == libc::SIG_DFL || action == libc::SIG_IGN {
            // The access is repeated when this returns, and then does what it would have done.
            libc::sigaction(signal, before, ptr::null_mut());
        } else if (*before).sa_flags & libc::SA_SIGINFO != 0 {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(action);
            handler(signal, info, context);
        } else {
            let handler: extern "C" fn(libc::c_int) = std::mem::transmute(action);
            handler(signal);
        }
    }
}
