//! Pulls and pushes that wait for their end, and one call that moves the KV of a prompt.
//!
//! A transfer that ends without its KV is an error here. At the server it is not an error of a call.

use std::time::Duration;

use tokio::time::Instant;
use tonic::{Code, Response};

use crate::cleanup::{Side, clean_up};
use crate::client::Client;
use crate::v1::cancel_transfer_request::Target;
use crate::v1::finished_blocks_request::Job;
use crate::v1::pull_blocks_request::Pull;
use crate::v1::{
    AllocateBlocksRequest, Blocks, Content, FailureReason, FinishedBlocksRequest, GroupBlockCount, HandOver, NextStep,
    PullBlocksRequest, PullDestination, ReserveBlocksRequest, Transfer, TransferWait, WaitCondition, WaitingFor,
};
use crate::values::{proto_duration, random_key};
use crate::{Error, Waited};

/// Wait of one call: half of what a server allows, so that proxies with a limit of one minute let it pass.
const ONE_WAIT: Duration = Duration::from_secs(30);
/// Default time of a move. It exceeds the sum of a server's defaults for queue, transfer and settle.
const MOVE: Duration = Duration::from_secs(90);
const FAILED: &str = "the move failed";

impl Transfer {
    /// Returns the error of a transfer that has ended without its KV.
    ///
    /// # Errors
    ///
    /// FAILED or CANCELLED: ABORTED with the reason and the next step of the failure, and with `transfer_id` and
    /// `phase` in the metadata.
    pub fn check(&self) -> Result<(), Error> {
        if !self.is_over() || self.has_succeeded() {
            return Ok(());
        }
        let failure = self.failure.clone().unwrap_or_default();
        let (reason, next) = match FailureReason::try_from(failure.reason) {
            Ok(FailureReason::Unspecified) => (FailureReason::Cancelled, NextStep::Unspecified),
            Ok(reason) => (reason, failure.next()),
            Err(_) => (FailureReason::Internal, NextStep::Unspecified),
        };
        let phase = failure.phase().as_str_name().trim_start_matches("TRANSFER_PHASE_").to_lowercase();
        let message =
            if failure.message.is_empty() { "the transfer has ended without its KV" } else { &failure.message };
        Err(Error::because(Code::Aborted, reason, next, message)
            .with("transfer_id", &self.transfer_id)
            .with("phase", &phase))
    }
}

impl Client {
    /// Makes a pull whose destination is stated, and waits for its end. It returns the transfer once the KV is in its
    /// blocks. Set `wait.until` to wait for the return of the memory as well.
    ///
    /// # Errors
    ///
    /// The error that refuses the call, or the error of [`Transfer::check`]. When the time is over, it is
    /// DEADLINE_EXCEEDED: then the transfer continues, and CancelTransfer ends it.
    pub async fn pull(&self, mut request: PullBlocksRequest, timeout: Duration) -> Result<Transfer, Error> {
        let (end, until) = (Instant::now() + timeout, in_call(&mut request.wait, timeout));
        let reply = self.handoff().pull_blocks(request).await.map(Response::into_inner)?;
        self.ended(reply.transfer.unwrap_or_default(), reply.condition_met, until, end).await
    }

    /// Reserves blocks for what the request's source will push, and waits for it as [`Client::pull`] does.
    ///
    /// # Errors
    ///
    /// The errors of [`Client::pull`].
    pub async fn receive(&self, mut request: ReserveBlocksRequest, timeout: Duration) -> Result<Transfer, Error> {
        let (end, until) = (Instant::now() + timeout, in_call(&mut request.wait, timeout));
        let reply = self.handoff().reserve_blocks(request).await.map(Response::into_inner)?;
        self.ended(reply.transfer.unwrap_or_default(), reply.condition_met, until, end).await
    }

    async fn ended(
        &self,
        transfer: Transfer,
        condition_met: bool,
        until: WaitCondition,
        end: Instant,
    ) -> Result<Transfer, Error> {
        let waited = if condition_met {
            Waited { transfer, condition_met }
        } else {
            self.wait(transfer.transfer_id, until, end.saturating_duration_since(Instant::now())).await?
        };
        if !waited.condition_met {
            let why = "the transfer is not done in its time";
            let late = Error::because(Code::DeadlineExceeded, FailureReason::Deadline, NextStep::Unspecified, why);
            return Err(late.with("transfer_id", &waited.transfer.transfer_id).with("phase", &phase(&waited.transfer)));
        }
        waited.transfer.check()?;
        Ok(waited.transfer)
    }
}

/// Lets a call wait by itself, and returns what it waits for.
fn in_call(wait: &mut Option<TransferWait>, timeout: Duration) -> WaitCondition {
    let wait = wait.get_or_insert_default();
    wait.timeout = Some(proto_duration(timeout.min(ONE_WAIT)));
    wait.until()
}

/// Returns what a transfer that is not done waits for, or its phase.
fn phase(transfer: &Transfer) -> String {
    if transfer.is_over() {
        return "return".to_owned();
    }
    match (transfer.waiting_for(), transfer.phases.last()) {
        (WaitingFor::Unspecified, None) => "queue".to_owned(),
        (WaitingFor::Unspecified, Some(last)) => {
            last.phase().as_str_name().trim_start_matches("TRANSFER_PHASE_").to_lowercase()
        }
        (waiting, _) => waiting.as_str_name().trim_start_matches("WAITING_FOR_").to_lowercase(),
    }
}

