use std::ffi::CStr;
use std::fmt;

use crate::ffi;

/// The failure of a call, with the code and the reason that the public API has for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: i32,
    reason: u32,
    message: String,
}

impl Error {
    pub(crate) fn of(raw: &ffi::Error) -> Self {
        // SAFETY: the library ends every message with a NUL, and an empty one is all NULs.
        let message = unsafe { CStr::from_ptr(raw.message.as_ptr()) };
        Self { code: raw.code, reason: raw.reason, message: message.to_string_lossy().into_owned() }
    }

    /// The gRPC status code.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.code
    }

    /// The name of the gRPC status code, such as `UNAVAILABLE`.
    #[must_use]
    pub fn code_name(&self) -> &'static str {
        // SAFETY: the library returns a string that lives as long as the program, for any number.
        name(unsafe { ffi::kvgrpc_code_name(self.code) })
    }

    /// The number of the `kvgrpc.v1.FailureReason`.
    #[must_use]
    pub fn reason(&self) -> u32 {
        self.reason
    }

    /// The short name of the reason, such as `PEER_LOST`.
    #[must_use]
    pub fn reason_name(&self) -> &'static str {
        // SAFETY: as for `code_name`.
        name(unsafe { ffi::kvgrpc_reason_name(self.reason) })
    }

    /// One sentence for people.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

fn name(raw: *const std::ffi::c_char) -> &'static str {
    // SAFETY: the callers pass constants of the library.
    unsafe { CStr::from_ptr(raw) }.to_str().unwrap_or("UNKNOWN")
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} ({}): {}", self.code_name(), self.reason_name(), self.message)
    }
}

impl std::error::Error for Error {}
