//! The typed error of a call.

use std::collections::HashMap;
use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::v1::{Failure, FailureReason, NextStep};

/// The domain of kvgrpc's reasons in `google.rpc.ErrorInfo`.
pub const DOMAIN: &str = "kvgrpc.dev";

/// The reason of a failed call, from its gRPC status and the details in it.
#[derive(Clone, Debug)]
pub struct Error(Box<Said>);

#[derive(Clone, Debug)]
struct Said {
    code: Code,
    message: String,
    reason: String,
    next: NextStep,
    engine_id: String,
    incarnation: u64,
    violations: Vec<FieldViolation>,
    retry_delay: Option<Duration>,
    metadata: HashMap<String, String>,
    called: Called,
}

/// The call that a status belongs to. It is the source of the status, the only part of it that no server fills.
#[derive(Clone, Debug, Default)]
pub(crate) struct Called {
    pub method: String,
    pub address: Arc<str>,
    pub idempotency_key: String,
}

impl Called {
    /// Returns the same status, which now knows its call.
    pub fn note(&self, mut status: Status) -> Status {
        status.set_source(Arc::new(self.clone()));
        status
    }
}

impl fmt::Display for Called {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} at {}", self.method, self.address)
    }
}

impl std::error::Error for Called {}

/// A wrong field of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldViolation {
    /// Path of the field in the request.
    pub field: String,
    /// Description of what is wrong with the field.
    pub description: String,
}

impl Error {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Status::new(code, message).into()
    }

    pub(crate) fn because(code: Code, reason: FailureReason, next: NextStep, message: impl Into<String>) -> Self {
        let mut error = Self::new(code, message);
        error.0.reason = short(reason.as_str_name(), "FAILURE_REASON_");
        error.0.next = next;
        error
    }

    /// Returns the same error with one more entry of metadata.
    pub(crate) fn with(mut self, key: &str, value: &str) -> Self {
        self.0.metadata.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Returns the error of a call that a message reports, as if the call had ended with it.
    pub(crate) fn reported(status_code: u32, failure: Failure) -> Self {
        let code = i32::try_from(status_code).map_or(Code::Unknown, Code::from_i32);
        let mut error = Self::because(code, failure.reason(), failure.next(), failure.message.clone());
        if FailureReason::try_from(failure.reason).is_err() {
            error.0.reason = failure.reason.to_string();
        }
        error
    }

    /// Returns the gRPC status code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// Returns the name of the code, for example `NOT_FOUND`.
    pub fn code_name(&self) -> &'static str {
        CODES.iter().find(|(code, _)| *code == self.0.code).map_or("UNKNOWN", |(_, name)| *name)
    }

    /// Returns the reason; UNSPECIFIED when the status names no reason, or one that this version does not know.
    pub fn reason(&self) -> FailureReason {
        FailureReason::from_str_name(&format!("FAILURE_REASON_{}", self.0.reason)).unwrap_or_default()
    }

    /// Returns the reason as the server named it, without its prefix; empty when the server named none.
    pub fn reason_name(&self) -> &str {
        &self.0.reason
    }

    /// Returns the recommended next step; UNSPECIFIED, which is no retry, when the step or the reason is unknown.
    pub fn next(&self) -> NextStep {
        if self.reason() == FailureReason::Unspecified { NextStep::Unspecified } else { self.0.next }
    }

    /// Returns whether the same call may succeed later, here or at another engine. It is false when that is unknown.
    pub fn may_retry(&self) -> bool {
        is_retry(self.next())
    }

    /// Returns the message: one sentence for readers.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Returns the engine that refused; empty when no engine did.
    pub fn engine_id(&self) -> &str {
        &self.0.engine_id
    }

    /// Returns the incarnation of the engine that refused; 0 when no engine did.
    pub fn incarnation(&self) -> u64 {
        self.0.incarnation
    }

    /// Returns the wrong fields of the request.
    pub fn violations(&self) -> &[FieldViolation] {
        &self.0.violations
    }

    /// Returns how long to wait before the same call may succeed, where the server states it.
    pub fn retry_delay(&self) -> Option<Duration> {
        self.0.retry_delay
    }

    /// Returns what the reason needs: `group`, `free_block_count`, `limit`, `phase` and others.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.0.metadata
    }

    /// Returns the called method, `PoolService/AllocateBlocks`; empty where the error is not of a unary call.
    pub fn method(&self) -> &str {
        &self.0.called.method
    }

    /// Returns the server that was called.
    pub fn address(&self) -> &str {
        &self.0.called.address
    }

    /// Returns the key of the request, where it has one. The same request with this key retries the call and makes no
    /// second one.
    pub fn idempotency_key(&self) -> &str {
        &self.0.called.idempotency_key
    }

    /// Returns whether the same call may succeed in a moment. That is so when the server did not answer or has no room
    /// now, and when something other than a kvgrpc server failed (a cut connection, a proxy), which names no reason.
    pub(crate) fn is_passing(&self) -> bool {
        match self.0.code {
            Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted => true,
            Code::Cancelled | Code::Internal | Code::Unknown => self.0.reason.is_empty(),
            _ => false,
        }
    }
}

