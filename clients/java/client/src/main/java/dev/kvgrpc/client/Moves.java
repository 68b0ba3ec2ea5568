package dev.kvgrpc.client;

import com.google.protobuf.ByteString;
import dev.kvgrpc.v1.AllocateBlocksRequest;
import dev.kvgrpc.v1.Blocks;
import dev.kvgrpc.v1.Content;
import dev.kvgrpc.v1.FinishedBlocksRequest;
import dev.kvgrpc.v1.GroupBlockCount;
import dev.kvgrpc.v1.GroupBlocks;
import dev.kvgrpc.v1.HandOver;
import dev.kvgrpc.v1.PullBlocksRequest;
import dev.kvgrpc.v1.PullBlocksResponse;
import dev.kvgrpc.v1.PullDestination;
import dev.kvgrpc.v1.ReserveBlocksRequest;
import dev.kvgrpc.v1.ReserveBlocksResponse;
import dev.kvgrpc.v1.Transfer;
import dev.kvgrpc.v1.TransferState;
import dev.kvgrpc.v1.TransferWait;
import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitTransferResponse;
import java.security.SecureRandom;
import java.time.Duration;
import java.util.List;
import java.util.Optional;

/**
 * Pulls and pushes that wait for their end, and one call that moves the KV of a prompt. A transfer that ends without
 * its KV is an exception here. At the server it is not an error of a call.
 */
public final class Moves {
  /** Default time of a move. It exceeds the sum of a server's defaults for queue, transfer and settle. */
  public static final Duration TIMEOUT = Duration.ofSeconds(90);

  /** Wait of one call: half of what a server allows, so that proxies with a limit of one minute let it pass. */
  private static final Duration ONCE = Duration.ofSeconds(30);

  private static final SecureRandom RANDOM = new SecureRandom();

  private Moves() {}

  /**
   * Returns the transfer, which has succeeded or is not over. A transfer that has ended without its KV throws {@link
   * KvgrpcException}. The code of the exception is ABORTED, its reason and next step are those of the failure, and its
   * metadata has {@code transfer_id} and {@code phase}.
   */
  public static Transfer check(Transfer transfer) {
    if (States.isOver(transfer) && transfer.getState() != TransferState.TRANSFER_STATE_SUCCEEDED) {
      throw KvgrpcException.of(transfer);
    }
    return transfer;
  }

  /**
   * Makes a pull whose destination is stated, and waits for its end. It returns the transfer once the KV is in its
   * blocks. It throws the error that refuses the call, or the one that {@link #check} throws. When the time is over, it
   * throws DEADLINE_EXCEEDED: then the transfer continues, and CancelTransfer ends it. State {@code wait.until} to wait
   * for the return of the memory as well.
   */
  public static Transfer pull(KvgrpcClient client, PullBlocksRequest request, Duration timeout) {
    long end = System.nanoTime() + Durations.nanos(timeout);
    TransferWait wait = inCall(request.getWait(), timeout);
    PullBlocksResponse reply =
        KvgrpcClient.call(client.handoff()::pullBlocks, request.toBuilder().setWait(wait).build());
    return ended(client, reply.getTransfer(), reply.getConditionMet(), wait.getUntil(), end);
  }

  /** Reserves blocks for what the request's source will push, and waits for it as {@link #pull} does. */
  public static Transfer receive(KvgrpcClient client, ReserveBlocksRequest request, Duration timeout) {
    long end = System.nanoTime() + Durations.nanos(timeout);
    TransferWait wait = inCall(request.getWait(), timeout);
    ReserveBlocksResponse reply =
        KvgrpcClient.call(client.handoff()::reserveBlocks, request.toBuilder().setWait(wait).build());
    return ended(client, reply.getTransfer(), reply.getConditionMet(), wait.getUntil(), end);
  }

