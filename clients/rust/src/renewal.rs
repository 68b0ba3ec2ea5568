//! What is known of one lease that is kept alive. The functions are pure: every clock reading is an argument.
//!
//! The remaining time counts from the moment when a renewal was sent, so that the holder never relies on a lease longer
//! than its issuer does. A lease that could not be renewed in time counts as expired, whatever the server knows.

use std::time::Duration;

use tokio::time::Instant;

use crate::Error;
use crate::v1::{FailureReason, LeaseRef, LeaseState, RenewedLease};
use crate::values::std_duration;

/// Shortest time between two renewals of a lease, even when its cap leaves it little time.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// A lease that is kept alive, as it is known now.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The reference of the lease.
    pub lease: LeaseRef,
    /// The state of the lease in the last answer; UNSPECIFIED before the first answer, and for a lease that is unknown
    /// there.
    pub state: LeaseState,
    /// The reason that the lease is over; UNSPECIFIED while it is not, and for a reason that this version does not
    /// know.
    pub reason: FailureReason,
    /// Whether the lease is over: its holder must not rely on it, and it is not renewed any more.
    pub over: bool,
    /// The error with which the server refuses renewals from this client, if that ended the renewals.
    pub error: Option<Error>,
}

impl Kept {
    /// Returns the lease as it is before the first answer.
    pub(crate) fn unknown(lease: LeaseRef) -> Self {
        let (state, reason) = (LeaseState::Unspecified, FailureReason::Unspecified);
        Self { lease, state, reason, over: false, error: None }
    }
}

/// A kept lease and its times.
#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    pub kept: Kept,
    /// Time of the next renewal.
    pub due: Instant,
    /// End of the lease; None before the first answer.
    pub left_until: Option<Instant>,
}

impl Renewal {
    /// Returns a lease that is due at once, because only an answer tells how long it lives.
    pub fn new(lease: LeaseRef, now: Instant) -> Self {
        Self { kept: Kept::unknown(lease), due: now, left_until: None }
    }

    /// Takes the server's answer to a renewal that was sent at `sent`.
    pub fn answered(&mut self, row: RenewedLease, sent: Instant) {
        let left = row.remaining.map(std_duration).unwrap_or_default();
        if row.reason == i32::from(FailureReason::Unspecified) && !left.is_zero() {
            self.kept.state = row.state();
            self.left_until = Some(sent + left);
            self.due = sent + (left / 3).max(SHORTEST_PAUSE);
            return;
        }
        self.kept.over = true;
        self.kept.state = row.state();
        self.kept.reason = row.reason();
    }

    /// Records that no answer came. The next renewal is at `next`, or earlier when the lease would end first.
    pub fn not_answered(&mut self, next: Instant) {
        self.due = self.left_until.map_or(next, |until| next.min(until));
    }

    /// Records that the server takes no renewals from this client.
    pub fn refused(&mut self, error: &Error) {
        self.kept.over = true;
        self.kept.reason = error.reason();
        self.kept.error = Some(error.clone());
    }

    /// Returns whether the time of the lease is over, and then ends it.
    pub fn expired(&mut self, now: Instant) -> bool {
        if self.kept.over || self.left_until.is_none_or(|until| now < until) {
            return false;
        }
        self.kept.over = true;
        self.kept.state = LeaseState::Expired;
        self.kept.reason = FailureReason::LeaseExpired;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::proto_duration;

    const TTL: Duration = Duration::from_secs(30);

    fn row(left: Duration, reason: FailureReason, state: LeaseState) -> RenewedLease {
        RenewedLease { remaining: Some(proto_duration(left)), reason: reason.into(), state: state.into() }
    }

    fn renewed() -> (Renewal, Instant) {
        let now = Instant::now();
        let mut renewal = Renewal::new(LeaseRef::default(), now);
        renewal.answered(row(TTL, FailureReason::Unspecified, LeaseState::Live), now);
        (renewal, now)
    }

    #[test]
    fn a_lease_is_renewed_at_once_and_then_every_third_of_what_was_granted() {
        let (renewal, sent) = renewed();
        assert_eq!(renewal.due, sent + TTL / 3);
        assert_eq!(renewal.kept.state, LeaseState::Live);
    }

    #[test]
    fn a_lease_that_is_over_keeps_its_state_and_reason() {
        let (mut renewal, sent) = renewed();
        renewal.answered(row(Duration::ZERO, FailureReason::LeaseReleased, LeaseState::Done), sent);
        assert!(renewal.kept.over);
        assert_eq!((renewal.kept.state, renewal.kept.reason), (LeaseState::Done, FailureReason::LeaseReleased));
    }

    #[test]
    fn a_reason_that_is_unknown_ends_a_lease_too() {
        let (mut renewal, sent) = renewed();
        renewal.answered(RenewedLease { reason: 99, ..row(TTL, FailureReason::Unspecified, LeaseState::Live) }, sent);
        assert!(renewal.kept.over);
    }

    #[test]
    fn a_lease_that_is_not_renewed_in_time_counts_as_expired_from_the_moment_of_sending() {
        let (mut renewal, sent) = renewed();
        renewal.not_answered(sent + 2 * TTL);
        assert_eq!(renewal.due, sent + TTL);
        assert!(!renewal.expired(sent + TTL - Duration::from_millis(1)));
        assert!(renewal.expired(sent + TTL));
        assert_eq!((renewal.kept.state, renewal.kept.reason), (LeaseState::Expired, FailureReason::LeaseExpired));
    }
}
