package dev.kvgrpc.client;

import com.google.protobuf.ByteString;
import dev.kvgrpc.v1.CancelTransferRequest;
import dev.kvgrpc.v1.CancelTransferResponse;
import dev.kvgrpc.v1.TransferServiceGrpc;
import io.grpc.Context;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;

/** Cleans up after a failed request: cancels its transfers and frees its allocations, at all sides at once. */
public final class CleanUp {
  private CleanUp() {}

  /** One side, by the transfer's key (all of the engine's transfers with it, and those to come) or by its id. */
  public record Side(
      KvgrpcClient client, ByteString transferKey, String transferId, List<String> freeAllocationIds) {

    /** By key. */
    public static Side ofKey(KvgrpcClient client, ByteString transferKey, String... freeAllocationIds) {
      return new Side(client, transferKey, "", List.of(freeAllocationIds));
    }

    /** By id. */
    public static Side ofId(KvgrpcClient client, String transferId, String... freeAllocationIds) {
      return new Side(client, ByteString.EMPTY, transferId, List.of(freeAllocationIds));
    }

    /** Without the key, which is a secret. */
    @Override
    public String toString() {
      String target = transferId.isEmpty() ? "transferKey=[REDACTED]" : "transferId=" + transferId;
      return "Side[" + target + ", freeAllocationIds=" + freeAllocationIds + "]";
    }

    private CancelTransferRequest request(String message) {
      CancelTransferRequest.Builder request =
          CancelTransferRequest.newBuilder().setMessage(message).addAllFreeAllocationIds(freeAllocationIds);
      return (transferId.isEmpty() ? request.setTransferKey(transferKey) : request.setTransferId(transferId)).build();
    }
  }

  /** What one side said: a reply, or an error after which nothing was cancelled or freed there. */
  public record Outcome(Optional<CancelTransferResponse> reply, Optional<KvgrpcException> error) {}

  /**
   * Tells every side, whatever the others say, and returns what each said, in the same order. Never throws because a
   * side failed: what it holds ends by itself then, with the lease and the TTL of the allocation. Goes on when the caller's
   * own call is over, which is often why there is something to clean up: each side has the default deadline. Likewise when
   * the thread is interrupted, which it still is afterwards.
   */
  public static List<Outcome> run(List<Side> sides, String message) {
    return sides.stream().map(side -> begun(side, message)).toList().stream().map(CleanUp::outcome).toList();
  }

  private static Future<CancelTransferResponse> begun(Side side, String message) {
    try {
      var transfers = TransferServiceGrpc.newFutureStub(side.client().channel());
      return Context.ROOT.call(() -> transfers.cancelTransfer(side.request(message)));
    } catch (Exception failed) {
      // What the client's own options throw, where they ask for a trace.
      return CompletableFuture.failedFuture(failed);
    }
  }

  private static Outcome outcome(Future<CancelTransferResponse> call) {
    boolean interrupted = false;
    try {
      while (true) {
        try {
          return new Outcome(Optional.of(call.get()), Optional.empty());
        } catch (ExecutionException failed) {
          return new Outcome(Optional.empty(), Optional.of(KvgrpcException.of(failed)));
        } catch (InterruptedException meanwhile) {
          // Whoever interrupts may close the clients next, and with them the calls.
          interrupted = true;
        }
      }
    } finally {
      if (interrupted) {
        Thread.currentThread().interrupt();
      }
    }
  }
}