/// Returns whether a step is a retry of what failed.
pub(crate) fn is_retry(next: NextStep) -> bool {
    matches!(next, NextStep::RetryHere | NextStep::RetryOtherConsumer)
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let details = status.get_error_details();
        let violations = details.bad_request().map(|bad| bad.field_violations.clone()).unwrap_or_default();
        let mut said = Said {
            code: status.code(),
            message: status.message().to_owned(),
            reason: String::new(),
            next: NextStep::Unspecified,
            engine_id: String::new(),
            incarnation: 0,
            violations: violations
                .into_iter()
                .map(|violation| FieldViolation { field: violation.field, description: violation.description })
                .collect(),
            retry_delay: details.retry_info().and_then(|info| info.retry_delay),
            metadata: HashMap::new(),
            called: status.source().and_then(|source| source.downcast_ref::<Called>()).cloned().unwrap_or_default(),
        };
        // The reasons of others, for example of proxies, are not kvgrpc's, even where a name is the same.
        if let Some(info) = details.error_info().filter(|info| info.domain == DOMAIN) {
            let of = |key: &str| info.metadata.get(key).cloned().unwrap_or_default();
            said.reason = info.reason.clone();
            said.next = NextStep::from_str_name(&format!("NEXT_STEP_{}", of("next"))).unwrap_or_default();
            said.engine_id = of("engine_id");
            said.incarnation = of("incarnation").parse().unwrap_or_default();
            said.metadata = info.metadata.clone();
        }
        said.message = said_once(said.message, &said.reason, &said.violations);
        Self(Box::new(said))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.code_name())?;
        if !self.0.reason.is_empty() {
            write!(out, " {}", self.0.reason)?;
        }
        out.write_str(": ")?;
        let same = |violation: &&FieldViolation| violation.description == self.0.message;
        if let Some(violation) = self.0.violations.iter().find(same) {
            write!(out, "{}: ", violation.field)?;
        }
        out.write_str(&self.0.message)?;
        for violation in self.0.violations.iter().filter(|violation| !same(violation)) {
            write!(out, "; {}: {}", violation.field, violation.description)?;
        }
        if !self.0.called.method.is_empty() {
            write!(out, " ({})", self.0.called)?;
        }
        Ok(())
    }
}

/// Returns a message without the reason and the violations. A server adds both for tools that show nothing else.
fn said_once(message: String, reason: &str, violations: &[FieldViolation]) -> String {
    let bare = match message.strip_prefix(reason).and_then(|rest| rest.strip_prefix(": ")) {
        Some(rest) if !reason.is_empty() => rest,
        _ => &message,
    };
    for violation in violations {
        if bare.starts_with(&format!("{}: {}", violation.field, violation.description)) {
            return violation.description.clone();
        }
    }
    let listed = violations.first().and_then(|first| bare.find(&format!("; {}: ", first.field)));
    bare[..listed.unwrap_or(bare.len())].to_owned()
}

impl std::error::Error for Error {}

fn short(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_owned()
}

const CODES: [(Code, &str); 17] = [
    (Code::Ok, "OK"),
    (Code::Cancelled, "CANCELLED"),
    (Code::Unknown, "UNKNOWN"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::AlreadyExists, "ALREADY_EXISTS"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::OutOfRange, "OUT_OF_RANGE"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::DataLoss, "DATA_LOSS"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];
