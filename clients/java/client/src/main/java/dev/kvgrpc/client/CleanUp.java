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

/** Cleans up after a failed request: cancels its transfers and frees its allocations, at all sides in parallel. */
public final class CleanUp {
  private CleanUp() {}

  /** One side, by the transfer's key (all of the engine's transfers with it, later ones included) or by its id. */
  public record Side(
      KvgrpcClient client, ByteString transferKey, String transferId, List<String> freeAllocationIds) {

    /** Returns a side by the transfer's key. */
    public static Side ofKey(KvgrpcClient client, ByteString transferKey, String... freeAllocationIds) {
      return new Side(client, transferKey, "", List.of(freeAllocationIds));
    }

    /** Returns a side by the transfer's id. */
    public static Side ofId(KvgrpcClient client, String transferId, String... freeAllocationIds) {
      return new Side(client, ByteString.EMPTY, transferId, List.of(freeAllocationIds));
    }

    /** Omits the key, because it is a secret. */
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

  /** The result of one side: a reply, or an error after which nothing was cancelled or freed there. */
  public record Outcome(Optional<CancelTransferResponse> reply, Optional<KvgrpcException> error) {}

  /**
   * Tells every side, whatever the others answer, and returns their results in the same order. It never throws because
   * a side failed: what that side holds ends by itself, with the lease and the TTL of the allocation. It continues
   * after the caller's own call is over, because that is a common reason to clean up. Each side has the default
   * deadline. It also continues when the thread is interrupted, and the thread is still interrupted afterwards.
   */
  public static List<Outcome> run(List<Side> sides, String message) {
    return sides.stream().map(side -> begun(side, message)).toList().stream().map(CleanUp::outcome).toList();
  }

  private static Future<CancelTransferResponse> begun(Side side, String message) {
    try {
      var transfers = TransferServiceGrpc.newFutureStub(side.client().channel());
      return Context.ROOT.call(() -> transfers.cancelTransfer(side.request(message)));
    } catch (Exception failed) {
      // The client's own options may throw when they are asked for a trace.
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
          // The interrupting thread may close the clients next, and with them the calls.
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
