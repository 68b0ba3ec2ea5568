package dev.kvgrpc.client;

import dev.kvgrpc.v1.AdminServiceGrpc;
import dev.kvgrpc.v1.AdminServiceGrpc.AdminServiceBlockingStub;
import dev.kvgrpc.v1.HandoffServiceGrpc;
import dev.kvgrpc.v1.HandoffServiceGrpc.HandoffServiceBlockingStub;
import dev.kvgrpc.v1.HandshakeServiceGrpc;
import dev.kvgrpc.v1.HandshakeServiceGrpc.HandshakeServiceBlockingStub;
import dev.kvgrpc.v1.LeaseRef;
import dev.kvgrpc.v1.LeaseServiceGrpc;
import dev.kvgrpc.v1.LeaseServiceGrpc.LeaseServiceBlockingStub;
import dev.kvgrpc.v1.PoolServiceGrpc;
import dev.kvgrpc.v1.PoolServiceGrpc.PoolServiceBlockingStub;
import dev.kvgrpc.v1.SchedulerServiceGrpc;
import dev.kvgrpc.v1.SchedulerServiceGrpc.SchedulerServiceBlockingStub;
import dev.kvgrpc.v1.TensorServiceGrpc;
import dev.kvgrpc.v1.TensorServiceGrpc.TensorServiceBlockingStub;
import dev.kvgrpc.v1.TransferFilter;
import dev.kvgrpc.v1.TransferServiceGrpc;
import dev.kvgrpc.v1.TransferServiceGrpc.TransferServiceBlockingStub;
import dev.kvgrpc.v1.WaitCondition;
import dev.kvgrpc.v1.WaitTransferResponse;
import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.Grpc;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;

/**
 * One server. Thread-safe, and cheap to keep: one for each server is enough.
 *
 * <p>Its stubs are the generated ones. {@link #call} makes a call with one and throws the typed error:
 *
 * <pre>{@code
 * AllocateBlocksResponse taken = call(engine.pool()::allocateBlocks, request);
 * }</pre>
 */
public final class KvgrpcClient implements AutoCloseable {
  private final ManagedChannel connection;
  private final ClientOptions options;
  private final Channel channel;
  private final Set<LeaseKeeper> keepers;

  private KvgrpcClient(ManagedChannel connection, ClientOptions options, Set<LeaseKeeper> keepers) {
    this.connection = connection;
    this.keepers = keepers;
    this.options = options;
    this.channel = ClientInterceptors.intercept(
        connection, new CallInterceptor(options), new Reconnection(connection));
  }

  /** A client of the server at {@code address} ({@code host:port}). Connects at the first call. */
  public static KvgrpcClient connect(String address) {
    return connect(address, ClientOptions.defaults());
  }

  /** As {@link #connect(String)}, with options. */
  public static KvgrpcClient connect(String address, ClientOptions options) {
    ManagedChannel connection = Grpc.newChannelBuilder(address, options.credentials())
        .defaultServiceConfig(ServiceConfig.MAP)
        .disableServiceConfigLookUp()
        // A connection whose other end is gone without a word is noticed in 40 s. Pings go out during calls only.
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveTimeout(10, TimeUnit.SECONDS)
        .build();
    return new KvgrpcClient(connection, options, ConcurrentHashMap.newKeySet());
  }

  /** The same connection, for calls that belong to the trace of this W3C context. Closing either closes both. */
  public KvgrpcClient withTraceparent(String traceparent) {
    return new KvgrpcClient(connection, options.withTraceparent(() -> traceparent), keepers);
  }

  /** For stubs of other kinds: future, asynchronous. Deadlines, keys and metadata are seen to. */
  public Channel channel() {
    return channel;
  }

  /** First contact, and how an engine is. */
  public HandshakeServiceBlockingStub handshake() {
    return HandshakeServiceGrpc.newBlockingStub(channel);
  }

  /** The pool. */
  public PoolServiceBlockingStub pool() {
    return PoolServiceGrpc.newBlockingStub(channel);
  }

