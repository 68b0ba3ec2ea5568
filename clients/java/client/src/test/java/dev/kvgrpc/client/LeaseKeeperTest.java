package dev.kvgrpc.client;

import static dev.kvgrpc.client.FakeServer.take;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.kvgrpc.v1.FailureReason;
import dev.kvgrpc.v1.KeepAliveRequest;
import dev.kvgrpc.v1.KeepAliveResponse;
import dev.kvgrpc.v1.LeaseRef;
import dev.kvgrpc.v1.LeaseServiceGrpc.LeaseServiceImplBase;
import dev.kvgrpc.v1.LeaseState;
import dev.kvgrpc.v1.RenewedLease;
import io.grpc.Status;
import io.grpc.stub.StreamObserver;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CancellationException;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

/** Tests that leases are renewed in time, and that their ends are reported. */
class LeaseKeeperTest {
  private final BlockingQueue<Asked> asked = new LinkedBlockingQueue<>();
  private final FakeServer server = new FakeServer(new Leases());
  private final KvgrpcClient client = server.client();

  /** A renewal that the client asked for, and when. */
  private record Asked(KeepAliveRequest request, StreamObserver<KeepAliveResponse> caller, long at) {
    void answer(RenewedLease... rows) {
      caller.onNext(KeepAliveResponse.newBuilder().addAllLeases(List.of(rows)).build());
    }
  }

  @AfterEach
  void close() {
    client.close();
    server.close();
  }

