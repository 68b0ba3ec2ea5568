//! Plays the server: one fake for each service, made of the generated service stubs. A method that a test does not set
//! answers UNIMPLEMENTED.
#![allow(dead_code, missing_docs)]

pub mod proxy;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use kvgrpc::v1::handoff_service_server::HandoffServiceServer;
use kvgrpc::v1::handshake_service_server::HandshakeServiceServer;
use kvgrpc::v1::lease_service_server::LeaseServiceServer;
use kvgrpc::v1::pool_service_server::PoolServiceServer;
use kvgrpc::v1::scheduler_service_server::SchedulerServiceServer;
use kvgrpc::v1::transfer_service_server::TransferServiceServer;
use kvgrpc::v1::{self, ResponseHeader};
use kvgrpc::{Client, Options};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// Time limit of a test's wait. A test that waits longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub type Answers<A> = ReceiverStream<Result<A, Status>>;
type Handler<Q, A> = Box<dyn Fn(Request<Q>) -> Pin<Box<dyn Future<Output = Result<A, Status>> + Send>> + Send + Sync>;

/// Makes the handler of a fake for one method.
pub fn on<Q, A, F, Answering>(handle: F) -> Option<Handler<Q, A>>
where
    F: Fn(Request<Q>) -> Answering + Send + Sync + 'static,
    Answering: Future<Output = Result<A, Status>> + Send + 'static,
{
    Some(Box::new(move |request| Box::pin(handle(request))))
}

/// Returns a stream of these messages. It then ends with the status, or stays open.
pub fn answers<A: Send + 'static>(messages: Vec<A>, end: Option<Status>) -> Answers<A> {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        for message in messages {
            let _ = sender.send(Ok(message)).await;
        }
        match end {
            Some(status) => drop(sender.send(Err(status)).await),
            None => sender.closed().await,
        }
    });
    ReceiverStream::new(receiver)
}

macro_rules! fake_service {
    ($fake:ident, $module:ident::$service:ident;
     $(unary $unary:ident($unary_request:ident) -> $unary_answer:ident;)*
     $(watch $watch:ident($watch_request:ident) -> $watch_answer:ident, $watch_stream:ident;)*
     $(bidi $bidi:ident($bidi_request:ident) -> $bidi_answer:ident, $bidi_stream:ident;)*) => {
        #[derive(Default)]
        pub struct $fake {
            $(pub $unary: Option<Handler<v1::$unary_request, v1::$unary_answer>>,)*
            $(pub $watch: Option<Handler<v1::$watch_request, Answers<v1::$watch_answer>>>,)*
            $(pub $bidi: Option<Handler<Streaming<v1::$bidi_request>, Answers<v1::$bidi_answer>>>,)*
        }

        #[tonic::async_trait]
        impl v1::$module::$service for $fake {
            $(async fn $unary(
                &self, request: Request<v1::$unary_request>,
            ) -> Result<Response<v1::$unary_answer>, Status> {
                play(&self.$unary, request).await
            })*
            $(type $watch_stream = Answers<v1::$watch_answer>;
            async fn $watch(
                &self, request: Request<v1::$watch_request>,
            ) -> Result<Response<Answers<v1::$watch_answer>>, Status> {
                play(&self.$watch, request).await
            })*
            $(type $bidi_stream = Answers<v1::$bidi_answer>;
            async fn $bidi(
                &self, request: Request<Streaming<v1::$bidi_request>>,
            ) -> Result<Response<Answers<v1::$bidi_answer>>, Status> {
                play(&self.$bidi, request).await
            })*
        }
    };
}

async fn play<Q, A>(handler: &Option<Handler<Q, A>>, request: Request<Q>) -> Result<Response<A>, Status> {
    match handler {
        Some(handle) => handle(request).await.map(Response::new),
        None => Err(Status::unimplemented("the test does not set it")),
    }
}

fake_service! {
    Handshakes, handshake_service_server::HandshakeService;
    unary get_capabilities(GetCapabilitiesRequest) -> GetCapabilitiesResponse;
    unary get_engine(GetEngineRequest) -> GetEngineResponse;
    unary handshake(HandshakeRequest) -> HandshakeResponse;
    unary check_compatibility(CheckCompatibilityRequest) -> CheckCompatibilityResponse;
    unary connect_peer(ConnectPeerRequest) -> ConnectPeerResponse;
    watch watch_engine(WatchEngineRequest) -> WatchEngineResponse, WatchEngineStream;
}

fake_service! {
    Handoffs, handoff_service_server::HandoffService;
    unary finished_blocks(FinishedBlocksRequest) -> FinishedBlocksResponse;
    unary pull_blocks(PullBlocksRequest) -> PullBlocksResponse;
    unary reserve_blocks(ReserveBlocksRequest) -> ReserveBlocksResponse;
    unary register_push(RegisterPushRequest) -> RegisterPushResponse;
}

