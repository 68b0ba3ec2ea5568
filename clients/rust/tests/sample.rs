//! Tests the sample, with fakes for its servers.

mod common;
#[allow(dead_code)]
#[path = "../examples/router.rs"]
mod router;

use common::{Handoffs, Handshakes, Pool, Running, Server, Transfers, answers, client, header, on, soon};
use kvgrpc::v1::cancel_transfer_request::Target;
use kvgrpc::v1::finished_blocks_request::Job;
use kvgrpc::v1::free_blocks_request::Freed;
use kvgrpc::v1::pull_blocks_request::Pull;
use kvgrpc::v1::{
    AllocateBlocksRequest, AllocateBlocksResponse, Blocks, CancelTransferRequest, CancelTransferResponse,
    CheckCompatibilityResponse, ConnectPeerResponse, EngineDescription, FinishedBlocksRequest, FinishedBlocksResponse,
    FreeBlocksRequest, FreeBlocksResponse, GetCapabilitiesResponse, Grant, Group, GroupBlocks, MemoryDisposition,
    PoolDescription, PullBlocksRequest, PullBlocksResponse, Transfer, TransferState, WaitTransferResponse,
    WatchTransfersResponse,
};
use tokio::sync::mpsc;
use tonic::Request;

/// Starts a server that is both source and destination, whose pull ends as `end`. Returns its calls, in order.
async fn both(end: TransferState) -> (Running, mpsc::UnboundedReceiver<String>) {
    let (say, asked) = mpsc::unbounded_channel();
    let tell = move |what: String| say.send(what).expect("the test reads");
    let transfer = |id: &str, state: TransferState| {
        let memory = MemoryDisposition::Returned.into();
        Some(Transfer { transfer_id: id.into(), state: state.into(), memory, ..Default::default() })
    };
    let (allocating, freeing, finishing, pulling) = (tell.clone(), tell.clone(), tell.clone(), tell.clone());
    let handshakes = Handshakes {
        get_capabilities: on(|_| async {
            let groups = vec![Group { block_tokens: 16, ..Default::default() }];
            let pool = Some(PoolDescription { groups, ..Default::default() });
            let engine = Some(EngineDescription { pool, ..Default::default() });
            Ok(GetCapabilitiesResponse { header: header(1, 0), engine, ..Default::default() })
        }),
        check_compatibility: on(|_| async {
            Ok(CheckCompatibilityResponse { header: header(1, 0), compatible: true, differences: vec![] })
        }),
        connect_peer: on(|_| async { Ok(ConnectPeerResponse::default()) }),
        ..Default::default()
    };
    let pool = Pool {
        allocate_blocks: on(move |request: Request<AllocateBlocksRequest>| {
            let count = request.into_inner().group_block_counts[0].block_count;
            allocating(format!("allocate {count}"));
            let groups = vec![GroupBlocks::new(0, 0..count)];
            let blocks = Some(Blocks { incarnation: 1, allocation_id: "a".into(), groups });
            async { Ok(AllocateBlocksResponse { header: header(1, 0), blocks, remaining: None }) }
        }),
        free_blocks: on(move |request: Request<FreeBlocksRequest>| {
            let Some(Freed::AllocationId(id)) = request.into_inner().freed else { panic!("not by its id") };
            freeing(format!("free {id}"));
            async { Ok(FreeBlocksResponse::default()) }
        }),
        ..Default::default()
    };
    let handoffs = Handoffs {
        finished_blocks: on(move |request: Request<FinishedBlocksRequest>| {
            let Some(Job::ForReaders(job)) = request.into_inner().job else { panic!("not for readers") };
            finishing(format!("finished {} blocks", job.blocks.expect("blocks").block_count()));
            let reply = FinishedBlocksResponse {
                header: header(1, 1),
                transfer: transfer("send", TransferState::Pending),
                grant: Some(Grant { token: vec![7], ..Default::default() }),
                lease: None,
            };
            async { Ok(reply) }
        }),
        pull_blocks: on(move |request: Request<PullBlocksRequest>| {
            let Some(Pull::Grant(grant)) = request.into_inner().pull else { panic!("no grant") };
            pulling(format!("pull by {:?}", grant.token));
            let transfer = transfer("receive", TransferState::Pending);
            async { Ok(PullBlocksResponse { header: header(1, 1), transfer, ..Default::default() }) }
        }),
        ..Default::default()
    };
    let transfers = Transfers {
        watch_transfers: on(move |_| async move {
            let change = WatchTransfersResponse {
                header: header(1, 2),
                transfer: transfer("receive", end),
                history_lost: false,
            };
            Ok(answers(vec![change], None))
        }),
        wait_transfer: on(move |_| async move {
            let transfer = transfer("send", TransferState::Succeeded);
            Ok(WaitTransferResponse { header: header(1, 3), transfer, condition_met: true })
        }),
        cancel_transfer: on(move |request: Request<CancelTransferRequest>| {
            let request = request.into_inner();
            let Some(Target::TransferKey(key)) = request.target else { panic!("not by key") };
            tell(format!("cancel {} bytes, free {:?}", key.len(), request.free_allocation_ids));
            async { Ok(CancelTransferResponse::default()) }
        }),
        ..Default::default()
    };
    (Server { handshakes, handoffs, transfers, pool, ..Default::default() }.start().await, asked)
}

async fn routed(end: TransferState) -> (Result<(), String>, Vec<String>) {
    let (server, mut asked) = both(end).await;
    let client = client(server.address);
    let outcome = soon(router::run(&client, &client, 4)).await.map_err(|error| error.to_string());
    (outcome, std::iter::from_fn(|| asked.try_recv().ok()).collect())
}

#[tokio::test]
async fn the_sample_drives_a_pull_to_its_end_and_frees_both_sides() {
    let (outcome, asked) = routed(TransferState::Succeeded).await;
    assert_eq!(outcome, Ok(()));
    assert_eq!(asked, ["allocate 4", "allocate 4", "finished 4 blocks", "pull by [7]", "free a", "free a"]);
}

#[tokio::test]
async fn the_sample_cleans_up_at_both_sides_when_the_pull_fails() {
    let (outcome, asked) = routed(TransferState::Failed).await;
    assert!(outcome.unwrap_err().contains("the pull ended as Failed"));
    assert_eq!(asked[4..], ["cancel 16 bytes, free [\"a\"]", "cancel 16 bytes, free [\"a\"]"]);
}
