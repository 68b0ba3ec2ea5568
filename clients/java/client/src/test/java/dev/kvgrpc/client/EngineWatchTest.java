package dev.kvgrpc.client;

import static dev.kvgrpc.client.FakeServer.header;
import static dev.kvgrpc.client.FakeServer.take;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.kvgrpc.v1.HandshakeServiceGrpc.HandshakeServiceImplBase;
import dev.kvgrpc.v1.WatchEngineRequest;
import dev.kvgrpc.v1.WatchEngineResponse;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Tests that the watch of an engine continues over its lives, and reports when the engine cannot be reached. */
class EngineWatchTest {
  private static final Duration LONG = Duration.ofSeconds(20);

  private final BlockingQueue<StreamObserver<WatchEngineResponse>> streams = new LinkedBlockingQueue<>();
  private final BlockingQueue<WatchEngineRequest> requests = new LinkedBlockingQueue<>();
  private final FakeServer server = new FakeServer(new Handshake());
  private final KvgrpcClient client = server.client();

  @AfterEach
  void close() {
    client.close();
    server.close();
  }

  @Test
  void anOutageIsToldOnceAndTheEnginesReturnToo() {
    try (EngineWatch watch = client.watchEngine()) {
      assertEquals(1, status(watch).getHeader().getEventSeq());
      server.stop();
      assertInstanceOf(EngineWatch.Unreachable.class, watch.next(LONG).orElseThrow());
      // Some attempts fail in the meantime, which is not reported.
      assertTrue(watch.next(Duration.ofMillis(400)).isEmpty());
      server.start();
      assertEquals(2, status(watch).getHeader().getEventSeq());
    }
  }

  @Test
  void aStreamThatBreaksIsOpenedAgainAsOftenAsItBreaks() {
    try (EngineWatch watch = client.watchEngine()) {
      for (int i = 1; i <= 3; i++) {
        assertEquals(i, status(watch).getHeader().getEventSeq());
        take(streams).onError(Status.INTERNAL.asRuntimeException());
        assertInstanceOf(EngineWatch.Unreachable.class, watch.next(LONG).orElseThrow());
      }
    }
  }

  @Test
  void theIntervalIsTheCallers() {
    try (EngineWatch watch = client.watchEngine(Duration.ofSeconds(2))) {
      status(watch);
      assertEquals(2, take(requests).getMinInterval().getSeconds());
    }
  }

  @Test
  void aWrongRequestEndsTheWatch() {
    try (EngineWatch watch = client.watchEngine()) {
      status(watch);
      take(streams).onError(FakeServer.refusal(Status.Code.INVALID_ARGUMENT, "INVALID_FIELD", "FIX_REQUEST"));
      var error = assertThrows(KvgrpcException.class, () -> watch.next(LONG));
      assertEquals("INVALID_FIELD", error.reason());
    }
  }

  private static WatchEngineResponse status(EngineWatch watch) {
    return assertInstanceOf(EngineWatch.Status.class, watch.next(LONG).orElseThrow()).message();
  }

  private final class Handshake extends HandshakeServiceImplBase {
    private int opened;

    @Override
    public void watchEngine(WatchEngineRequest request, StreamObserver<WatchEngineResponse> caller) {
      requests.add(request);
      caller.onNext(WatchEngineResponse.newBuilder().setHeader(header(++opened)).build());
      streams.add(caller);
    }
  }
}
