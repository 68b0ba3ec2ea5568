package dev.kvgrpc.client;

import static dev.kvgrpc.client.FakeServer.TRACEPARENT;
import static dev.kvgrpc.client.KvgrpcClient.call;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.kvgrpc.client.FakeServer.Arrival;
import dev.kvgrpc.v1.AdminServiceGrpc.AdminServiceImplBase;
import dev.kvgrpc.v1.AllocateBlocksRequest;
import dev.kvgrpc.v1.AllocateBlocksResponse;
import dev.kvgrpc.v1.ConnectPeerRequest;
import dev.kvgrpc.v1.ConnectPeerResponse;
import dev.kvgrpc.v1.GetEngineRequest;
import dev.kvgrpc.v1.GetEngineResponse;
import dev.kvgrpc.v1.GetTensorRequest;
import dev.kvgrpc.v1.GetTensorResponse;
import dev.kvgrpc.v1.HandshakeServiceGrpc.HandshakeServiceImplBase;
import dev.kvgrpc.v1.PollSchedulerNewsRequest;
import dev.kvgrpc.v1.PollSchedulerNewsResponse;
import dev.kvgrpc.v1.PoolServiceGrpc.PoolServiceImplBase;
import dev.kvgrpc.v1.PutTensorRequest;
import dev.kvgrpc.v1.PutTensorResponse;
import dev.kvgrpc.v1.ReleaseQuarantineRequest;
import dev.kvgrpc.v1.ReleaseQuarantineResponse;
import dev.kvgrpc.v1.SchedulerServiceGrpc.SchedulerServiceImplBase;
import dev.kvgrpc.v1.TensorServiceGrpc.TensorServiceImplBase;
import dev.kvgrpc.v1.TransferServiceGrpc.TransferServiceImplBase;
import dev.kvgrpc.v1.WaitTransferRequest;
import dev.kvgrpc.v1.WaitTransferResponse;
import dev.kvgrpc.v1.WaitTransfersRequest;
import dev.kvgrpc.v1.WaitTransfersResponse;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import io.opentelemetry.api.trace.Span;
import io.opentelemetry.api.trace.SpanContext;
import io.opentelemetry.api.trace.TraceFlags;
import io.opentelemetry.api.trace.TraceState;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Tests what every call has: a deadline, an idempotency key, metadata, and retries of UNAVAILABLE. */
class CallTest {
  private static final String CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

  private final Deque<Status> failures = new ArrayDeque<>();
  private final BlockingQueue<String> keys = new LinkedBlockingQueue<>();
  private final FakeServer server = new FakeServer(
      new Admin(), new Pool(), new Handshake(), new Transfers(), new Scheduler(), new Tensors());
  private final KvgrpcClient client = server.client();

  @AfterEach
  void close() {
    client.close();
    server.close();
  }

  @Test
  void aCallThatStatesNoDeadlineHasTheDefault() {
    call(client.handshake()::getEngine, GetEngineRequest.getDefaultInstance());
    assertDeadline(10);
  }

  @Test
  void theDeadlineOfAWaitIsTheWaitAndTheDefault() {
    var timeout = Durations.toProto(Duration.ofSeconds(30));
    call(client.transfers()::waitTransfer, WaitTransferRequest.newBuilder().setTimeout(timeout).build());
    assertDeadline(40);
    call(client.transfers()::waitTransfers, WaitTransfersRequest.newBuilder().setTimeout(timeout).build());
    assertDeadline(40);
    call(client.scheduler()::pollSchedulerNews, PollSchedulerNewsRequest.newBuilder().setWait(timeout).build());
    assertDeadline(40);
  }

  @Test
  void aWaitThatIsNotStatedIsAsLongAsTheServersOwn() {
    call(client.transfers()::waitTransfer, WaitTransferRequest.getDefaultInstance());
    assertDeadline(70);
    call(client.transfers()::waitTransfers, WaitTransfersRequest.getDefaultInstance());
    assertDeadline(70);
    call(client.scheduler()::pollSchedulerNews, PollSchedulerNewsRequest.getDefaultInstance());
    assertDeadline(10);
  }