/// Options of a move.
#[derive(Clone, Debug)]
pub struct Moving {
    /// A label of the transfer at both engines.
    pub request_id: String,
    /// The destination blocks. With None, as many blocks are allocated at the destination as the source has, group by
    /// group.
    pub into: Option<Blocks>,
    /// Time limit of the whole move; 90 s by default.
    pub timeout: Duration,
}

impl Default for Moving {
    fn default() -> Self {
        Self { request_id: String::new(), into: None, timeout: MOVE }
    }
}

/// The result of a move.
#[derive(Clone, Debug, PartialEq)]
pub struct Moved {
    /// The RECEIVE at the destination.
    pub transfer: Transfer,
    /// The destination's blocks. Blocks that the move allocated are freed by their allocation id.
    pub blocks: Blocks,
}

/// Copies the KV of a prompt from blocks of one engine to another engine, and waits until the KV is there. It allocates
/// blocks at the destination, hands the source's blocks over for reading, and lets the destination pull. Both servers
/// must manage their pools. The caller keeps the source's blocks.
///
/// A move that fails, or whose future is dropped, leaves nothing behind: it is cancelled at both sides, and what it
/// allocated is freed.
///
/// # Errors
///
/// The error that refuses a call, or the errors of [`Client::pull`].
pub async fn move_blocks(
    source: &Client,
    destination: &Client,
    blocks: Blocks,
    content: Content,
    moving: Moving,
) -> Result<Moved, Error> {
    let end = Instant::now() + moving.timeout;
    let key = random_key().to_vec();
    let (into, allocated) = match moving.into {
        Some(into) => (into, Vec::new()),
        None => {
            let request = AllocateBlocksRequest {
                group_block_counts: counts_of(&blocks),
                request_id: moving.request_id.clone(),
                label: "move".to_owned(),
                ..Default::default()
            };
            let taken = destination.pool().allocate_blocks(request).await?.into_inner().blocks.unwrap_or_default();
            let allocated = vec![taken.allocation_id.clone()];
            (taken, allocated)
        }
    };
    let side = |client: &Client, free_allocation_ids| Side {
        client: client.clone(),
        target: Target::TransferKey(key.clone()),
        free_allocation_ids,
    };
    let mut left = Left(vec![side(source, Vec::new()), side(destination, allocated)]);
    let job = HandOver {
        blocks: Some(blocks),
        content: Some(content.clone()),
        ttl: Some(proto_duration(moving.timeout)),
        ..Default::default()
    };
    let handing_over = FinishedBlocksRequest {
        transfer_key: key.clone(),
        request_id: moving.request_id.clone(),
        job: Some(Job::ForReaders(job)),
        ..Default::default()
    };
    let pull = PullBlocksRequest {
        content: Some(content),
        destination: Some(PullDestination { blocks: Some(into.clone()), ..Default::default() }),
        request_id: moving.request_id,
        ..Default::default()
    };
    let moved = hand_over_and_pull(source, destination, handing_over, pull, end).await;
    let sides = std::mem::take(&mut left.0);
    if moved.is_err() {
        clean_up(sides, FAILED).await;
    }
    Ok(Moved { transfer: moved?, blocks: into })
}

async fn hand_over_and_pull(
    source: &Client,
    destination: &Client,
    handing_over: FinishedBlocksRequest,
    mut pull: PullBlocksRequest,
    end: Instant,
) -> Result<Transfer, Error> {
    let handed_over = source.handoff().finished_blocks(handing_over).await?.into_inner();
    pull.pull = handed_over.grant.map(Pull::Grant);
    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    destination.pull(pull, left).await
}

/// The traces of an unfinished move at the engines.
struct Left(Vec<Side>);

impl Drop for Left {
    fn drop(&mut self) {
        let sides = std::mem::take(&mut self.0);
        if let (false, Ok(runtime)) = (sides.is_empty(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { clean_up(sides, FAILED).await });
        }
    }
}

fn counts_of(blocks: &Blocks) -> Vec<GroupBlockCount> {
    let count = |runs: &crate::v1::BlockRuns| runs.counts.iter().sum::<u32>();
    blocks
        .groups
        .iter()
        .map(|row| GroupBlockCount { group: row.group, block_count: row.runs.as_ref().map_or(0, count) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{Failure, TransferPhase, TransferState};

    #[test]
    fn a_transfer_that_ended_without_its_kv_is_an_error_with_what_its_failure_says() {
        let failure = Failure {
            reason: FailureReason::LeaseExpired.into(),
            next: NextStep::Recompute.into(),
            phase: TransferPhase::Settle.into(),
            message: "too late".into(),
            ..Default::default()
        };
        let failed = Transfer {
            transfer_id: "t-1".into(),
            state: TransferState::Failed.into(),
            failure: Some(failure),
            ..Default::default()
        };
        let error = failed.check().unwrap_err();
        assert_eq!((error.code(), error.next()), (Code::Aborted, NextStep::Recompute));
        assert_eq!(error.reason(), FailureReason::LeaseExpired);
        assert_eq!((error.message(), error.metadata()["phase"].as_str()), ("too late", "settle"));
        assert_eq!(error.metadata()["transfer_id"], "t-1");
    }

    #[test]
    fn a_transfer_that_succeeded_or_is_not_over_is_no_error() {
        for state in [TransferState::Pending, TransferState::Active, TransferState::Succeeded] {
            assert!(Transfer { state: state.into(), ..Default::default() }.check().is_ok());
        }
        let cancelled = Transfer { state: TransferState::Cancelled.into(), ..Default::default() };
        assert_eq!(cancelled.check().unwrap_err().reason_name(), "CANCELLED");
    }
}
