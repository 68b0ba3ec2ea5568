package dev.kvgrpc.client;

import static dev.kvgrpc.client.FakeServer.LIFE;
import static dev.kvgrpc.client.FakeServer.header;
import static dev.kvgrpc.client.FakeServer.take;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.kvgrpc.client.TransferWatch.After;
import dev.kvgrpc.v1.Transfer;
import dev.kvgrpc.v1.TransferFilter;
import dev.kvgrpc.v1.TransferServiceGrpc.TransferServiceImplBase;
import dev.kvgrpc.v1.WatchTransfersRequest;
import dev.kvgrpc.v1.WatchTransfersResponse;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Tests that a watch repeats nothing and loses nothing, over streams that break. */
class TransferWatchTest {
  private static final TransferFilter FILTER = TransferFilter.newBuilder().setRequestId("r").build();
  private static final Duration LONG = Duration.ofSeconds(20);

  private final BlockingQueue<Opened> streams = new LinkedBlockingQueue<>();
  private final FakeServer server = new FakeServer(new Transfers());
  private final KvgrpcClient client = server.client();

  /** A stream that the client opened. */
  private record Opened(WatchTransfersRequest request, StreamObserver<WatchTransfersResponse> caller) {}

  @AfterEach
  void close() {
    client.close();
    server.close();
  }