fake_service! {
    Transfers, transfer_service_server::TransferService;
    unary get_transfer(GetTransferRequest) -> GetTransferResponse;
    unary wait_transfer(WaitTransferRequest) -> WaitTransferResponse;
    unary wait_transfers(WaitTransfersRequest) -> WaitTransfersResponse;
    unary list_transfers(ListTransfersRequest) -> ListTransfersResponse;
    unary acknowledge_transfers(AcknowledgeTransfersRequest) -> AcknowledgeTransfersResponse;
    unary cancel_transfer(CancelTransferRequest) -> CancelTransferResponse;
    watch watch_transfers(WatchTransfersRequest) -> WatchTransfersResponse, WatchTransfersStream;
}

fake_service! {
    Leases, lease_service_server::LeaseService;
    unary grant_lease(GrantLeaseRequest) -> GrantLeaseResponse;
    unary renew_leases(RenewLeasesRequest) -> RenewLeasesResponse;
    unary release_lease(ReleaseLeaseRequest) -> ReleaseLeaseResponse;
    unary get_lease(GetLeaseRequest) -> GetLeaseResponse;
    unary list_leases(ListLeasesRequest) -> ListLeasesResponse;
    unary find_offers(FindOffersRequest) -> FindOffersResponse;
    watch watch_offers(WatchOffersRequest) -> WatchOffersResponse, WatchOffersStream;
    bidi keep_alive(KeepAliveRequest) -> KeepAliveResponse, KeepAliveStream;
}

fake_service! {
    Pool, pool_service_server::PoolService;
    unary describe_pools(DescribePoolsRequest) -> DescribePoolsResponse;
    unary allocate_blocks(AllocateBlocksRequest) -> AllocateBlocksResponse;
    unary free_blocks(FreeBlocksRequest) -> FreeBlocksResponse;
    unary get_pool_status(GetPoolStatusRequest) -> GetPoolStatusResponse;
    unary read_blocks(ReadBlocksRequest) -> ReadBlocksResponse;
    unary list_allocations(ListAllocationsRequest) -> ListAllocationsResponse;
    unary reclaim_blocks(ReclaimBlocksRequest) -> ReclaimBlocksResponse;
}

fake_service! {
    Scheduling, scheduler_service_server::SchedulerService;
    unary request_arrived(RequestArrivedRequest) -> RequestArrivedResponse;
    unary match_tokens(MatchTokensRequest) -> MatchTokensResponse;
    unary blocks_allocated(BlocksAllocatedRequest) -> BlocksAllocatedResponse;
    unary tokens_computed(TokensComputedRequest) -> TokensComputedResponse;
    unary blocks_loaded(BlocksLoadedRequest) -> BlocksLoadedResponse;
    unary request_preempted(RequestPreemptedRequest) -> RequestPreemptedResponse;
    unary request_finished(RequestFinishedRequest) -> RequestFinishedResponse;
    unary abort_request(AbortRequestRequest) -> AbortRequestResponse;
    unary blocks_needed(BlocksNeededRequest) -> BlocksNeededResponse;
    unary poll_scheduler_news(PollSchedulerNewsRequest) -> PollSchedulerNewsResponse;
    bidi schedule(ScheduleRequest) -> ScheduleResponse, ScheduleStream;
}

/// The handlers of one server.
#[derive(Default)]
pub struct Server {
    pub handshakes: Handshakes,
    pub handoffs: Handoffs,
    pub transfers: Transfers,
    pub leases: Leases,
    pub pool: Pool,
    pub scheduling: Scheduling,
}

/// A running server. Dropping it ends it and its connections.
pub struct Running {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub async fn start(self) -> Running {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let serving = tonic::transport::Server::builder()
            .add_service(HandshakeServiceServer::new(self.handshakes))
            .add_service(HandoffServiceServer::new(self.handoffs))
            .add_service(TransferServiceServer::new(self.transfers))
            .add_service(LeaseServiceServer::new(self.leases))
            .add_service(PoolServiceServer::new(self.pool))
            .add_service(SchedulerServiceServer::new(self.scheduling))
            .serve_with_incoming(TcpListenerStream::new(listener));
        Running { address, task: tokio::spawn(async move { serving.await.expect("the server serves") }) }
    }
}

pub fn client(address: SocketAddr) -> Client {
    kvgrpc::connect(&address.to_string(), Options::default()).expect("an address")
}

pub fn header(incarnation: u64, event_seq: u64) -> Option<ResponseHeader> {
    Some(ResponseHeader { engine_id: "P".into(), incarnation, event_seq })
}

/// Fails the test where it would hang.
pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("in time")
}
