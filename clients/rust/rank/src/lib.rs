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
    /// Size of the memory that each rank brings, in bytes; 0 where stages differ, or to check nothing.
    pub memory_bytes: u64,
}

impl fmt::Debug for Ticket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Ticket")
            .field("socket_path", &self.socket_path)
            .field("secret", &"[REDACTED]")
            .field("comes_back", &self.comes_back)
            .field("memory_bytes", &self.memory_bytes)
            .finish()
    }
}

/// One rank of an engine, attached to its lead. Dropping it detaches it, which ends the engine's life.
pub struct Rank {
    handle: NonNull<ffi::Rank>,
    /// The pool, in the order of its linear offsets.
    segments: Vec<NonNull<[u8]>>,
    /// Memory that safe code gave, freed after the handle is closed.
    owned: Vec<NonNull<[u8]>>,
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
        let mut made = ptr::null_mut();
        with_ticket(ticket, |given, error| {
            // SAFETY: the library copies what it keeps of the ticket, and sets `made` only on success.
            unsafe { ffi::kvgrpc_rank_attach(given, rank, &raw mut made, error) }
        })?;
        let mut attached = Self::of(made);
        // SAFETY: an attached rank has a mapping, of this length.
        let (data, size) = unsafe { (ffi::kvgrpc_rank_memory(made), ffi::kvgrpc_rank_memory_bytes(made)) };
        let data = NonNull::new(data.cast::<u8>()).expect("an attached rank has a mapping");
        attached.segments = vec![NonNull::slice_from_raw_parts(data, size)];
        Ok(attached)
    }

    /// Attaches one rank with memory that it brings, for an engine with private memory. The pool's linear offsets run
    /// through `memory` in order. The rank keeps it, and frees it when it is dropped.
    ///
    /// # Errors
    ///
    /// As for `attach`, and INVALID_ARGUMENT for memory without bytes, or of more than 8,192 pieces;
    /// FAILED_PRECONDITION (POOL_KIND_MISMATCH), too, if it has not the pool's size, or if the engine's memory is
    /// shared; RESOURCE_EXHAUSTED (POOL_EXHAUSTED) without threads or a socket.
    pub fn attach_memory(ticket: &Ticket, rank: u32, memory: Vec<Box<[u8]>>) -> Result<Self, Error> {
        let owned: Vec<_> = memory.into_iter().map(|piece| NonNull::from(Box::leak(piece))).collect();
        // SAFETY: nobody else has this memory, and it is freed after the rank is closed.
        match unsafe { Self::attach_raw(ticket, rank, &owned) } {
            Ok(mut attached) => {
                attached.owned = owned;
                Ok(attached)
            }
            Err(error) => {
                free(&owned);
                Err(error)
            }
        }
    }

    /// Attaches like `attach_memory`, with memory that the engine allocated in its own way and keeps.
    ///
    /// # Errors
    ///
    /// As for `attach_memory`.
    ///
    /// # Safety
    ///
    /// The memory is readable and writable, and stays where it is until the rank is dropped. The library writes blocks
    /// that a transfer has, and peers read those that are handed over: no reference to their bytes exists meanwhile.
    pub unsafe fn attach_raw(ticket: &Ticket, rank: u32, memory: &[NonNull<[u8]>]) -> Result<Self, Error> {
        let rows: Vec<_> =
            memory.iter().map(|row| ffi::Memory { data: row.cast::<u8>().as_ptr().cast(), size: row.len() }).collect();
        let mut made = ptr::null_mut();
        with_ticket(ticket, |given, error| {
            // SAFETY: as for `attach`; the caller keeps the memory.
            unsafe { ffi::kvgrpc_rank_attach_memory(given, rank, rows.as_ptr(), rows.len(), &raw mut made, error) }
        })?;
        let mut attached = Self::of(made);
        attached.segments = memory.to_vec();
        Ok(attached)
    }

    fn of(made: *mut ffi::Rank) -> Self {
        let handle = NonNull::new(made).expect("the library sets it on success");
        Self { handle, segments: vec![], owned: vec![], serving: Mutex::new(()), copying: Mutex::new(()) }
    }

    /// The rank's pool, in the order of its linear offsets: one piece, or those that it brought. It stays where it is
    /// until the rank is dropped.
    ///
    /// It is shared: blocks that a transfer has are written, and peers read those that are handed over. So it is
    /// pointers. Use their bytes while the blocks are the engine's own, without references that outlive that.
    #[must_use]
    pub fn segments(&self) -> &[NonNull<[u8]>] {
        &self.segments
    }

    /// The rank's pool, if it is one piece, as `segments` has it.
    ///
    /// # Panics
    ///
    /// If the rank brought its memory in several pieces.
    #[must_use]
    pub fn memory(&self) -> NonNull<[u8]> {
        assert_eq!(self.segments.len(), 1, "this rank's memory is in several pieces: see `segments`");
        self.segments[0]
    }

    /// Copies bytes into the pool.
    ///
    /// # Panics
    ///
    /// If they do not lie within the pool.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.copy(offset, bytes.len(), |at, from, size| {
            // SAFETY: `copy` checked the range, and no slice of safe code overlaps the pool.
            unsafe { ptr::copy(bytes[from..].as_ptr(), at, size) }
        });
    }

    /// Copies bytes out of the pool.
    ///
    /// # Panics
    ///
    /// If they do not lie within the pool.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        self.copy(offset, into.len(), |at, from, size| {
            // SAFETY: as for `write`.
            unsafe { ptr::copy(at, into[from..].as_mut_ptr(), size) }
        });
    }

    /// Calls `piece` with the address, the bytes before it and the size of each piece of a range, in order.
    fn copy(&self, mut offset: usize, size: usize, mut piece: impl FnMut(*mut u8, usize, usize)) {
        let pool: usize = self.segments.iter().map(|segment| segment.len()).sum();
        let end = offset.checked_add(size);
        assert!(end.is_some_and(|end| end <= pool), "{size} bytes at {offset} of a pool of {pool}");
        let _copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        for segment in &self.segments {
            if offset < segment.len() && done < size {
                let some = (segment.len() - offset).min(size - done);
                // SAFETY: the offset lies within the segment.
                piece(unsafe { segment.cast::<u8>().as_ptr().add(offset) }, done, some);
                done += some;
                offset = 0;
            } else {
                offset = offset.saturating_sub(segment.len());
            }
        }
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
        free(&self.owned);
    }
}