  /** Handing blocks over, and taking them. */
  public HandoffServiceBlockingStub handoff() {
    return HandoffServiceGrpc.newBlockingStub(channel);
  }

  /** Transfers. */
  public TransferServiceBlockingStub transfers() {
    return TransferServiceGrpc.newBlockingStub(channel);
  }

  /** Leases. */
  public LeaseServiceBlockingStub leases() {
    return LeaseServiceGrpc.newBlockingStub(channel);
  }

  /** For the scheduler of the server's engine. */
  public SchedulerServiceBlockingStub scheduler() {
    return SchedulerServiceGrpc.newBlockingStub(channel);
  }

  /** Named tensors, of a server whose pool is a staging store. */
  public TensorServiceBlockingStub tensors() {
    return TensorServiceGrpc.newBlockingStub(channel);
  }

  /** For operators. */
  public AdminServiceBlockingStub admin() {
    return AdminServiceGrpc.newBlockingStub(channel);
  }

  /** A call of a blocking stub. Throws {@link KvgrpcException}. */
  public static <Q, R> R call(Function<Q, R> method, Q request) {
    try {
      return method.apply(request);
    } catch (StatusRuntimeException failed) {
      throw KvgrpcException.of(failed);
    }
  }

  /** A stream of one's own, read by pulling. It does not come back when it breaks: {@link #watch} does. */
  public <Q, R> MessageStream<Q, R> open(MethodDescriptor<Q, R> method) {
    return open(method, new Metadata());
  }

  /** As {@link #open(MethodDescriptor)}, with metadata. */
  public <Q, R> MessageStream<Q, R> open(MethodDescriptor<Q, R> method, Metadata metadata) {
    return new MessageStream<>(channel, method).start(metadata);
  }

  /**
   * Waits until the transfer is over ({@code ENDED}) or its memory is returned as well ({@code RETURNED}), or the time is
   * over: the reply's {@code condition_met} tells which. The timeout may be longer than one call's; a server that cannot be
   * reached or is too busy is tried again while time is left. A silent server can add 10 s. The wait also ends with the
   * client, and with the current {@link io.grpc.Context}.
   */
  public WaitTransferResponse await(String transferId, WaitCondition until, Duration timeout) {
    return new Waiting(this, transferId, until).run(timeout);
  }

  /** Changes of transfers that match, after an event, for as long as one likes. */
  public TransferWatch watch(TransferFilter filter, TransferWatch.After after) {
    return new TransferWatch(this, filter, after);
  }

  /** How the engine is, at once and whenever it has changed, also after restarts. */
  public EngineWatch watchEngine() {
    return new EngineWatch(this, null);
  }

  /** As {@link #watchEngine()}, told at most once in {@code minInterval}. */
  public EngineWatch watchEngine(Duration minInterval) {
    return new EngineWatch(this, minInterval);
  }

  /** Renews these leases in time, each with the TTL that it was granted with. */
  public LeaseKeeper keepAlive(List<LeaseRef> leases) {
    return keepAlive(leases, null);
  }

  /** As {@link #keepAlive(List)}, each for {@code ttl} from every renewal on. */
  public LeaseKeeper keepAlive(List<LeaseRef> leases, Duration ttl) {
    LeaseKeeper keeper = new LeaseKeeper(this, ttl);
    leases.forEach(keeper::keep);
    keepers.add(keeper);
    return keeper.start();
  }

  /** Ends calls, watches and renewals. Transfers and leases live on at the server. */
  @Override
  public void close() {
    connection.shutdownNow();
    // After that: a keeper that is made meanwhile sees for itself that there is no connection.
    keepers.forEach(LeaseKeeper::close);
    try {
      connection.awaitTermination(5, TimeUnit.SECONDS);
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
    }
  }

  void forget(LeaseKeeper keeper) {
    keepers.remove(keeper);
  }

  boolean isClosed() {
    return connection.isShutdown();
  }
}
