//! The meaning of messages, also of those with values that this version does not know.
//!
//! The accessors of generated enums read an unknown value as UNSPECIFIED. The schema makes that the safe case, so each
//! function here returns true only for known values.

use crate::error::is_retry;
use crate::v1::{
    Admission, CancelOutcome, CancelTransferResponse, EngineStatus, Failure, FailureReason, Lease, LeaseState,
    MemoryDisposition, Transfer, TransferState,
};

impl Transfer {
    /// Returns whether the transfer has ended, whatever the outcome. An unknown state is not an end.
    pub fn is_over(&self) -> bool {
        matches!(self.state(), TransferState::Succeeded | TransferState::Failed | TransferState::Cancelled)
    }

    /// Returns whether the transfer has succeeded: the KV of a RECEIVE is in its blocks, verified at the source.
    pub fn has_succeeded(&self) -> bool {
        self.state() == TransferState::Succeeded
    }

    /// Returns whether this engine's blocks may be reused. An unknown disposition is QUARANTINED.
    pub fn may_reuse_memory(&self) -> bool {
        self.is_over() && self.memory() == MemoryDisposition::Returned
    }
}

impl LeaseState {
    /// Returns whether the lease pins nothing any more. An unknown state is not an end.
    pub fn is_over(self) -> bool {
        !matches!(self, Self::Unspecified | Self::Live)
    }
}

impl Lease {
    /// Returns whether the lease pins nothing any more. An unknown state is not an end.
    pub fn is_over(&self) -> bool {
        self.state().is_over()
    }
}

impl Failure {
    /// Returns whether the same may succeed later, here or at another engine. It is false for an unknown reason.
    pub fn may_retry(&self) -> bool {
        is_retry(self.next()) && self.reason() != FailureReason::Unspecified
    }
}

impl EngineStatus {
    /// Returns whether the engine takes new work. It is false for an unknown admission.
    pub fn takes_work(&self) -> bool {
        self.admission() == Admission::Open
    }
}

impl CancelTransferResponse {
    /// Returns whether bytes may still be in flight, so that blocks stay QUARANTINED. It is true for an unknown
    /// outcome.
    pub fn may_be_in_flight(&self) -> bool {
        matches!(self.outcome(), CancelOutcome::Unspecified | CancelOutcome::CancelledInFlight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::NextStep;

    const UNKNOWN: i32 = 99;

    #[test]
    fn an_unknown_state_is_not_an_end() {
        let transfer = Transfer { state: UNKNOWN, memory: MemoryDisposition::Returned.into(), ..Default::default() };
        assert!(!transfer.is_over() && !transfer.has_succeeded() && !transfer.may_reuse_memory());
        assert!(!Lease { state: UNKNOWN, ..Default::default() }.is_over());
    }

    #[test]
    fn an_unknown_memory_disposition_is_quarantined() {
        let failed = Transfer { state: TransferState::Failed.into(), ..Default::default() };
        let reusable = |memory| Transfer { memory, ..failed.clone() }.may_reuse_memory();
        assert!(failed.is_over());
        assert!(reusable(MemoryDisposition::Returned.into()));
        assert!(!reusable(UNKNOWN) && !reusable(MemoryDisposition::Quarantined.into()));
    }

    #[test]
    fn an_unknown_reason_has_no_retry() {
        let failure = |reason| Failure { reason, next: NextStep::RetryHere.into(), ..Default::default() };
        assert!(failure(FailureReason::QueueFull.into()).may_retry());
        assert!(!failure(UNKNOWN).may_retry());
    }

    #[test]
    fn an_unknown_admission_takes_no_work() {
        let status = |admission| EngineStatus { admission, ..Default::default() };
        assert!(status(Admission::Open.into()).takes_work());
        assert!(!status(UNKNOWN).takes_work());
    }

    #[test]
    fn an_unknown_cancel_outcome_may_be_in_flight() {
        assert!(CancelTransferResponse { outcome: UNKNOWN, ..Default::default() }.may_be_in_flight());
    }
}