  @Test
  void aWatchOfThePresentAsksForNoPast() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.PRESENT)) {
      var next = CompletableFuture.supplyAsync(watch::next);
      Opened stream = take(streams);
      assertEquals(WatchTransfersRequest.newBuilder().setFilter(FILTER).build(), stream.request());
      stream.caller().onNext(position(4));
      assertEquals(4, next.get(20, TimeUnit.SECONDS).getHeader().getEventSeq());
    }
  }

  @Test
  void aMessageThatIsTooLongEndsTheWatch() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.PRESENT)) {
      var next = CompletableFuture.supplyAsync(watch::next);
      Transfer transfer = Transfer.newBuilder().setRequestId("x".repeat(5 << 20)).build(); // more than a client takes
      take(streams).caller().onNext(change(1).toBuilder().setTransfer(transfer).build());
      var failed = assertThrows(ExecutionException.class, () -> next.get(20, TimeUnit.SECONDS));
      assertEquals(Status.Code.RESOURCE_EXHAUSTED, KvgrpcException.of(failed).code());
    }
  }

  @Test
  void aBrokenStreamIsResumedAfterTheLastMessageThatWasRead() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      var first = read(watch);
      Opened stream = take(streams);
      assertEquals(4, stream.request().getAfterEventSeq());
      assertEquals(LIFE, stream.request().getIncarnation());
      stream.caller().onNext(change(5));
      assertEquals("5", first.get().getTransfer().getTransferId());
      var second = read(watch);
      stream.caller().onNext(position(9));
      assertFalse(second.get().hasTransfer());
      var third = read(watch);
      stream.caller().onError(Status.UNAVAILABLE.asRuntimeException());
      Opened resumed = take(streams);
      assertEquals(9, resumed.request().getAfterEventSeq());
      assertEquals(LIFE, resumed.request().getIncarnation());
      resumed.caller().onNext(position(9));
      resumed.caller().onNext(change(10));
      assertEquals("10", third.get().getTransfer().getTransferId(), "that a later stream stands is no news");
      assertEquals(After.of(header(10)), watch.position());
    }
  }

  @Test
  void aWatchOutlastsItsConnection() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      var next = read(watch);
      take(streams).caller().onNext(change(5));
      next.get();
      next = read(watch);
      server.stop();
      server.start();
      Opened resumed = take(streams);
      assertEquals(5, resumed.request().getAfterEventSeq());
      resumed.caller().onNext(change(6));
      assertEquals("6", next.get().getTransfer().getTransferId());
    }
  }

  @Test
  void aStreamThatTheServerEndsIsOpenedAgain() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      var next = read(watch);
      take(streams).caller().onCompleted();
      take(streams).caller().onNext(change(5));
      assertEquals("5", next.get().getTransfer().getTransferId());
    }
  }

  @Test
  void lostHistoryIsHandedOnAndTheWatchGoesOnAfterIt() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      var next = read(watch);
      Opened stream = take(streams);
      stream.caller().onNext(position(80).toBuilder().setHistoryLost(true).build());
      assertTrue(next.get().getHistoryLost());
      next = read(watch);
      stream.caller().onError(Status.RESOURCE_EXHAUSTED.asRuntimeException());
      assertEquals(80, take(streams).request().getAfterEventSeq());
    }
  }

  @Test
  void theEndOfTheLifeEndsTheWatch() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      var next = read(watch);
      take(streams).caller().onError(FakeServer.refusal(Status.Code.ABORTED, "INCARNATION_CHANGED", "RECOMPUTE"));
      var error = assertThrows(Exception.class, next::get).getCause();
      assertEquals("INCARNATION_CHANGED", ((KvgrpcException) error).reason());
      assertEquals("INCARNATION_CHANGED", assertThrows(KvgrpcException.class, watch::next).reason());
    }
  }

  @Test
  void aMessageOfAnotherLifeEndsTheWatch() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      var next = read(watch);
      var other = header(1).toBuilder().setIncarnation(LIFE + 1);
      take(streams).caller().onNext(WatchTransfersResponse.newBuilder().setHeader(other).build());
      var error = (KvgrpcException) assertThrows(Exception.class, next::get).getCause();
      assertEquals("INCARNATION_CHANGED", error.reason());
      assertEquals(Status.Code.ABORTED, error.code());
      assertEquals(LIFE + 1, error.incarnation());
    }
  }

  @Test
  void aWrongRequestEndsTheWatch() throws Exception {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      var next = read(watch);
      take(streams).caller().onError(FakeServer.refusal(Status.Code.INVALID_ARGUMENT, "INVALID_FIELD", "FIX_REQUEST"));
      var error = (KvgrpcException) assertThrows(Exception.class, next::get).getCause();
      assertEquals("INVALID_FIELD", error.reason());
    }
  }

  @Test
  void aTimeoutLeavesTheStreamStanding() {
    try (TransferWatch watch = client.watch(FILTER, After.of(header(4)))) {
      assertTrue(watch.next(Duration.ofMillis(1)).isEmpty());
      Opened stream = take(streams);
      stream.caller().onNext(change(5));
      assertEquals("5", watch.next(LONG).orElseThrow().getTransfer().getTransferId());
      assertTrue(streams.isEmpty());
    }
  }

  @Test
  void anotherThreadMayCloseAWatchThatIsRead() {
    TransferWatch watch = client.watch(FILTER, After.PRESENT);
    var next = read(watch);
    take(streams);
    watch.close();
    var error = (KvgrpcException) assertThrows(Exception.class, next::get).getCause();
    assertEquals(Status.Code.CANCELLED, error.code());
  }

  @Test
  void closingTheClientEndsTheWatch() {
    TransferWatch watch = client.watch(FILTER, After.PRESENT);
    var next = read(watch);
    take(streams);
    client.close();
    assertThrows(Exception.class, next::get);
  }

  private static CompletableFuture<WatchTransfersResponse> read(TransferWatch watch) {
    return CompletableFuture.supplyAsync(() -> watch.next(LONG).orElseThrow());
  }

  private static WatchTransfersResponse position(long eventSeq) {
    return WatchTransfersResponse.newBuilder().setHeader(header(eventSeq)).build();
  }

  private static WatchTransfersResponse change(long eventSeq) {
    Transfer transfer = Transfer.newBuilder().setTransferId(Long.toString(eventSeq)).setEventSeq(eventSeq).build();
    return position(eventSeq).toBuilder().setTransfer(transfer).build();
  }

  private final class Transfers extends TransferServiceImplBase {
    @Override
    public void watchTransfers(WatchTransfersRequest request, StreamObserver<WatchTransfersResponse> caller) {
      streams.add(new Opened(request, caller));
    }
  }
}