/// Frees memory that `attach_memory` took, and that nobody uses.
fn free(owned: &[NonNull<[u8]>]) {
    for piece in owned {
        // SAFETY: each was a Box, and is freed once.
        drop(unsafe { Box::from_raw(piece.as_ptr()) });
    }
}

fn with_ticket(
    ticket: &Ticket,
    call: impl FnOnce(*const ffi::Ticket, *mut ffi::Error) -> std::ffi::c_int,
) -> Result<(), Error> {
    let path = CString::new(ticket.socket_path.as_str()).unwrap_or_default(); // no path has a NUL: none is found
    let secret = ffi::Bytes { data: ticket.secret.as_ptr().cast(), size: ticket.secret.len() };
    let given = ffi::Ticket {
        socket_path: path.as_ptr(),
        secret,
        comes_back_s: ticket.comes_back.as_secs_f64(),
        memory_bytes: ticket.memory_bytes,
    };
    check(|error| call(&raw const given, error))
}

fn check(call: impl FnOnce(*mut ffi::Error) -> std::ffi::c_int) -> Result<(), Error> {
    let mut error = MaybeUninit::<ffi::Error>::zeroed();
    if call(error.as_mut_ptr()) == 0 {
        return Ok(());
    }
    // SAFETY: all zeros are a valid value, and the library filled it in.
    Err(Error::of(&unsafe { error.assume_init() }))
}
