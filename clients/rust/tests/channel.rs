//! Tests what the channel adds to every call.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::proxy::Proxy;
use common::{Handshakes, Pool, Scheduling, Server, Transfers, client, on, soon};
use kvgrpc::v1::{
    AllocateBlocksRequest, AllocateBlocksResponse, ConnectPeerRequest, GetTransferRequest, GetTransferResponse,
    PollSchedulerNewsRequest, WaitTransferRequest,
};
use kvgrpc::{Error, Options, proto_duration};
use tokio::sync::mpsc;
use tonic::{Code, Request, Status};

/// Starts a server whose AllocateBlocks fails so many times and then answers. Returns the keys that it got.
async fn failing(times: usize, code: Code) -> (common::Running, mpsc::UnboundedReceiver<String>) {
    let (sender, keys) = mpsc::unbounded_channel();
    let calls = AtomicUsize::new(0);
    let allocate_blocks = on(move |request: Request<AllocateBlocksRequest>| {
        sender.send(request.into_inner().idempotency_key).expect("the test reads");
        let fails = calls.fetch_add(1, Ordering::SeqCst) < times;
        async move { if fails { Err(Status::new(code, "not now")) } else { Ok(AllocateBlocksResponse::default()) } }
    });
    let pool = Pool { allocate_blocks, ..Default::default() };
    (Server { pool, ..Default::default() }.start().await, keys)
}

fn all(mut keys: mpsc::UnboundedReceiver<String>) -> Vec<String> {
    std::iter::from_fn(|| keys.try_recv().ok()).collect()
}

#[tokio::test]
async fn unavailable_is_repeated_with_the_same_idempotency_key() {
    let (server, keys) = failing(3, Code::Unavailable).await;
    soon(client(server.address).pool().allocate_blocks(AllocateBlocksRequest::default())).await.unwrap();
    let keys = all(keys);
    assert_eq!(keys.len(), 4);
    assert_eq!(keys[0].len(), 32);
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
}

#[tokio::test]
async fn a_call_is_repeated_three_times_and_no_more() {
    let (server, keys) = failing(9, Code::Unavailable).await;
    let refused = soon(client(server.address).pool().allocate_blocks(AllocateBlocksRequest::default())).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    assert_eq!(all(keys).len(), 4);
}

#[tokio::test]
async fn no_other_code_is_repeated() {
    for code in [Code::ResourceExhausted, Code::Aborted, Code::Internal, Code::DeadlineExceeded, Code::Unknown] {
        let (server, keys) = failing(1, code).await;
        let refused = soon(client(server.address).pool().allocate_blocks(AllocateBlocksRequest::default())).await;
        assert_eq!(refused.unwrap_err().code(), code);
        assert_eq!(all(keys).len(), 1);
    }
}

#[tokio::test]
async fn every_call_has_a_key_of_its_own_unless_the_caller_states_one() {
    let (server, keys) = failing(0, Code::Unavailable).await;
    let mut pool = client(server.address).pool();
    for key in ["", "", "mine"] {
        let request = AllocateBlocksRequest { idempotency_key: key.into(), ..Default::default() };
        soon(pool.allocate_blocks(request)).await.unwrap();
    }
    let keys = all(keys);
    assert_ne!(keys[0], keys[1]);
    assert_eq!(keys[2], "mine");
}

#[tokio::test]
async fn connect_peer_is_not_repeated() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let connect_peer = on(move |_| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Err(Status::unavailable("the other server is away")) }
    });
    let handshakes = Handshakes { connect_peer, ..Default::default() };
    let server = Server { handshakes, ..Default::default() }.start().await;
    let refused = soon(client(server.address).handshake().connect_peer(ConnectPeerRequest::default())).await;
    assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

/// Returns the deadline that the server was told, in seconds, as the text of an error.
fn told<Q, A>(request: Request<Q>) -> std::future::Ready<Result<A, Status>> {
    let header = request.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let millis: f64 = header.trim_end_matches('m').parse().unwrap_or_default();
    std::future::ready(Err(Status::failed_precondition((millis / 1000.0).round().to_string())))
}