  /** The options of a move: a label at both engines, the destination blocks, and the time limit. */
  public record Options(String requestId, Optional<Blocks> into, Duration timeout) {
    /**
     * Returns the default options. They allocate as many blocks at the destination as the source has, group by group,
     * and allow 90 s.
     */
    public static Options defaults() {
      return new Options("", Optional.empty(), TIMEOUT);
    }
  }

  /** The result of a move: the RECEIVE at the destination, and its blocks. They are freed by their allocation id. */
  public record Moved(Transfer transfer, Blocks blocks) {}

  /**
   * Copies the KV of a prompt from blocks of one engine to another engine, and waits until the KV is there. It
   * allocates blocks at the destination, hands the source's blocks over for reading, and lets the destination pull.
   * Both servers must manage their pools. The caller keeps the source's blocks.
   *
   * <p>A move that fails leaves nothing behind: it is cancelled at both sides, and what it allocated is freed. Throws
   * {@link KvgrpcException}.
   */
  public static Moved move(
      KvgrpcClient source, KvgrpcClient destination, Blocks blocks, Content content, Options options) {
    long end = System.nanoTime() + Durations.nanos(options.timeout());
    byte[] key = new byte[16];
    RANDOM.nextBytes(key);
    ByteString transferKey = ByteString.copyFrom(key);
    Blocks into = options.into().orElseGet(() -> allocated(destination, blocks, options.requestId()));
    try {
      HandOver job = HandOver.newBuilder()
          .setBlocks(blocks)
          .setContent(content)
          .setTtl(Durations.toProto(options.timeout()))
          .build();
      var handedOver = KvgrpcClient.call(
          source.handoff()::finishedBlocks,
          FinishedBlocksRequest.newBuilder()
              .setTransferKey(transferKey)
              .setRequestId(options.requestId())
              .setForReaders(job)
              .build());
      PullBlocksRequest request = PullBlocksRequest.newBuilder()
          .setGrant(handedOver.getGrant())
          .setContent(content)
          .setDestination(PullDestination.newBuilder().setBlocks(into))
          .setRequestId(options.requestId())
          .build();
      return new Moved(pull(destination, request, left(end)), into);
    } catch (RuntimeException | Error failed) {
      String[] allocations = options.into().isPresent() ? new String[0] : new String[] {into.getAllocationId()};
      CleanUp.run(
          List.of(
              CleanUp.Side.ofKey(source, transferKey), CleanUp.Side.ofKey(destination, transferKey, allocations)),
          "the move failed");
      throw failed;
    }
  }

  private static Blocks allocated(KvgrpcClient destination, Blocks blocks, String requestId) {
    AllocateBlocksRequest.Builder request =
        AllocateBlocksRequest.newBuilder().setRequestId(requestId).setLabel("move");
    for (GroupBlocks group : blocks.getGroupsList()) {
      int count = group.getRuns().getCountsList().stream().mapToInt(Integer::intValue).sum();
      request.addGroupBlockCounts(GroupBlockCount.newBuilder().setGroup(group.getGroup()).setBlockCount(count));
    }
    return KvgrpcClient.call(destination.pool()::allocateBlocks, request.build()).getBlocks();
  }

  private static TransferWait inCall(TransferWait stated, Duration timeout) {
    Duration once = timeout.compareTo(ONCE) < 0 ? timeout : ONCE;
    return stated.toBuilder().setTimeout(Durations.toProto(once)).build();
  }

  private static Transfer ended(
      KvgrpcClient client, Transfer transfer, boolean conditionMet, WaitCondition until, long end) {
    if (conditionMet) {
      return check(transfer);
    }
    WaitTransferResponse waited = client.await(transfer.getTransferId(), until, left(end));
    if (!waited.getConditionMet()) {
      throw KvgrpcException.late(waited.getTransfer());
    }
    return check(waited.getTransfer());
  }

  private static Duration left(long end) {
    return Duration.ofNanos(Math.max(end - System.nanoTime(), 1_000_000));
  }
}
