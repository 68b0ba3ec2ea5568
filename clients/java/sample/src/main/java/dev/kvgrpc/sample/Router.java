package dev.kvgrpc.sample;

import static dev.kvgrpc.client.KvgrpcClient.call;

import com.google.protobuf.ByteString;
import dev.kvgrpc.client.CleanUp;
import dev.kvgrpc.client.KvgrpcClient;
import dev.kvgrpc.client.KvgrpcException;
import dev.kvgrpc.client.States;
import dev.kvgrpc.client.TransferWatch;
import dev.kvgrpc.client.TransferWatch.After;
import dev.kvgrpc.v1.AllocateBlocksRequest;
import dev.kvgrpc.v1.Blocks;
import dev.kvgrpc.v1.CheckCompatibilityRequest;
import dev.kvgrpc.v1.ConnectPeerRequest;
import dev.kvgrpc.v1.Content;
import dev.kvgrpc.v1.FinishedBlocksRequest;
import dev.kvgrpc.v1.FinishedBlocksResponse;
import dev.kvgrpc.v1.FreeBlocksRequest;
import dev.kvgrpc.v1.GetCapabilitiesRequest;
import dev.kvgrpc.v1.GetTransferRequest;
import dev.kvgrpc.v1.GroupBlockCount;
import dev.kvgrpc.v1.HandOver;
import dev.kvgrpc.v1.PeerAddress;
import dev.kvgrpc.v1.PullBlocksRequest;
import dev.kvgrpc.v1.PullBlocksResponse;
import dev.kvgrpc.v1.PullDestination;
import dev.kvgrpc.v1.TokenContent;
import dev.kvgrpc.v1.Transfer;
import dev.kvgrpc.v1.TransferFilter;
import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WatchTransfersResponse;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.stream.IntStream;

/**
 * A router that drives one pull between two servers: P, which computed a prompt's KV, and D, which wants it. Both
 * servers manage their pools themselves.
 *
 * <p>Arguments: P's address, D's address, how many blocks to move, and the W3C traceparent of the request.
 */
public final class Router {
  private static final Duration PATIENCE = Duration.ofSeconds(90);

  private final KvgrpcClient p;
  private final KvgrpcClient d;
  private final ByteString transferKey = randomBytes(16);

  private Router(KvgrpcClient p, KvgrpcClient d) {
    this.p = p;
    this.d = d;
  }

  /** Runs the pull. It exits with status 1 when the pull fails. */
  public static void main(String[] args) {
    String prefill = args.length > 0 ? args[0] : "127.0.0.1:50051";
    String decode = args.length > 1 ? args[1] : "127.0.0.1:50052";
    int blocks = args.length > 2 ? Integer.parseInt(args[2]) : 32;
    String traceparent = args.length > 3 ? args[3] : "00-" + randomHex(16) + "-" + randomHex(8) + "-01";
    System.out.println("trace     " + traceparent);
    try (KvgrpcClient p = KvgrpcClient.connect(prefill).withTraceparent(traceparent);
        KvgrpcClient d = KvgrpcClient.connect(decode).withTraceparent(traceparent)) {
      new Router(p, d).run(blocks);
    } catch (KvgrpcException | IllegalStateException failed) {
      System.err.println("router: " + failed.getMessage());
      System.exit(1);
    }
  }

  /** Runs one request. */
  private void run(int blockCount) {
    int blockTokens = pair();
    List<CleanUp.Side> sides = new ArrayList<>(List.of(CleanUp.Side.ofKey(p, transferKey)));
    try {
      Blocks source = allocate(p, blockCount);
      sides.set(0, CleanUp.Side.ofKey(p, transferKey, source.getAllocationId()));
      Blocks destination = allocate(d, blockCount);
      sides.add(CleanUp.Side.ofKey(d, transferKey, destination.getAllocationId()));
      move(source, destination, prompt(blockCount * blockTokens));
      free(p, source);
      free(d, destination);
    } catch (RuntimeException failed) {
      // At each side, what a failed request leaves is cancelled and freed, whatever the other side answers.
      for (CleanUp.Outcome outcome : CleanUp.run(sides, "the router gave up")) {
        System.out.println("clean up  " + outcome.reply().map(reply -> reply.getOutcome().name())
            .orElseGet(() -> outcome.error().orElseThrow().getMessage()));
      }
      throw failed;
    }
  }

  /** Checks that the two can exchange blocks, and lets them connect before the first transfer needs it. */
  private int pair() {
    var source = call(p.handshake()::getCapabilities, GetCapabilitiesRequest.getDefaultInstance()).getEngine();
    var destination = call(d.handshake()::getCapabilities, GetCapabilitiesRequest.getDefaultInstance()).getEngine();
    var verdict = call(
        p.handshake()::checkCompatibility, CheckCompatibilityRequest.newBuilder().setEngine(destination).build());
    if (!verdict.getCompatible()) {
      throw new IllegalStateException("these engines cannot exchange blocks: " + verdict.getDifferencesList());
    }
    var address = PeerAddress.newBuilder().setAddress(source.getAddress()).setEngineId(source.getEngineId());
    var peer = call(d.handshake()::connectPeer, ConnectPeerRequest.newBuilder().setPeer(address).build()).getPeer();
    peer.getPathsList().forEach(path -> System.out.printf(
        "paired    rank %d reads rank %d by %s: %s%n",
        path.getRank(), path.getPeerRank(), path.getDataPath(), path.getWhy()));
    return source.getPool().getGroups(0).getBlockTokens();
  }

