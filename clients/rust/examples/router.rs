//! A router and scheduler in one: it drives one pull between two servers that manage their blocks.
//!
//!     kvgrpc serve --port 50051 &
//!     kvgrpc serve --port 50052 &
//!     cargo run --example router -- --prefill 127.0.0.1:50051 --decode 127.0.0.1:50052

use std::collections::HashMap;
use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use kvgrpc::v1::cancel_transfer_request::Target;
use kvgrpc::v1::content::Form;
use kvgrpc::v1::finished_blocks_request::Job;
use kvgrpc::v1::free_blocks_request::Freed;
use kvgrpc::v1::pull_blocks_request::Pull;
use kvgrpc::v1::{
    AllocateBlocksRequest, Blocks, CheckCompatibilityRequest, ConnectPeerRequest, Content, FinishedBlocksRequest,
    FreeBlocksRequest, GetCapabilitiesRequest, GetTransferRequest, GroupBlockCount, HandOver, PeerAddress,
    PullBlocksRequest, PullDestination, Transfer, TransferFilter, WaitCondition,
};
use kvgrpc::{Client, Options, Position, Side, clean_up, connect, random_key, std_duration};
use tonic::Status;

type Failed = Box<dyn Error>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match route().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("router: {}", said(&error));
            ExitCode::FAILURE
        }
    }
}

/// Returns the text of an error, with the reason of a call that failed.
fn said(error: &Failed) -> String {
    match error.downcast_ref::<Status>() {
        Some(status) => kvgrpc::Error::from(status.clone()).to_string(),
        None => error.to_string(),
    }
}

async fn route() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let pairs = arguments.chunks_exact(2).map(|pair| (pair[0].trim_start_matches('-'), pair[1].as_str()));
    let given: HashMap<&str, &str> = pairs.collect();
    let of = |name, default| given.get(name).copied().unwrap_or(default);
    let trace = format!("00-{}-{}-01", hex(&random_key()), hex(&random_key()[..8]));
    let traceparent = of("traceparent", &trace);
    println!("trace     {traceparent}");

    // Every call carries the trace context, so that the spans of both servers join the request's trace.
    let p = connect(of("prefill", "127.0.0.1:50051"), Options::default())?.with_traceparent(traceparent)?;
    let d = connect(of("decode", "127.0.0.1:50052"), Options::default())?.with_traceparent(traceparent)?;
    let limit = Duration::from_secs(of("timeout", "120").parse()?);
    tokio::time::timeout(limit, run(&p, &d, of("blocks", "32").parse()?)).await?
}

/// Runs one request as its router sees it.
pub async fn run(p: &Client, d: &Client, block_count: u32) -> Result<(), Failed> {
    let block_tokens = pair(p, d).await?;
    let source = allocate(p, block_count).await?;
    let target = match allocate(d, block_count).await {
        Ok(target) => target,
        Err(error) => {
            free(p, &source).await?;
            return Err(error.into());
        }
    };
    let transfer_key = random_key().to_vec();
    let moved = pull(p, d, &transfer_key, &source, &target, block_count * block_tokens).await;
    if let Err(error) = moved {
        // Each side gets one call: it ends transfers, unpins blocks when that is safe, and frees allocations.
        let side = |client: &Client, blocks: &Blocks| Side {
            client: client.clone(),
            target: Target::TransferKey(transfer_key.clone()),
            free_allocation_ids: vec![blocks.allocation_id.clone()],
        };
        for answer in clean_up(vec![side(p, &source), side(d, &target)], &said(&error)).await {
            match answer {
                Ok(answer) => println!("cleaned   {:?}", answer.outcome()),
                Err(error) => println!("cleaned   not: {error}"),
            }
        }
        return Err(error);
    }
    free(p, &source).await?;
    free(d, &target).await?;
    Ok(())
}

/// Checks that the two can exchange blocks and lets them connect, so that the first transfer need not wait for that.
/// Returns the number of tokens in a block.
async fn pair(p: &Client, d: &Client) -> Result<u32, Failed> {
    let source = p.handshake().get_capabilities(GetCapabilitiesRequest {}).await?.into_inner().engine;
    let destination = d.handshake().get_capabilities(GetCapabilitiesRequest {}).await?.into_inner().engine;
    let request = CheckCompatibilityRequest { engine: destination };
    let verdict = p.handshake().check_compatibility(request).await?.into_inner();
    if !verdict.compatible {
        return Err(format!("these engines cannot exchange blocks: {:?}", verdict.differences).into());
    }
    let source = source.ok_or("no engine")?;
    let peer = PeerAddress { address: source.address, engine_id: source.engine_id };
    let request = ConnectPeerRequest { peer: Some(peer), ..Default::default() };
    let connected = d.handshake().connect_peer(request).await?.into_inner();
    for path in connected.peer.unwrap_or_default().paths {
        let by = path.data_path();
        println!("paired    rank {} reads rank {} by {by:?}: {}", path.rank, path.peer_rank, path.why);
    }
    let pool = source.pool.ok_or("no pool")?;
    Ok(pool.groups.first().ok_or("no group")?.block_tokens)
}

