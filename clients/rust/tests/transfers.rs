//! Tests waits for transfers, watches of transfers, and clean-ups.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::proxy::Proxy;
use common::{Answers, Server, Transfers, answers, client, header, on, soon};
use kvgrpc::v1::cancel_transfer_request::Target;
use kvgrpc::v1::{
    CancelOutcome, CancelTransferRequest, CancelTransferResponse, FailureReason, MemoryDisposition, NextStep, Transfer,
    TransferFilter, TransferState, WaitCondition, WaitTransferRequest, WaitTransferResponse, WatchTransfersRequest,
    WatchTransfersResponse,
};
use kvgrpc::{DOMAIN, Options, Position, Side, Watch, clean_up, std_duration};
use tokio::sync::mpsc;
use tonic::{Code, Request, Status};
use tonic_types::{ErrorDetails, StatusExt};

fn transfer(state: TransferState) -> Option<Transfer> {
    Some(Transfer { transfer_id: "t".into(), state: state.into(), ..Default::default() })
}

/// Starts a server whose n-th WaitTransfer is answered by `answer(n)`. Returns the timeouts that it was asked for.
async fn waiting(
    answer: impl Fn(usize) -> Result<bool, Status> + Send + Sync + 'static,
) -> (common::Running, mpsc::UnboundedReceiver<Duration>) {
    let (sender, asked) = mpsc::unbounded_channel();
    let calls = AtomicUsize::new(0);
    let wait_transfer = on(move |request: Request<WaitTransferRequest>| {
        sender.send(request.into_inner().timeout.map(std_duration).expect("a timeout")).expect("the test reads");
        let answer = answer(calls.fetch_add(1, Ordering::SeqCst)).map(|condition_met| {
            let state = if condition_met { TransferState::Succeeded } else { TransferState::Active };
            WaitTransferResponse { header: header(1, 1), transfer: transfer(state), condition_met }
        });
        async move { answer }
    });
    let transfers = Transfers { wait_transfer, ..Default::default() };
    (Server { transfers, ..Default::default() }.start().await, asked)
}

#[tokio::test]
async fn a_wait_asks_again_until_the_condition_is_met() {
    let (server, mut asked) = waiting(|call| Ok(call == 2)).await;
    let client = client(server.address);
    let waited = soon(client.wait("t", WaitCondition::Ended, Duration::from_secs(300))).await.unwrap();
    assert!(waited.condition_met && waited.transfer.has_succeeded());
    let asked: Vec<_> = std::iter::from_fn(|| asked.try_recv().ok()).collect();
    assert_eq!(asked.len(), 3);
    assert!(asked.iter().all(|timeout| *timeout == Duration::from_secs(30)), "a wait of minutes is many short ones");
}

#[tokio::test]
async fn a_wait_whose_time_is_over_gives_the_transfer_as_it_is() {
    let (server, _asked) = waiting(|_| Ok(false)).await;
    let client = client(server.address);
    let waited = soon(client.wait("t", WaitCondition::Returned, Duration::from_millis(300))).await.unwrap();
    assert!(!waited.condition_met && !waited.transfer.is_over());
}

#[tokio::test]
async fn a_wait_survives_a_server_that_is_away_for_longer_than_the_repetitions_of_a_call() {
    let (server, mut asked) = waiting(|call| if call < 6 { Err(Status::unavailable("away")) } else { Ok(true) }).await;
    let client = client(server.address);
    let waited = soon(client.wait("t", WaitCondition::Ended, Duration::from_secs(60))).await.unwrap();
    assert!(waited.condition_met);
    assert_eq!(std::iter::from_fn(|| asked.try_recv().ok()).count(), 7);
}