  private void move(Blocks source, Blocks destination, Content content) {
    // P has computed a prompt and hands its blocks over: they are pinned under a lease, with a grant to read them.
    HandOver handOver = HandOver.newBuilder().setBlocks(source).setContent(content).build();
    FinishedBlocksResponse finished = call(
        p.handoff()::finishedBlocks,
        FinishedBlocksRequest.newBuilder()
            .setTransferKey(transferKey)
            .setRequestId("sample")
            .setForReaders(handOver)
            .build());
    System.out.println("finished  " + finished.getLease().getLeaseId());

    // The router relays the grant unread. D pulls with it and states the tokens.
    PullBlocksResponse pull = call(
        d.handoff()::pullBlocks,
        PullBlocksRequest.newBuilder()
            .setTransferKey(transferKey)
            .setRequestId("sample")
            .setGrant(finished.getGrant())
            .setContent(content)
            .setDestination(PullDestination.newBuilder().setBlocks(destination))
            .build());
    Transfer received = follow(pull);
    report(received);
    if (!States.succeeded(received)) {
      throw new IllegalStateException("the pull ended as " + received.getState() + ": " + received.getFailure());
    }
    // D has told P that its consumer is done. The wait covers the last message between them.
    p.await(finished.getTransfer().getTransferId(), WaitCondition.WAIT_CONDITION_RETURNED, PATIENCE);
  }

  /** Watches the transfer until its blocks are D's own again. */
  private Transfer follow(PullBlocksResponse pull) {
    Transfer transfer = pull.getTransfer();
    String id = transfer.getTransferId();
    long until = System.nanoTime() + PATIENCE.toNanos();
    // The watch starts at the change that the reply shows, so no later change is missed.
    After after = new After(transfer.getEventSeq(), pull.getHeader().getIncarnation());
    TransferFilter filter = TransferFilter.newBuilder().addTransferIds(id).build();
    try (TransferWatch watch = d.watch(filter, after)) {
      while (!States.mayReuseMemory(transfer)) {
        WatchTransfersResponse change = watch.next(Duration.ofNanos(until - System.nanoTime()))
            .orElseThrow(() -> new IllegalStateException("the pull lasts longer than " + PATIENCE));
        if (change.getHistoryLost()) {
          transfer = call(d.transfers()::getTransfer, GetTransferRequest.newBuilder().setTransferId(id).build())
              .getTransfer();
        } else if (change.hasTransfer()) {
          transfer = change.getTransfer();
          System.out.printf("change    %d: %s, memory %s, %s%n", transfer.getEventSeq(), transfer.getState(),
              transfer.getMemory(), transfer.getWaitingFor());
        }
      }
    }
    return transfer;
  }

  private static void report(Transfer transfer) {
    System.out.printf("transfer  %s %s: %d blocks, %d bytes, %d tokens%n", transfer.getTransferId(),
        transfer.getState(), transfer.getBlockCount(), transfer.getMovedBytes(), transfer.getUseTokens());
    transfer.getPathsList().forEach(path -> System.out.printf("  path    %s, rank %d from rank %d: %d bytes%n",
        path.getDataPath(), path.getRank(), path.getPeerRank(), path.getMovedBytes()));
    transfer.getPhasesList().forEach(phase -> System.out.printf("  phase   %s %.3f ms%n", phase.getPhase(),
        phase.getDuration().getSeconds() * 1e3 + phase.getDuration().getNanos() / 1e6));
  }

  private static Blocks allocate(KvgrpcClient engine, int blockCount) {
    var count = GroupBlockCount.newBuilder().setGroup(0).setBlockCount(blockCount);
    return call(engine.pool()::allocateBlocks, AllocateBlocksRequest.newBuilder().addGroupBlockCounts(count).build())
        .getBlocks();
  }

  private static void free(KvgrpcClient engine, Blocks blocks) {
    call(engine.pool()::freeBlocks, FreeBlocksRequest.newBuilder().setAllocationId(blocks.getAllocationId()).build());
  }

  /** Makes up token ids. */
  private static Content prompt(int tokens) {
    List<Integer> ids = IntStream.range(0, tokens).map(i -> i % 32_000).boxed().toList();
    return Content.newBuilder().setTokens(TokenContent.newBuilder().addAllTokenIds(ids)).build();
  }

  private static ByteString randomBytes(int count) {
    byte[] bytes = new byte[count];
    new SecureRandom().nextBytes(bytes);
    return ByteString.copyFrom(bytes);
  }

  private static String randomHex(int count) {
    StringBuilder hex = new StringBuilder();
    randomBytes(count).forEach(value -> hex.append(String.format("%02x", value)));
    return hex.toString();
  }
}