async fn allocate(engine: &Client, block_count: u32) -> Result<Blocks, kvgrpc::Error> {
    let group_block_counts = vec![GroupBlockCount { group: 0, block_count }];
    let request = AllocateBlocksRequest { group_block_counts, ..Default::default() };
    Ok(engine.pool().allocate_blocks(request).await?.into_inner().blocks.unwrap_or_default())
}

/// Frees blocks. Pinned blocks become free at their last unpin.
async fn free(engine: &Client, blocks: &Blocks) -> Result<(), kvgrpc::Error> {
    let freed = Some(Freed::AllocationId(blocks.allocation_id.clone()));
    let reply = engine.pool().free_blocks(FreeBlocksRequest { freed, ..Default::default() }).await?.into_inner();
    println!("freed     {} blocks", reply.freed_blocks.unwrap_or_default().block_count());
    Ok(())
}

/// P has computed a prompt and hands it over; D pulls it.
async fn pull(
    p: &Client,
    d: &Client,
    transfer_key: &[u8],
    source: &Blocks,
    target: &Blocks,
    token_count: u32,
) -> Result<(), Failed> {
    let token_ids = (0..token_count).map(|token| token % 32_000).collect();
    let tokens = Form::Tokens(kvgrpc::v1::TokenContent { token_ids, ..Default::default() });
    let content = Content { form: Some(tokens), ..Default::default() };
    let hand_over = HandOver { blocks: Some(source.clone()), content: Some(content.clone()), ..Default::default() };
    let request = FinishedBlocksRequest {
        transfer_key: transfer_key.to_vec(),
        request_id: "demo".into(),
        job: Some(Job::ForReaders(hand_over)),
        ..Default::default()
    };
    let handed_over = p.handoff().finished_blocks(request).await?.into_inner();
    let grant = handed_over.grant.ok_or("no grant")?;
    println!("finished  {}, a grant of {} bytes", grant.lease_id, grant.token.len());

    // The router relays the grant unread. D pulls with it and states the tokens.
    let destination = PullDestination { blocks: Some(target.clone()), have_tokens: 0 };
    let request = PullBlocksRequest {
        request_id: "demo".into(),
        pull: Some(Pull::Grant(grant)),
        content: Some(content),
        destination: Some(destination),
        transfer_key: transfer_key.to_vec(),
        ..Default::default()
    };
    let pulled = d.handoff().pull_blocks(request).await?.into_inner();
    let header = pulled.header.ok_or("no header")?;
    let received = follow(d, pulled.transfer.ok_or("no transfer")?, Position::from(&header)).await?;
    report(&received);
    if !received.has_succeeded() {
        return Err(format!("the pull ended as {:?}: {:?}", received.state(), received.failure).into());
    }

    // P learns from D that its consumer is done.
    let sent = handed_over.transfer.ok_or("no transfer")?;
    let sent = p.wait(sent.transfer_id, WaitCondition::Returned, Duration::from_secs(10)).await?;
    println!("sent      {:?}, memory {:?}", sent.transfer.state(), sent.transfer.memory());
    Ok(())
}

/// Watches a transfer until it is over and its blocks may be reused.
async fn follow(engine: &Client, mut transfer: Transfer, after: Position) -> Result<Transfer, Failed> {
    let transfer_ids = vec![transfer.transfer_id.clone()];
    let mut watch = engine.watch(TransferFilter { transfer_ids, ..Default::default() }, Some(after));
    while !transfer.may_reuse_memory() {
        let change = watch.next().await.ok_or("the watch ended")??;
        if change.history_lost {
            let request = GetTransferRequest { transfer_id: transfer.transfer_id.clone() };
            transfer = engine.transfers().get_transfer(request).await?.into_inner().transfer.ok_or("no transfer")?;
        } else if let Some(changed) = change.transfer {
            transfer = changed;
            let (state, memory, waiting) = (transfer.state(), transfer.memory(), transfer.waiting_for());
            println!("change    {}: {state:?}, memory {memory:?}, waits for {waiting:?}", transfer.event_seq);
        }
    }
    Ok(transfer)
}

/// Prints what an operator wants to know of a transfer that is over.
fn report(transfer: &Transfer) {
    println!(
        "transfer  {} {:?}: {} blocks, {} bytes, {} tokens",
        transfer.transfer_id,
        transfer.state(),
        transfer.block_count,
        transfer.moved_bytes,
        transfer.use_tokens
    );
    for path in &transfer.paths {
        println!("  path    {:?}, rank {} from rank {}", path.data_path(), path.rank, path.peer_rank);
    }
    for phase in &transfer.phases {
        println!("  phase   {:?} {:?}", phase.phase(), phase.duration.map(std_duration).unwrap_or_default());
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