#[tokio::test]
async fn every_unary_call_has_a_deadline_and_waits_get_their_time_on_top() {
    let server = Server {
        transfers: Transfers { get_transfer: on(told), wait_transfer: on(told), ..Default::default() },
        handshakes: Handshakes { connect_peer: on(told), ..Default::default() },
        scheduling: Scheduling { poll_scheduler_news: on(told), ..Default::default() },
        ..Default::default()
    };
    let server = server.start().await;
    let client = client(server.address);
    let seconds = |seconds| Some(proto_duration(Duration::from_secs(seconds)));

    let told = soon(client.transfers().get_transfer(GetTransferRequest::default())).await.unwrap_err();
    assert_eq!(told.message(), "10");
    let wait = WaitTransferRequest { timeout: seconds(20), ..Default::default() };
    assert_eq!(soon(client.transfers().wait_transfer(wait)).await.unwrap_err().message(), "30");
    let endless = WaitTransferRequest::default();
    assert_eq!(soon(client.transfers().wait_transfer(endless)).await.unwrap_err().message(), "70");
    let poll = PollSchedulerNewsRequest { wait: seconds(5), ..Default::default() };
    assert_eq!(soon(client.scheduler_service().poll_scheduler_news(poll)).await.unwrap_err().message(), "15");
    let peer = ConnectPeerRequest::default();
    assert_eq!(soon(client.handshake().connect_peer(peer)).await.unwrap_err().message(), "60");
    let mut own = Request::new(GetTransferRequest::default());
    own.set_timeout(Duration::from_secs(3));
    assert_eq!(soon(client.transfers().get_transfer(own)).await.unwrap_err().message(), "3");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_deadline_exceeded() {
    let get_transfer = on(|_| std::future::pending::<Result<GetTransferResponse, Status>>());
    let transfers = Transfers { get_transfer, ..Default::default() };
    let server = Server { transfers, ..Default::default() }.start().await;
    let options = Options { deadline: Duration::from_millis(200), ..Default::default() };
    let client = kvgrpc::connect(&server.address.to_string(), options).unwrap();
    let asked = Instant::now();
    let late: Error = soon(client.transfers().get_transfer(GetTransferRequest::default())).await.unwrap_err().into();
    assert_eq!((late.code(), late.code_name()), (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"));
    assert!(asked.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn a_call_whose_connection_is_cut_is_repeated() {
    let (arrived, mut arrivals) = mpsc::unbounded_channel();
    let calls = AtomicUsize::new(0);
    let get_transfer = on(move |_| {
        arrived.send(()).expect("the test reads");
        let first = calls.fetch_add(1, Ordering::SeqCst) == 0;
        async move { if first { std::future::pending().await } else { Ok(GetTransferResponse::default()) } }
    });
    let transfers = Transfers { get_transfer, ..Default::default() };
    let server = Server { transfers, ..Default::default() }.start().await;
    let proxy = Proxy::to(server.address).await;
    let mut service = client(proxy.address).transfers();
    let call = tokio::spawn(async move { service.get_transfer(GetTransferRequest::default()).await });
    soon(arrivals.recv()).await.unwrap();
    proxy.cut();
    soon(call).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_server_that_is_away_is_unavailable() {
    let server = Server::default().start().await;
    let proxy = Proxy::to(server.address).await;
    proxy.refuse(true);
    let away = soon(client(proxy.address).transfers().get_transfer(GetTransferRequest::default())).await.unwrap_err();
    assert_eq!(away.code(), Code::Unavailable);
}

#[tokio::test]
async fn metadata_and_trace_context_go_with_every_call_and_those_of_a_call_come_first() {
    let get_transfer = on(|request: Request<GetTransferRequest>| {
        let of = |key: &str| request.metadata().get(key).map_or("-", |value| value.to_str().unwrap()).to_owned();
        let both = format!("{} {}", of("traceparent"), of("authorization"));
        async move { Err(Status::failed_precondition(both)) }
    });
    let transfers = Transfers { get_transfer, ..Default::default() };
    let server = Server { transfers, ..Default::default() }.start().await;
    let options = Options { metadata: vec![("Authorization".into(), "Bearer t".into())], ..Default::default() };
    let client = kvgrpc::connect(&server.address.to_string(), options).unwrap();
    let said = |status: Result<_, Status>| status.unwrap_err().message().to_owned();

    let request = GetTransferRequest::default();
    assert_eq!(said(soon(client.transfers().get_transfer(request.clone())).await), "- Bearer t");
    let traced = client.with_traceparent("00-aa-bb-01").unwrap();
    assert_eq!(said(soon(traced.transfers().get_transfer(request.clone())).await), "00-aa-bb-01 Bearer t");
    let mut own = Request::new(request);
    own.metadata_mut().insert("traceparent", "00-cc-dd-01".parse().unwrap());
    assert_eq!(said(soon(traced.transfers().get_transfer(own)).await), "00-cc-dd-01 Bearer t");
}

#[tokio::test]
async fn what_cannot_be_an_address_or_a_header_is_refused_at_once() {
    assert_eq!(kvgrpc::connect("not an address", Options::default()).unwrap_err().code(), Code::InvalidArgument);
    let options = Options { metadata: vec![("a b".into(), "c".into())], ..Default::default() };
    assert_eq!(kvgrpc::connect("127.0.0.1:1", options).unwrap_err().code(), Code::InvalidArgument);
    let client = kvgrpc::connect("127.0.0.1:1", Options::default()).unwrap();
    assert_eq!(client.with_traceparent("a\nb").unwrap_err().code(), Code::InvalidArgument);
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn a_client_with_settings_of_tls_never_calls_in_plain_text() {
    let (server, keys) = failing(0, Code::Unavailable).await;
    let tls = Some(tonic::transport::ClientTlsConfig::new());
    let options = Options { tls, deadline: Duration::from_millis(300), ..Options::default() };
    let secured = kvgrpc::connect(&server.address.to_string(), options.clone()).unwrap();
    soon(secured.pool().allocate_blocks(AllocateBlocksRequest::default())).await.unwrap_err();
    assert!(all(keys).is_empty());
    let refused = kvgrpc::connect(&format!("http://{}", server.address), options);
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
}
