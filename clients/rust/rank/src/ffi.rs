//! The part of `kvgrpc_engine.h` that this crate uses.

use std::ffi::{c_char, c_double, c_int, c_void};

pub const MESSAGE_BYTES: usize = 512;

#[repr(C)]
pub struct Bytes {
    pub data: *const c_void,
    pub size: usize,
}

#[repr(C)]
pub struct Ticket {
    pub socket_path: *const c_char,
    pub secret: Bytes,
    pub comes_back_s: c_double,
    pub memory_bytes: u64,
}

#[repr(C)]
pub struct Memory {
    pub data: *mut c_void,
    pub size: usize,
}

#[repr(C)]
pub struct Error {
    pub code: c_int,
    pub reason: u32,
    pub message: [c_char; MESSAGE_BYTES],
}

/// A rank of the library, which only the library looks into.
#[repr(C)]
pub struct Rank {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    pub fn kvgrpc_code_name(code: c_int) -> *const c_char;
    pub fn kvgrpc_reason_name(reason: u32) -> *const c_char;
    pub fn kvgrpc_rank_attach(ticket: *const Ticket, rank: u32, made: *mut *mut Rank, error: *mut Error) -> c_int;
    pub fn kvgrpc_rank_attach_memory(
        ticket: *const Ticket,
        rank: u32,
        memory: *const Memory,
        count: usize,
        made: *mut *mut Rank,
        error: *mut Error,
    ) -> c_int;
    pub fn kvgrpc_rank_memory(rank: *const Rank) -> *mut c_void;
    pub fn kvgrpc_rank_memory_bytes(rank: *const Rank) -> usize;
    pub fn kvgrpc_rank_step_done(rank: *mut Rank, step: u64, error: *mut Error) -> c_int;
    pub fn kvgrpc_rank_layers_done(rank: *mut Rank, step: u64, first: u32, count: u32, error: *mut Error) -> c_int;
    pub fn kvgrpc_rank_serve(rank: *mut Rank, error: *mut Error) -> c_int;
    pub fn kvgrpc_rank_stop(rank: *mut Rank);
    pub fn kvgrpc_rank_close(rank: *mut Rank);
}
