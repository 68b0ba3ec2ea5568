//! Tests watches of engines, and leases that are kept alive.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::proxy::Proxy;
use common::{Answers, Handshakes, Leases, Running, Server, answers, client, header, on, soon};
use kvgrpc::v1::lease_ref::By;
use kvgrpc::v1::{
    FailureReason, KeepAliveRequest, KeepAliveResponse, LeaseRef, LeaseState, RenewedLease, WatchEngineRequest,
    WatchEngineResponse,
};
use kvgrpc::{EngineEvent, EngineWatch, proto_duration, std_duration};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt};

/// Starts a server whose n-th WatchEngine reports the n-th life, and stays open.
async fn living() -> Running {
    let calls = AtomicUsize::new(0);
    let watch_engine = on(move |_| {
        let life = calls.fetch_add(1, Ordering::SeqCst) as u64 + 1;
        let status = WatchEngineResponse { header: header(life, 0), ..Default::default() };
        async move { Ok(answers(vec![status], None)) }
    });
    let handshakes = Handshakes { watch_engine, ..Default::default() };
    Server { handshakes, ..Default::default() }.start().await
}

async fn life(watch: &mut EngineWatch) -> u64 {
    match soon(watch.next()).await.expect("no end") {
        EngineEvent::Status(status) => status.header.expect("a header").incarnation,
        EngineEvent::Unreachable(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn a_watch_of_an_engine_connects_again_when_its_connection_is_cut() {
    let server = living().await;
    let proxy = Proxy::to(server.address).await;
    let mut watch = client(proxy.address).watch_engine(None);
    assert_eq!(life(&mut watch).await, 1);
    proxy.cut();
    assert_eq!(life(&mut watch).await, 2);
}

#[tokio::test]
async fn a_watch_of_an_engine_tells_once_that_it_is_unreachable_and_then_how_it_is() {
    let server = living().await;
    let proxy = Proxy::to(server.address).await;
    let mut watch = client(proxy.address).watch_engine(None);
    assert_eq!(life(&mut watch).await, 1);
    proxy.refuse(true);
    proxy.cut();
    let EngineEvent::Unreachable(error) = soon(watch.next()).await.unwrap() else { panic!("it was cut off") };
    assert_eq!(error.code(), Code::Unavailable);
    proxy.refuse(false);
    assert_eq!(life(&mut watch).await, 2);
}

#[tokio::test]
async fn a_watch_of_an_engine_ends_with_a_refusal_that_no_repetition_changes() {
    for code in [Code::PermissionDenied, Code::Unauthenticated, Code::Unimplemented, Code::InvalidArgument] {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let watch_engine = on(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move { Err(Status::new(code, "no")) }
        });
        let handshakes = Handshakes { watch_engine, ..Default::default() };
        let server = Server { handshakes, ..Default::default() }.start().await;
        let mut watch = client(server.address).watch_engine(None);
        let EngineEvent::Unreachable(error) = soon(watch.next()).await.unwrap() else { panic!("it was refused") };
        assert_eq!(error.code(), code);
        assert!(soon(watch.next()).await.is_none());
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn a_watch_of_an_engine_asks_for_the_interval_of_its_caller() {
    let (sender, mut asked) = mpsc::unbounded_channel();
    let watch_engine = on(move |request: Request<WatchEngineRequest>| {
        sender.send(request.into_inner().min_interval.map(std_duration)).expect("the test reads");
        async { Ok(answers(vec![], None)) }
    });
    let handshakes = Handshakes { watch_engine, ..Default::default() };
    let server = Server { handshakes, ..Default::default() }.start().await;
    for interval in [None, Some(Duration::from_secs(2))] {
        let _watch = client(server.address).watch_engine(interval);
        assert_eq!(soon(asked.recv()).await, Some(interval));
    }
}

/// Returns a refusal that asks for a long pause.
fn full() -> Status {
    let mut details = ErrorDetails::new();
    details.set_retry_info(Some(Duration::from_secs(3600)));
    Status::with_error_details(Code::ResourceExhausted, "too many streams", details)
}

#[tokio::test]
async fn a_watch_of_an_engine_pauses_for_as_long_as_its_server_asks() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let watch_engine = on(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Err(full()) }
    });
    let handshakes = Handshakes { watch_engine, ..Default::default() };
    let server = Server { handshakes, ..Default::default() }.start().await;
    let mut watch = client(server.address).watch_engine(None);
    let EngineEvent::Unreachable(error) = soon(watch.next()).await.unwrap() else { panic!("it was refused") };
    assert_eq!(error.code(), Code::ResourceExhausted);
    tokio::time::sleep(Duration::from_millis(500)).await; // time for about three retries
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_keeper_pauses_for_as_long_as_its_server_asks_and_its_leases_expire_in_time() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let keep_alive = on(move |request: Request<Streaming<KeepAliveRequest>>| {
        let first = counted.fetch_add(1, Ordering::SeqCst) == 0;
        let mut requests = request.into_inner();
        async move {
            if !first {
                return Err(full());
            }
            requests.message().await?;
            let leases = vec![live(Duration::from_millis(900))];
            Ok(answers(vec![KeepAliveResponse { leases, ..Default::default() }], Some(Status::unavailable("over"))))
        }
    });
    let leases = Leases { keep_alive, ..Default::default() };
    let server = Server { leases, ..Default::default() }.start().await;
    let keeper = client(server.address).keep_alive([by_id("a")], None);
    let over = soon(keeper.over(0)).await;
    assert_eq!(over.state, LeaseState::Expired);
    assert!(calls.load(Ordering::SeqCst) <= 3, "{} streams", calls.load(Ordering::SeqCst));
}

fn by_id(id: &str) -> LeaseRef {
    LeaseRef { by: Some(By::LeaseId(id.into())) }
}

fn row(left: Duration, reason: FailureReason, state: LeaseState) -> RenewedLease {
    RenewedLease { remaining: Some(proto_duration(left)), reason: reason.into(), state: state.into() }
}

fn live(left: Duration) -> RenewedLease {
    row(left, FailureReason::Unspecified, LeaseState::Live)
}

/// The ids of one renewal, and the stream and TTL that it came with.
type Renewal = (usize, Vec<String>, Option<Duration>);

/// Starts a server that answers each lease of a renewal by `answer(id)`. `breaks` ends every stream after so many
/// renewals.
async fn keeping(
    breaks: usize,
    answer: impl Fn(&str) -> RenewedLease + Send + Sync + 'static,
) -> (Running, mpsc::UnboundedReceiver<Renewal>) {
    let (sender, renewals) = mpsc::unbounded_channel();
    let (streams, answer) = (AtomicUsize::new(0), Arc::new(answer));
    let keep_alive = on(move |request: Request<Streaming<KeepAliveRequest>>| {
        let number = streams.fetch_add(1, Ordering::SeqCst);
        let (answer, sender, mut requests) = (Arc::clone(&answer), sender.clone(), request.into_inner());
        let (outgoing, incoming) = mpsc::channel(1);
        tokio::spawn(async move {
            for _ in 0..breaks {
                let Ok(Some(request)) = requests.message().await else { return };
                let ids: Vec<_> = request.leases.iter().map(id_of).collect();
                let leases = ids.iter().map(|id| answer(id)).collect();
                let _ = sender.send((number, ids, request.ttl.map(std_duration)));
                let _ =
                    outgoing.send(Ok(KeepAliveResponse { header: header(1, 0), leases, ..Default::default() })).await;
            }
        });
        let stream: Answers<KeepAliveResponse> = ReceiverStream::new(incoming);
        async move { Ok(stream) }
    });
    let leases = Leases { keep_alive, ..Default::default() };
    (Server { leases, ..Default::default() }.start().await, renewals)
}

fn id_of(lease: &LeaseRef) -> String {
    let Some(By::LeaseId(id)) = &lease.by else { panic!("not by id") };
    id.clone()
}

#[tokio::test]
async fn all_leases_are_renewed_over_one_stream_every_third_of_what_was_granted() {
    let (server, mut renewals) = keeping(usize::MAX, |_| live(Duration::from_millis(900))).await;
    let started = tokio::time::Instant::now();
    let ttl = Duration::from_secs(2);
    let keeper = client(server.address).keep_alive([by_id("a"), by_id("b")], Some(ttl));
    for _ in 0..3 {
        assert_eq!(soon(renewals.recv()).await.unwrap(), (0, vec!["a".into(), "b".into()], Some(ttl)));
    }
    assert!(started.elapsed() >= Duration::from_millis(600));
    let kept = keeper.kept(0).unwrap();
    assert_eq!((kept.state, kept.over), (LeaseState::Live, false));
    assert!(keeper.kept(2).is_none());
}

#[tokio::test]
async fn a_lease_that_is_over_is_told_with_state_and_reason_and_renewed_no_more() {
    let done = row(Duration::ZERO, FailureReason::LeaseReleased, LeaseState::Done);
    let (server, mut renewals) =
        keeping(usize::MAX, move |id| if id == "a" { done } else { live(Duration::from_millis(300)) }).await;
    let mut keeper = client(server.address).keep_alive([by_id("a"), by_id("b")], None);
    let over = soon(keeper.over(0)).await;
    assert_eq!((over.state, over.reason), (LeaseState::Done, FailureReason::LeaseReleased));
    assert_eq!(soon(keeper.next_over()).await.unwrap().0, 0);
    assert_eq!(soon(renewals.recv()).await.unwrap().1, ["a", "b"]);
    for _ in 0..2 {
        assert_eq!(soon(renewals.recv()).await.unwrap().1, ["b"]);
    }
}

#[tokio::test]
async fn a_stream_that_breaks_is_opened_again_and_nothing_else_is_called() {
    let (server, mut renewals) = keeping(1, |_| live(Duration::from_millis(900))).await;
    let keeper = client(server.address).keep_alive([by_id("a")], None);
    for stream in 0..3 {
        assert_eq!(soon(renewals.recv()).await.unwrap().0, stream);
    }
    assert!(!keeper.kept(0).unwrap().over);
}

#[tokio::test]
async fn a_lease_that_cannot_be_renewed_in_time_is_over_for_its_holder() {
    let (server, _renewals) = keeping(usize::MAX, |_| live(Duration::from_millis(400))).await;
    let proxy = Proxy::to(server.address).await;
    let keeper = client(proxy.address).keep_alive([by_id("a")], None);
    soon(async {
        while keeper.kept(0).is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    proxy.refuse(true);
    proxy.cut();
    let over = soon(keeper.over(0)).await;
    assert_eq!((over.state, over.reason), (LeaseState::Expired, FailureReason::LeaseExpired));
}

#[tokio::test]
async fn a_lease_that_is_added_is_renewed_at_once() {
    let (server, mut renewals) = keeping(usize::MAX, |_| live(Duration::from_secs(60))).await;
    let mut keeper = client(server.address).keep_alive([], None);
    assert_eq!(keeper.add(by_id("a")), 0);
    assert_eq!(soon(renewals.recv()).await.unwrap().1, ["a"]);
    assert_eq!(keeper.add(by_id("b")), 1);
    assert_eq!(soon(renewals.recv()).await.unwrap().1, ["b"]);
}

#[tokio::test]
async fn what_is_wrong_with_every_renewal_ends_all_leases_with_its_error() {
    let keep_alive = on(|_| async { Err(Status::invalid_argument("a TTL of zero")) });
    let leases = Leases { keep_alive, ..Default::default() };
    let server = Server { leases, ..Default::default() }.start().await;
    let mut keeper = client(server.address).keep_alive([by_id("a")], Some(Duration::ZERO));
    let (index, over) = soon(keeper.next_over()).await.unwrap();
    assert_eq!((index, over.error.unwrap().code()), (0, Code::InvalidArgument));
    assert!(soon(keeper.next_over()).await.is_none());
}

#[tokio::test]
async fn who_waits_for_the_end_of_a_lease_hears_when_it_is_not_kept_any_more() {
    let (server, mut renewals) = keeping(usize::MAX, |_| live(Duration::from_secs(60))).await;
    let keeper = client(server.address).keep_alive([by_id("a")], None);
    soon(renewals.recv()).await.unwrap();
    soon(async {
        while keeper.kept(0).is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let waiting = tokio::spawn(keeper.over(0));
    let before = keeper.over(0);
    drop(keeper);
    for last in [soon(waiting).await.unwrap(), soon(before).await] {
        assert_eq!((last.lease, last.state, last.over), (by_id("a"), LeaseState::Live, false));
    }
}

#[tokio::test]
async fn a_lease_that_was_never_renewed_is_not_waited_for_either_when_its_keeper_is_gone() {
    let (server, _renewals) = keeping(0, |_| live(Duration::from_secs(60))).await;
    let keeper = client(server.address).keep_alive([by_id("a")], None);
    let (known, unknown) = (keeper.over(0), keeper.over(1));
    drop(keeper);
    let last = soon(known).await;
    assert_eq!((last.lease, last.state, last.over), (by_id("a"), LeaseState::Unspecified, false));
    assert!(tokio::time::timeout(Duration::from_millis(50), unknown).await.is_err());
}