  @Test
  void aTensorThatIsPutOrWantedHasItsTimeAtTheServer() {
    var timeout = Durations.toProto(Duration.ofSeconds(5));
    call(client.tensors()::getTensor, GetTensorRequest.getDefaultInstance());
    assertDeadline(70);
    call(client.tensors()::getTensor, GetTensorRequest.newBuilder().setTimeout(timeout).build());
    assertDeadline(15);
    call(client.tensors()::putTensor, PutTensorRequest.getDefaultInstance());
    assertDeadline(130);
    call(client.tensors()::putTensor, PutTensorRequest.newBuilder().setTimeout(timeout).build());
    assertDeadline(15);
  }

  @Test
  void connectPeerHasAMinute() {
    call(client.handshake()::connectPeer, ConnectPeerRequest.getDefaultInstance());
    assertDeadline(60);
  }

  @Test
  void releaseQuarantineHasAMinute() {
    call(client.admin()::releaseQuarantine, ReleaseQuarantineRequest.getDefaultInstance());
    assertDeadline(60);
  }

  @Test
  void aTimeoutOverAMinuteIsThatOfCallsWithAMinute() {
    var patient = ClientOptions.defaults().withTimeout(Duration.ofSeconds(90));
    try (var client = KvgrpcClient.connect(server.address(), patient)) {
      call(client.admin()::releaseQuarantine, ReleaseQuarantineRequest.getDefaultInstance());
      assertDeadline(90);
    }
  }

  @Test
  void aDeadlineOfTheCallersOwnIsKept() {
    call(client.handshake().withDeadlineAfter(3, TimeUnit.SECONDS)::getEngine, GetEngineRequest.getDefaultInstance());
    assertDeadline(3);
  }

  @Test
  void anEmptyKeyIsFilledOnceAndTheSameInEveryRepetition() {
    failures.add(Status.UNAVAILABLE);
    failures.add(Status.UNAVAILABLE);
    call(client.pool()::allocateBlocks, AllocateBlocksRequest.getDefaultInstance());
    String key = FakeServer.take(keys);
    assertFalse(key.isEmpty());
    assertEquals(key, FakeServer.take(keys));
    assertEquals(key, FakeServer.take(keys));
  }

  @Test
  void twoCallsHaveTwoKeys() {
    AllocateBlocksRequest request = AllocateBlocksRequest.getDefaultInstance();
    call(client.pool()::allocateBlocks, request);
    call(client.pool()::allocateBlocks, request);
    assertNotEquals(FakeServer.take(keys), FakeServer.take(keys));
  }

  @Test
  void aKeyOfTheCallersOwnIsKept() {
    call(client.pool()::allocateBlocks, AllocateBlocksRequest.newBuilder().setIdempotencyKey("mine").build());
    assertEquals("mine", FakeServer.take(keys));
  }

  @Test
  void nothingButUnavailableIsRepeated() {
    for (Status status : new Status[] {Status.RESOURCE_EXHAUSTED, Status.ABORTED, Status.INTERNAL, Status.UNKNOWN}) {
      failures.add(status);
      var error = assertThrows(
          KvgrpcException.class,
          () -> call(client.pool()::allocateBlocks, AllocateBlocksRequest.getDefaultInstance()));
      assertEquals(status.getCode(), error.code());
      assertEquals(1, keys.size());
      keys.clear();
    }
  }

  @Test
  void connectPeerIsNotRepeated() {
    failures.add(Status.UNAVAILABLE);
    var error = assertThrows(
        KvgrpcException.class,
        () -> call(client.handshake()::connectPeer, ConnectPeerRequest.getDefaultInstance()));
    assertEquals(Status.Code.UNAVAILABLE, error.code());
    assertEquals(1, server.arrivals.size());
  }

  @Test
  void aCallAfterTheServersReturnReachesIt() {
    call(client.handshake()::getEngine, GetEngineRequest.getDefaultInstance());
    server.stop();
    var error = assertThrows(
        KvgrpcException.class, () -> call(client.handshake()::getEngine, GetEngineRequest.getDefaultInstance()));
    assertEquals(Status.Code.UNAVAILABLE, error.code());
    server.start();
    call(client.handshake()::getEngine, GetEngineRequest.getDefaultInstance());
  }

  @Test
  void withoutATraceNoContextGoesAlong() {
    call(client.handshake()::getEngine, GetEngineRequest.getDefaultInstance());
    assertFalse(server.arrival().headers().containsKey(TRACEPARENT));
  }

