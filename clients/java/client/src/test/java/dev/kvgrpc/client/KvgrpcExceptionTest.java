package dev.kvgrpc.client;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.protobuf.Any;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.kvgrpc.client.KvgrpcException.Violation;
import dev.kvgrpc.v1.AllocateBlocksRequest;
import dev.kvgrpc.v1.AllocateBlocksResponse;
import dev.kvgrpc.v1.FailureReason;
import dev.kvgrpc.v1.NextStep;
import dev.kvgrpc.v1.PoolServiceGrpc;
import dev.kvgrpc.v1.TransferFilter;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.Test;

/** Tests what a typed error contains. */
class KvgrpcExceptionTest {
  @Test
  void aRefusalHasAllThatItsDetailsSay() {
    BadRequest.FieldViolation row = BadRequest.FieldViolation.newBuilder()
        .setField("blocks.groups[0]")
        .setDescription("no such block")
        .build();
    BadRequest wrong = BadRequest.newBuilder().addFieldViolations(row).build();
    RetryInfo retry = RetryInfo.newBuilder().setRetryDelay(Durations.toProto(Duration.ofMillis(500))).build();
    var error = KvgrpcException.of(
        FakeServer.refusal(Status.Code.OUT_OF_RANGE, "BLOCK_OUT_OF_RANGE", "FIX_REQUEST", wrong, retry));
    assertEquals(Status.Code.OUT_OF_RANGE, error.code());
    assertEquals("BLOCK_OUT_OF_RANGE", error.reason());
    assertEquals(FailureReason.FAILURE_REASON_BLOCK_OUT_OF_RANGE, error.failureReason());
    assertEquals(NextStep.NEXT_STEP_FIX_REQUEST, error.next());
    assertEquals("it was refused", error.description());
    assertEquals(
        "OUT_OF_RANGE BLOCK_OUT_OF_RANGE: it was refused; blocks.groups[0]: no such block", error.getMessage());
    assertEquals("P", error.engineId());
    assertEquals(77, error.incarnation());
    assertEquals("0", error.metadata().get("group"));
    assertEquals(List.of(new Violation("blocks.groups[0]", "no such block")), error.violations());
    assertEquals(Optional.of(Duration.ofMillis(500)), error.retryDelay());
  }

  @Test
  void aViolationThatIsTheSentenceIsSaidOnce() {
    BadRequest wrong = BadRequest.newBuilder()
        .addFieldViolations(BadRequest.FieldViolation.newBuilder().setField("ttl").setDescription("it was refused"))
        .build();
    var error = KvgrpcException.of(
        FakeServer.refusal(Status.Code.INVALID_ARGUMENT, "TTL_INVALID", "FIX_REQUEST", wrong));
    assertEquals("INVALID_ARGUMENT TTL_INVALID: ttl: it was refused", error.getMessage());
  }

  @Test
  void anErrorTellsWhatWasCalledAndWhereAndTheKeyThatRepeatsTheCall() {
    var pool = new PoolServiceGrpc.PoolServiceImplBase() {
      @Override
      public void allocateBlocks(AllocateBlocksRequest request, StreamObserver<AllocateBlocksResponse> caller) {
        caller.onError(FakeServer.refusal(Status.Code.RESOURCE_EXHAUSTED, "POOL_EXHAUSTED", "RETRY_HERE"));
      }
    };
    try (FakeServer server = new FakeServer(pool);
        KvgrpcClient client = server.client()) {
      AllocateBlocksRequest request = AllocateBlocksRequest.newBuilder().setIdempotencyKey("mine").build();
      var error = assertThrows(
          KvgrpcException.class, () -> KvgrpcClient.call(client.pool()::allocateBlocks, request));
      assertEquals("PoolService/AllocateBlocks", error.method());
      assertEquals(server.address(), error.address());
      assertEquals("mine", error.idempotencyKey());
      assertTrue(error.getMessage().endsWith("(PoolService/AllocateBlocks at " + server.address() + ")"));
      var watch = client.watch(TransferFilter.getDefaultInstance(), TransferWatch.After.PRESENT);
      var ended = assertThrows(KvgrpcException.class, watch::next);
      assertEquals("TransferService/WatchTransfers", ended.method());
    }
  }