#[tokio::test]
async fn a_wait_for_an_unknown_transfer_is_an_error_at_once() {
    let (server, _asked) = waiting(|_| Err(Status::not_found("unknown"))).await;
    let client = client(server.address);
    let unknown = soon(client.wait("t", WaitCondition::Ended, Duration::from_secs(60))).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

/// Returns a refusal of a kvgrpc server.
fn refusal(code: Code, reason: &str, next: &str) -> Status {
    let metadata = [("next".to_owned(), next.to_owned()), ("engine_id".to_owned(), "P".to_owned())];
    Status::with_error_details(code, "no", ErrorDetails::with_error_info(reason, DOMAIN, metadata))
}

#[tokio::test]
async fn a_wait_goes_on_through_what_passes_and_what_no_server_of_kvgrpc_said() {
    let (server, mut asked) = waiting(|call| match call {
        0 => Err(refusal(Code::ResourceExhausted, "QUEUE_FULL", "RETRY_HERE")),
        1 => Err(refusal(Code::DeadlineExceeded, "DEADLINE", "RETRY_HERE")),
        2 => Err(Status::cancelled("reset by a proxy")),
        3 => Err(Status::internal("RST_STREAM")),
        4 => Err(Status::unknown("no trailers")),
        _ => Ok(true),
    })
    .await;
    let client = client(server.address);
    assert!(soon(client.wait("t", WaitCondition::Ended, Duration::from_secs(60))).await.unwrap().condition_met);
    assert_eq!(std::iter::from_fn(|| asked.try_recv().ok()).count(), 6);
}

#[tokio::test]
async fn a_wait_ends_with_what_a_server_of_kvgrpc_says_in_the_same_codes() {
    for code in [Code::Cancelled, Code::Internal, Code::Unknown] {
        let (server, mut asked) = waiting(move |_| Err(refusal(code, "INTERNAL", "RECOMPUTE"))).await;
        let client = client(server.address);
        let refused = soon(client.wait("t", WaitCondition::Ended, Duration::from_secs(60))).await.unwrap_err();
        assert_eq!((refused.code(), refused.reason()), (code, FailureReason::Internal));
        assert_eq!(std::iter::from_fn(|| asked.try_recv().ok()).count(), 1);
    }
}

fn at(event_seq: u64) -> WatchTransfersResponse {
    WatchTransfersResponse { header: header(7, event_seq), ..Default::default() }
}

fn change(event_seq: u64) -> WatchTransfersResponse {
    WatchTransfersResponse { transfer: transfer(TransferState::Active), ..at(event_seq) }
}

/// Starts a server whose n-th WatchTransfers is `stream(n)`. Returns where each one began.
async fn watched(
    stream: impl Fn(usize) -> Result<Answers<WatchTransfersResponse>, Status> + Send + Sync + 'static,
) -> (common::Running, mpsc::UnboundedReceiver<Position>) {
    let (sender, began) = mpsc::unbounded_channel();
    let calls = AtomicUsize::new(0);
    let watch_transfers = on(move |request: Request<WatchTransfersRequest>| {
        let request = request.into_inner();
        let position = Position { event_seq: request.after_event_seq, incarnation: request.incarnation };
        sender.send(position).expect("the test reads");
        let stream = stream(calls.fetch_add(1, Ordering::SeqCst));
        async move { stream }
    });
    let transfers = Transfers { watch_transfers, ..Default::default() };
    (Server { transfers, ..Default::default() }.start().await, began)
}

async fn seqs(watch: &mut Watch, count: usize) -> Vec<u64> {
    let mut found = Vec::new();
    for _ in 0..count {
        let message = soon(watch.next()).await.expect("no end").expect("no error");
        found.push(message.header.expect("a header").event_seq);
    }
    found
}

#[tokio::test]
async fn a_watch_resumes_after_the_last_message_also_after_one_without_a_transfer() {
    let broken = || Some(Status::unavailable("cut"));
    let (server, mut began) = watched(move |call| {
        Ok(match call {
            0 => answers(vec![at(10), change(11)], broken()),
            1 => answers(vec![at(12)], broken()),
            _ => answers(vec![at(12), change(13)], None),
        })
    })
    .await;
    let mut watch = client(server.address).watch(TransferFilter::default(), None);
    assert_eq!(seqs(&mut watch, 5).await, [10, 11, 12, 12, 13]);
    let position = |event_seq, incarnation| Position { event_seq, incarnation };
    for expected in [position(0, 0), position(11, 7), position(12, 7)] {
        assert_eq!(soon(began.recv()).await, Some(expected));
    }
}

#[tokio::test]
async fn a_watch_begins_after_the_position_that_is_given_and_tells_no_change_twice() {
    let (server, mut began) =
        watched(|call| Ok(answers(if call == 0 { vec![change(4), change(5), change(6)] } else { vec![] }, None))).await;
    let known = Position::from(&header(7, 5).unwrap());
    let mut watch = client(server.address).watch(TransferFilter::default(), Some(known));
    assert_eq!(seqs(&mut watch, 1).await, [6]);
    assert_eq!(soon(began.recv()).await, Some(known));
}

#[tokio::test]
async fn lost_history_is_handed_on_and_the_watch_goes_on_behind_it() {
    let (server, _began) = watched(|_| {
        let lost = WatchTransfersResponse { history_lost: true, ..at(40) };
        Ok(answers(vec![lost, change(41)], None))
    })
    .await;
    let known = Position { event_seq: 3, incarnation: 7 };
    let mut watch = client(server.address).watch(TransferFilter::default(), Some(known));
    assert!(soon(watch.next()).await.unwrap().unwrap().history_lost);
    assert_eq!(seqs(&mut watch, 1).await, [41]);
}

#[tokio::test]
async fn a_watch_ends_with_incarnation_changed_when_the_life_is_over() {
    let (server, _began) = watched(|call| match call {
        0 => Ok(answers(vec![at(1)], Some(Status::unavailable("cut")))),
        _ => Err(refusal(Code::Aborted, "INCARNATION_CHANGED", "RECOMPUTE")),
    })
    .await;
    let mut watch = client(server.address).watch(TransferFilter::default(), None);
    assert_eq!(seqs(&mut watch, 1).await, [1]);
    let over = soon(watch.next()).await.unwrap().unwrap_err();
    assert_eq!((over.code(), over.reason()), (Code::Aborted, FailureReason::IncarnationChanged));
    assert!(soon(watch.next()).await.is_none());
}

#[tokio::test]
async fn a_message_of_another_life_ends_a_watch_too() {
    let other = WatchTransfersResponse { header: header(8, 1), ..Default::default() };
    let (server, _began) = watched(move |_| Ok(answers(vec![at(1), other.clone()], None))).await;
    let mut watch = client(server.address).watch(TransferFilter::default(), None);
    assert_eq!(seqs(&mut watch, 1).await, [1]);
    let over = soon(watch.next()).await.unwrap().unwrap_err();
    assert_eq!((over.code(), over.reason()), (Code::Aborted, FailureReason::IncarnationChanged));
    assert_eq!(over.next(), NextStep::Recompute);
}

#[tokio::test]
async fn a_watch_outlasts_a_connection_that_is_cut() {
    let (server, mut began) = watched(|call| Ok(answers(vec![change(call as u64 + 1)], None))).await;
    let proxy = Proxy::to(server.address).await;
    let mut watch = client(proxy.address).watch(TransferFilter::default(), None);
    assert_eq!(seqs(&mut watch, 1).await, [1]);
    soon(began.recv()).await.unwrap();
    proxy.cut();
    assert_eq!(seqs(&mut watch, 1).await, [2]);
    assert_eq!(soon(began.recv()).await, Some(Position { event_seq: 1, incarnation: 7 }));
}

/// Runs a watch into its patience of 300 ms with `first` on its stream, and then cuts it off.
async fn quiet(first: Vec<WatchTransfersResponse>) -> Vec<u64> {
    let told = first.len();
    let (server, mut began) =
        watched(move |call| Ok(answers(if call == 0 { first.clone() } else { vec![at(9)] }, None))).await;
    let proxy = Proxy::to(server.address).await;
    let patience = Duration::from_millis(300);
    let options = Options { watch_patience: patience, ..Default::default() };
    let client = kvgrpc::connect(&proxy.address.to_string(), options).unwrap();
    let mut watch = client.watch(TransferFilter::default(), None);
    soon(began.recv()).await.unwrap();
    seqs(&mut watch, told).await;
    tokio::time::sleep(patience + Duration::from_millis(100)).await;
    proxy.cut();
    seqs(&mut watch, 1).await
}

#[tokio::test]
async fn a_watch_on_which_nothing_was_said_for_long_outlasts_a_cut() {
    assert_eq!(quiet(vec![at(1)]).await, [9]);
    assert_eq!(quiet(vec![]).await, [9]);
}

#[tokio::test]
async fn a_watch_that_is_taken_only_to_be_ended_at_once_runs_out_of_patience() {
    let (server, _began) = watched(|_| Ok(answers(vec![], Some(Status::resource_exhausted("too many"))))).await;
    let options = Options { watch_patience: Duration::from_millis(300), ..Default::default() };
    let client = kvgrpc::connect(&server.address.to_string(), options).unwrap();
    let mut watch = client.watch(TransferFilter::default(), None);
    assert_eq!(soon(watch.next()).await.unwrap().unwrap_err().code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn a_watch_of_a_server_that_stays_away_ends_with_the_last_error() {
    let (server, _began) = watched(|_| Err(Status::unavailable("away"))).await;
    let options = Options { watch_patience: Duration::from_millis(200), ..Default::default() };
    let client = kvgrpc::connect(&server.address.to_string(), options).unwrap();
    let mut watch = client.watch(TransferFilter::default(), None);
    assert_eq!(soon(watch.next()).await.unwrap().unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn every_side_is_told_to_clean_up_though_another_fails() {
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let record = Arc::clone(&seen);
    let cancel_transfer = on(move |request: Request<CancelTransferRequest>| {
        record.lock().unwrap().push(request.into_inner());
        async {
            let outcome = CancelOutcome::CancelledInFlight.into();
            let failed = Transfer { memory: MemoryDisposition::Quarantined.into(), ..Default::default() };
            Ok(CancelTransferResponse { header: header(1, 1), outcome, transfers: vec![failed] })
        }
    });
    let transfers = Transfers { cancel_transfer, ..Default::default() };
    let good = Server { transfers, ..Default::default() }.start().await;
    let bad = Server::default().start().await;
    let side = |address, target| Side { client: client(address), target, free_allocation_ids: vec!["a".into()] };
    let sides =
        vec![side(bad.address, Target::TransferKey(vec![1; 16])), side(good.address, Target::TransferId("t".into()))];
    let answers = soon(clean_up(sides, "the request failed")).await;
    assert_eq!(answers[0].as_ref().unwrap_err().code(), Code::Unimplemented);
    let answer = answers[1].as_ref().unwrap();
    assert!(answer.may_be_in_flight() && !answer.transfers[0].may_reuse_memory());
    let seen = seen.lock().unwrap();
    assert_eq!((seen.len(), seen[0].message.as_str()), (1, "the request failed"));
    assert_eq!((&seen[0].target, seen[0].free_allocation_ids.len()), (&Some(Target::TransferId("t".into())), 1));
    assert!(!seen[0].idempotency_key.is_empty());
}

#[tokio::test]
async fn cleaning_up_goes_on_though_nobody_waits_for_it_any_more() {
    let (sender, mut told) = mpsc::unbounded_channel();
    let calls = AtomicUsize::new(0);
    let cancel_transfer = on(move |_| {
        sender.send(()).expect("the test reads");
        let first = calls.fetch_add(1, Ordering::SeqCst) == 0;
        async move { if first { Err(Status::unavailable("away")) } else { Ok(CancelTransferResponse::default()) } }
    });
    let transfers = Transfers { cancel_transfer, ..Default::default() };
    let server = Server { transfers, ..Default::default() }.start().await;
    let target = Target::TransferId("t".into());
    let side = Side { client: client(server.address), target, free_allocation_ids: vec![] };
    let caller = tokio::spawn(async move { clean_up(vec![side], "the client hung up").await });
    soon(told.recv()).await.unwrap();
    caller.abort();
    assert!(soon(caller).await.unwrap_err().is_cancelled());
    soon(told.recv()).await.expect("the call is repeated");
}