  @Test
  void aLeaseIsRenewedWhenAThirdOfItsTimeHasPassed() {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a")), Duration.ofSeconds(5))) {
      Asked first = take(asked);
      assertEquals(5, first.request().getTtl().getSeconds());
      first.answer(live(900));
      Asked second = take(asked);
      double passed = (second.at() - first.at()) / 1e6;
      assertTrue(passed > 200 && passed < 800, () -> passed + " ms");
      assertEquals(LeaseState.LEASE_STATE_LIVE, keeper.leases().get(0).state());
    }
  }

  @Test
  void oneStreamRenewsAllLeases() {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a"), ref("b")))) {
      Asked first = take(asked);
      assertEquals(List.of(ref("a"), ref("b")), first.request().getLeasesList());
      first.answer(live(600), live(600));
      Asked second = take(asked);
      assertEquals(first.caller(), second.caller());
      assertEquals(2, second.request().getLeasesCount());
    }
  }

  @Test
  void aLeaseThatIsOverIsToldAndDropped() throws Exception {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a"), ref("b")))) {
      KeptLease a = keeper.leases().get(0);
      take(asked).answer(
          over(LeaseState.LEASE_STATE_DONE, FailureReason.FAILURE_REASON_LEASE_RELEASED), live(600));
      KeptLease.End end = a.over().get(20, TimeUnit.SECONDS);
      assertEquals(LeaseState.LEASE_STATE_DONE, end.state());
      assertEquals(FailureReason.FAILURE_REASON_LEASE_RELEASED, end.reason());
      assertEquals(LeaseState.LEASE_STATE_DONE, a.state());
      assertEquals(List.of(ref("b")), take(asked).request().getLeasesList());
    }
  }

  @Test
  void aLeaseThatTheServerDoesNotKnowIsOver() throws Exception {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a")))) {
      KeptLease a = keeper.leases().get(0);
      take(asked).answer(
          over(LeaseState.LEASE_STATE_UNSPECIFIED, FailureReason.FAILURE_REASON_LEASE_NOT_FOUND));
      assertEquals(FailureReason.FAILURE_REASON_LEASE_NOT_FOUND, a.over().get(20, TimeUnit.SECONDS).reason());
    }
  }

  @Test
  void aLeaseThatCouldNotBeRenewedAndIsNotLiveIsKeptNoMore() throws Exception {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a"), ref("b")))) {
      KeptLease a = keeper.leases().get(0);
      RenewedLease refused = over(LeaseState.LEASE_STATE_LIVE, FailureReason.FAILURE_REASON_LEASE_RELEASED);
      take(asked).answer(refused.toBuilder().setStateValue(77).build(), refused);
      assertEquals(FailureReason.FAILURE_REASON_LEASE_RELEASED, a.over().get(20, TimeUnit.SECONDS).reason());
      assertEquals(List.of(ref("b")), take(asked).request().getLeasesList(), "one that is live is tried again");
    }
  }

  @Test
  void anUnknownStateIsNotAnEnd() {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a")))) {
      take(asked).answer(live(600).toBuilder().setStateValue(77).build());
      take(asked);
      assertEquals(LeaseState.LEASE_STATE_LIVE, keeper.leases().get(0).state());
    }
  }

  @Test
  void aStreamThatBreaksIsOpenedAgain() {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a")))) {
      Asked first = take(asked);
      first.caller().onError(Status.UNAVAILABLE.asRuntimeException());
      Asked second = take(asked);
      assertNotSame(first.caller(), second.caller());
      second.answer(live(60_000));
      assertEquals(1, keeper.leases().size());
    }
  }

  @Test
  void aKeeperOutlastsItsConnection() {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a")))) {
      take(asked).answer(live(30_000));
      server.stop();
      server.start();
      KeptLease b = keeper.keep(ref("b"));
      Asked again = take(asked);
      assertEquals(List.of(ref("b")), again.request().getLeasesList());
      again.answer(live(30_000));
      assertEquals(LeaseState.LEASE_STATE_LIVE, b.state());
    }
  }

  @Test
  void aLeaseThatCouldNotBeRenewedInTimeIsExpired() throws Exception {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a")))) {
      KeptLease a = keeper.leases().get(0);
      take(asked).answer(live(500));
      // The server is silent from now on.
      KeptLease.End end = a.over().get(20, TimeUnit.SECONDS);
      assertEquals(LeaseState.LEASE_STATE_EXPIRED, end.state());
      assertEquals(FailureReason.FAILURE_REASON_LEASE_EXPIRED, end.reason());
      assertEquals(Duration.ZERO, a.remaining().orElseThrow());
    }
  }

  @Test
  void aRequestThatWouldBeRefusedAgainEndsTheLeasesWithItsError() throws Exception {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a")))) {
      KeptLease a = keeper.leases().get(0);
      take(asked).caller().onError(
          FakeServer.refusal(Status.Code.INVALID_ARGUMENT, "TTL_INVALID", "FIX_REQUEST"));
      KeptLease.End end = a.over().get(20, TimeUnit.SECONDS);
      assertEquals(FailureReason.FAILURE_REASON_TTL_INVALID, end.reason());
      assertEquals(Status.Code.INVALID_ARGUMENT, end.error().code());
    }
  }

  @Test
  void aLeaseThatIsDroppedIsRenewedNoMore() {
    try (LeaseKeeper keeper = client.keepAlive(List.of(ref("a"), ref("b")))) {
      keeper.drop(keeper.leases().get(0));
      take(asked).answer(live(600), live(600));
      assertEquals(List.of(ref("b")), take(asked).request().getLeasesList());
    }
  }

  @Test
  void aKeeperThatStopsTellsThoseWhoWaitForAnEnd() {
    LeaseKeeper keeper = client.keepAlive(List.of(ref("a")));
    KeptLease a = keeper.leases().get(0);
    take(asked).answer(live(60_000));
    keeper.close();
    assertThrows(CancellationException.class, () -> a.over().get(20, TimeUnit.SECONDS));
  }

  @Test
  void aKeeperEndsWithItsClientAlsoWithOneForATrace() {
    for (KvgrpcClient closed : List.of(server.client(), server.client().withTraceparent("00-1-2-01"))) {
      LeaseKeeper keeper = closed.keepAlive(List.of(ref("a")));
      KeptLease a = keeper.leases().get(0);
      take(asked).answer(live(600_000));
      closed.close();
      assertThrows(CancellationException.class, () -> a.over().get(20, TimeUnit.SECONDS));
      assertThrows(IllegalStateException.class, () -> keeper.keep(ref("b")));
    }
  }

  @Test
  void aKeeperWithoutLeasesEndsWithItsClient() {
    LeaseKeeper keeper = client.keepAlive(List.of());
    client.close();
    assertThrows(IllegalStateException.class, () -> keeper.keep(ref("a")));
  }

  private static LeaseRef ref(String id) {
    return LeaseRef.newBuilder().setLeaseId(id).build();
  }

  private static RenewedLease live(long millis) {
    return RenewedLease.newBuilder()
        .setState(LeaseState.LEASE_STATE_LIVE)
        .setRemaining(Durations.toProto(Duration.ofMillis(millis)))
        .build();
  }

  private static RenewedLease over(LeaseState state, FailureReason reason) {
    return RenewedLease.newBuilder().setState(state).setReason(reason).build();
  }

  private final class Leases extends LeaseServiceImplBase {
    @Override
    public StreamObserver<KeepAliveRequest> keepAlive(StreamObserver<KeepAliveResponse> caller) {
      return new StreamObserver<>() {
        @Override
        public void onNext(KeepAliveRequest request) {
          asked.add(new Asked(request, caller, System.nanoTime()));
        }

        @Override
        public void onError(Throwable cancelled) {}

        @Override
        public void onCompleted() {
          caller.onCompleted();
        }
      };
    }
  }
}