  @Test
  void aStatusWithoutDetailsHasItsCode() {
    var error = KvgrpcException.of(Status.UNAVAILABLE.withDescription("gone").asRuntimeException());
    assertEquals(Status.Code.UNAVAILABLE, error.code());
    assertEquals("", error.reason());
    assertEquals(FailureReason.FAILURE_REASON_UNSPECIFIED, error.failureReason());
    assertEquals(NextStep.NEXT_STEP_UNSPECIFIED, error.next());
    assertEquals("gone", error.description());
    assertEquals(0, error.incarnation());
    assertTrue(error.retryDelay().isEmpty());
  }

  @Test
  void anUnknownReasonIsInternalAndCannotBeRetried() {
    var error = KvgrpcException.of(FakeServer.refusal(Status.Code.UNAVAILABLE, "MOON_PHASE", "RETRY_HERE"));
    assertEquals("MOON_PHASE", error.reason());
    assertEquals(FailureReason.FAILURE_REASON_INTERNAL, error.failureReason());
    assertEquals(NextStep.NEXT_STEP_UNSPECIFIED, error.next());
    assertFalse(error.mayRetryHere());
  }

  @Test
  void aKnownReasonThatPassesMayBeRetriedHere() {
    var error = KvgrpcException.of(FakeServer.refusal(Status.Code.UNAVAILABLE, "NO_POOL", "RETRY_HERE"));
    assertTrue(error.mayRetryHere());
  }

  @Test
  void anUnknownNextStepIsUnspecified() {
    var error = KvgrpcException.of(FakeServer.refusal(Status.Code.UNAVAILABLE, "NO_POOL", "WAIT_FOR_RAIN"));
    assertEquals(NextStep.NEXT_STEP_UNSPECIFIED, error.next());
  }

  @Test
  void aReasonOfAnotherDomainIsNone() {
    ErrorInfo foreign = foreign();
    com.google.rpc.Status status = com.google.rpc.Status.newBuilder()
        .setCode(Status.Code.RESOURCE_EXHAUSTED.value())
        .addDetails(Any.pack(foreign))
        .build();
    var error = KvgrpcException.of(StatusProto.toStatusRuntimeException(status));
    assertEquals(Status.Code.RESOURCE_EXHAUSTED, error.code());
    assertEquals("", error.reason());
    assertEquals("", error.engineId());
    assertEquals(0, error.incarnation());
    assertEquals(Map.of(), error.metadata());
  }

  @Test
  void aReasonOfAnotherDomainLeavesTheServersOwn() {
    var error = KvgrpcException.of(
        FakeServer.refusal(Status.Code.UNAVAILABLE, "NO_POOL", "RETRY_HERE", foreign()));
    assertEquals("NO_POOL", error.reason());
    assertEquals("P", error.engineId());
    assertTrue(error.mayRetryHere());
  }

  private static ErrorInfo foreign() {
    return ErrorInfo.newBuilder()
        .setDomain("googleapis.com")
        .setReason("RATE_LIMIT")
        .putMetadata("engine_id", "proxy")
        .putMetadata("incarnation", "5")
        .build();
  }

  @Test
  void detailsThatCannotBeReadLeaveTheCode() {
    Metadata trailers = new Metadata();
    trailers.put(
        Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER), new byte[] {(byte) 0xff, 1});
    var error = KvgrpcException.of(Status.ABORTED.withDescription("x").asRuntimeException(trailers));
    assertEquals(Status.Code.ABORTED, error.code());
    assertEquals("", error.reason());
  }
}
