#![doc = include_str!("../README.md")]

mod error;
mod ffi;

use std::ffi::CString;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::Duration;

pub use error::Error;

/// What a scheduler gives its workers, over the engine's own channels. The secret lets its holder join the engine.
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket {
    /// Path of the lead's session socket.
    pub socket_path: String,
    /// Secret of the session.
    pub secret: Vec<u8>,
    /// Time that a rank whose lead died waits for the next one; zero: it does not wait.
    pub comes_back: Duration,
}

impl fmt::Debug for Ticket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Ticket")
            .field("socket_path", &self.socket_path)
            .field("secret", &"[REDACTED]")
            .field("comes_back", &self.comes_back)
            .finish()
    }
}

/// One rank of an engine, attached to its lead. Dropping it detaches it, which ends the engine's life.
pub struct Rank {
    handle: NonNull<ffi::Rank>,
    /// Held while a thread serves the rank: the library allows one.
    serving: Mutex<()>,
    /// Held while bytes are copied: threads of safe code may share the rank.
    copying: Mutex<()>,
}

// SAFETY: the library lets any thread report steps and stop a rank while one serves it, and `serving` makes it one.
unsafe impl Send for Rank {}
// SAFETY: as above. `Drop` has the only reference, so that no other call is under way.
unsafe impl Sync for Rank {}

impl Rank {
    /// Attaches one rank and maps its pool. From then on the end of this process ends the engine's life.
    ///
    /// # Errors
    ///
    /// UNAVAILABLE where no lead answers, PERMISSION_DENIED (NOT_OWNER) for another engine's ticket, ALREADY_EXISTS
    /// (ENGINE_ATTACHED) if the rank has a worker, FAILED_PRECONDITION (POOL_KIND_MISMATCH) if the engine's memory is
    /// not shared.
    pub fn attach(ticket: &Ticket, rank: u32) -> Result<Self, Error> {
        let path = CString::new(ticket.socket_path.as_str()).unwrap_or_default(); // no path has a NUL: none is found
        let secret = ffi::Bytes { data: ticket.secret.as_ptr().cast(), size: ticket.secret.len() };
        let given = ffi::Ticket { socket_path: path.as_ptr(), secret, comes_back_s: ticket.comes_back.as_secs_f64() };
        let mut made = ptr::null_mut();
        // SAFETY: the library copies what it keeps of the ticket, and sets `made` only on success.
        check(|error| unsafe { ffi::kvgrpc_rank_attach(&raw const given, rank, &raw mut made, error) })?;
        let handle = NonNull::new(made).expect("the library sets it on success");
        Ok(Self { handle, serving: Mutex::new(()), copying: Mutex::new(()) })
    }

    /// The rank's pool. It stays where it is until the rank is dropped.
    ///
    /// It is shared: the lead writes blocks that a transfer has, and peers read those that are handed over. So it is a
    /// pointer. Use its bytes while their blocks are the engine's own, without references that outlive that.
    #[must_use]
    pub fn memory(&self) -> NonNull<[u8]> {
        // SAFETY: an attached rank has a mapping, of this length.
        let (data, size) = unsafe {
            (ffi::kvgrpc_rank_memory(self.handle.as_ptr()), ffi::kvgrpc_rank_memory_bytes(self.handle.as_ptr()))
        };
        let data = NonNull::new(data.cast::<u8>()).expect("an attached rank has a mapping");
        NonNull::slice_from_raw_parts(data, size)
    }

    /// Copies bytes into the pool.
    ///
    /// # Panics
    ///
    /// If they do not lie within the pool.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let at = self.place(offset, bytes.len());
        let _copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `place` checked the range, and a slice of this process does not overlap a mapping that it has none of.
        unsafe { ptr::copy(bytes.as_ptr(), at, bytes.len()) }
    }

    /// Copies bytes out of the pool.
    ///
    /// # Panics
    ///
    /// If they do not lie within the pool.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let at = self.place(offset, into.len());
        let _copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as for `write`.
        unsafe { ptr::copy(at, into.as_mut_ptr(), into.len()) }
    }

    fn place(&self, offset: usize, size: usize) -> *mut u8 {
        let memory = self.memory();
        let end = offset.checked_add(size);
        assert!(end.is_some_and(|end| end <= memory.len()), "{size} bytes at {offset} of a pool of {}", memory.len());
        // SAFETY: the offset lies within the mapping, or at its end.
        unsafe { memory.cast::<u8>().as_ptr().add(offset) }
    }

    /// Reports that all work of the engine's steps up to `step` is done on this rank. While a lead is being replaced,
    /// the next one gets the report. First wait for device work that a later kernel must not overtake.
    ///
    /// # Errors
    ///
    /// UNAVAILABLE (PEER_LOST) when the engine's life is over.
    pub fn step_done(&self, step: u64) -> Result<(), Error> {
        // SAFETY: the handle lives as long as `self`.
        check(|error| unsafe { ffi::kvgrpc_rank_step_done(self.handle.as_ptr(), step, error) })
    }

    /// Reports like `step_done`, for some layers only: parts of a push that cover only these layers can move.
    ///
    /// # Errors
    ///
    /// As for `step_done`, and INVALID_ARGUMENT for no layers.
    pub fn layers_done(&self, step: u64, first: u32, count: u32) -> Result<(), Error> {
        // SAFETY: the handle lives as long as `self`.
        check(|error| unsafe { ffi::kvgrpc_rank_layers_done(self.handle.as_ptr(), step, first, count, error) })
    }

    /// Takes what the lead says, and attaches to the next lead after the death of one, until the engine's life is over
    /// or `stop` is called. A rank needs a thread that runs this from its attach on.
    ///
    /// # Errors
    ///
    /// UNAVAILABLE (PEER_LOST) at the end of the engine's life; INTERNAL (DATA_PATH_FAILED) if the next lead refused
    /// this rank, because a peer may still write into the memory.
    ///
    /// # Panics
    ///
    /// If another thread serves this rank already.
    pub fn serve(&self) -> Result<(), Error> {
        let _one = match self.serving.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => panic!("another thread serves this rank"),
        };
        // SAFETY: the handle lives as long as `self`, and no other thread is in this call.
        check(|error| unsafe { ffi::kvgrpc_rank_serve(self.handle.as_ptr(), error) })
    }

    /// Ends `serve`, now and later.
    pub fn stop(&self) {
        // SAFETY: the handle lives as long as `self`.
        unsafe { ffi::kvgrpc_rank_stop(self.handle.as_ptr()) }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // SAFETY: nobody else has a reference, and nothing uses the handle afterwards.
        unsafe { ffi::kvgrpc_rank_close(self.handle.as_ptr()) }
    }
}

fn check(call: impl FnOnce(*mut ffi::Error) -> std::ffi::c_int) -> Result<(), Error> {
    let mut error = MaybeUninit::<ffi::Error>::zeroed();
    if call(error.as_mut_ptr()) == 0 {
        return Ok(());
    }
    // SAFETY: all zeros are a valid value, and the library filled it in.
    Err(Error::of(&unsafe { error.assume_init() }))
}