  @Test
  void theTraceContextOfAnArgumentGoesAlong() {
    call(client.withTraceparent(CONTEXT).handshake()::getEngine, GetEngineRequest.getDefaultInstance());
    assertEquals(CONTEXT, server.arrival().headers().get(TRACEPARENT));
  }

  @Test
  void theContextOfTheCurrentSpanGoesAlong() {
    var options = ClientOptions.defaults().withTraceparent(new OpenTelemetryTraceparent());
    var span = SpanContext.create(
        "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", TraceFlags.getSampled(), TraceState.getDefault());
    try (var traced = KvgrpcClient.connect(server.address(), options)) {
      try (var scope = Span.wrap(span).makeCurrent()) {
        call(traced.handshake()::getEngine, GetEngineRequest.getDefaultInstance());
      }
      call(traced.handshake()::getEngine, GetEngineRequest.getDefaultInstance());
    }
    assertEquals(CONTEXT, server.arrival().headers().get(TRACEPARENT));
    assertFalse(server.arrival().headers().containsKey(TRACEPARENT));
  }

  @Test
  void metadataOfTheOptionsGoAlong() {
    var options = ClientOptions.defaults().withMetadata(Map.of("authorization", "Bearer x"));
    try (var authorized = KvgrpcClient.connect(server.address(), options)) {
      call(authorized.handshake()::getEngine, GetEngineRequest.getDefaultInstance());
    }
    assertEquals("Bearer x", server.arrival().headers().get(FakeServer.key("authorization")));
  }

  @Test
  void aTimeoutIsPositive() {
    assertThrows(IllegalArgumentException.class, () -> ClientOptions.defaults().withTimeout(Duration.ZERO));
  }

  private void assertDeadline(double seconds) {
    Arrival arrival = server.arrival();
    assertTrue(arrival.deadlineS() <= seconds, arrival::toString);
    assertTrue(arrival.deadlineS() > seconds - 2.5, arrival::toString);
  }

  private <R> void answer(StreamObserver<R> caller, R reply) {
    Status failure = failures.poll();
    if (failure != null) {
      caller.onError(failure.asRuntimeException());
      return;
    }
    caller.onNext(reply);
    caller.onCompleted();
  }

  private final class Admin extends AdminServiceImplBase {
    @Override
    public void releaseQuarantine(ReleaseQuarantineRequest request, StreamObserver<ReleaseQuarantineResponse> caller) {
      answer(caller, ReleaseQuarantineResponse.getDefaultInstance());
    }
  }

  private final class Pool extends PoolServiceImplBase {
    @Override
    public void allocateBlocks(AllocateBlocksRequest request, StreamObserver<AllocateBlocksResponse> caller) {
      keys.add(request.getIdempotencyKey());
      answer(caller, AllocateBlocksResponse.getDefaultInstance());
    }
  }

  private final class Handshake extends HandshakeServiceImplBase {
    @Override
    public void getEngine(GetEngineRequest request, StreamObserver<GetEngineResponse> caller) {
      answer(caller, GetEngineResponse.getDefaultInstance());
    }

    @Override
    public void connectPeer(ConnectPeerRequest request, StreamObserver<ConnectPeerResponse> caller) {
      answer(caller, ConnectPeerResponse.getDefaultInstance());
    }
  }

  private final class Transfers extends TransferServiceImplBase {
    @Override
    public void waitTransfer(WaitTransferRequest request, StreamObserver<WaitTransferResponse> caller) {
      answer(caller, WaitTransferResponse.getDefaultInstance());
    }

    @Override
    public void waitTransfers(WaitTransfersRequest request, StreamObserver<WaitTransfersResponse> caller) {
      answer(caller, WaitTransfersResponse.getDefaultInstance());
    }
  }

  private final class Tensors extends TensorServiceImplBase {
    @Override
    public void getTensor(GetTensorRequest request, StreamObserver<GetTensorResponse> caller) {
      answer(caller, GetTensorResponse.getDefaultInstance());
    }

    @Override
    public void putTensor(PutTensorRequest request, StreamObserver<PutTensorResponse> caller) {
      answer(caller, PutTensorResponse.getDefaultInstance());
    }
  }

  private final class Scheduler extends SchedulerServiceImplBase {
    @Override
    public void pollSchedulerNews(PollSchedulerNewsRequest request, StreamObserver<PollSchedulerNewsResponse> caller) {
      answer(caller, PollSchedulerNewsResponse.getDefaultInstance());
    }
  }
}
