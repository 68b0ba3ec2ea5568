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
 * The client of one server. It is thread-safe and cheap to keep: one for each server is enough.
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

  /** Returns a client of the server at {@code address} ({@code host:port}). It connects at the first call. */
  public static KvgrpcClient connect(String address) {
    return connect(address, ClientOptions.defaults());
  }

  /** Returns a client as {@link #connect(String)} does, with options. */
  public static KvgrpcClient connect(String address, ClientOptions options) {
    ManagedChannel connection = Grpc.newChannelBuilder(address, options.credentials())
        .defaultServiceConfig(ServiceConfig.MAP)
        .disableServiceConfigLookUp()
        // Keepalive detects a dead connection in 40 s. Pings are sent only during calls.
        .keepAliveTime(30, TimeUnit.SECONDS)
        .keepAliveTimeout(10, TimeUnit.SECONDS)
        .build();
    return new KvgrpcClient(connection, options, ConcurrentHashMap.newKeySet());
  }

  /** Returns the same connection for calls of the trace of this W3C context. Closing either client closes both. */
  public KvgrpcClient withTraceparent(String traceparent) {
    return new KvgrpcClient(connection, options.withTraceparent(() -> traceparent), keepers);
  }

  /** Returns the channel for stubs of other kinds: future, asynchronous. It sets deadlines, keys and metadata. */
  public Channel channel() {
    return channel;
  }

  /** Returns the service for first contact and for the status of an engine. */
  public HandshakeServiceBlockingStub handshake() {
    return HandshakeServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the service of the pool. */
  public PoolServiceBlockingStub pool() {
    return PoolServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the service that hands blocks over and takes them. */
  public HandoffServiceBlockingStub handoff() {
    return HandoffServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the service of transfers. */
  public TransferServiceBlockingStub transfers() {
    return TransferServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the service of leases. */
  public LeaseServiceBlockingStub leases() {
    return LeaseServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the service for the scheduler of the server's engine. */
  public SchedulerServiceBlockingStub scheduler() {
    return SchedulerServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the service of named tensors, for a server whose pool is a staging store. */
  public TensorServiceBlockingStub tensors() {
    return TensorServiceGrpc.newBlockingStub(channel);
  }

  /** Returns the service for operators. */
  public AdminServiceBlockingStub admin() {
    return AdminServiceGrpc.newBlockingStub(channel);
  }

  /** Makes a call with a blocking stub. Throws {@link KvgrpcException}. */
  public static <Q, R> R call(Function<Q, R> method, Q request) {
    try {
      return method.apply(request);
    } catch (StatusRuntimeException failed) {
      throw KvgrpcException.of(failed);
    }
  }

  /** Opens a stream that the caller reads by pulling. It does not reconnect when it breaks; {@link #watch} does. */
  public <Q, R> MessageStream<Q, R> open(MethodDescriptor<Q, R> method) {
    return open(method, new Metadata());
  }

  /** Opens a stream as {@link #open(MethodDescriptor)} does, with metadata. */
  public <Q, R> MessageStream<Q, R> open(MethodDescriptor<Q, R> method, Metadata metadata) {
    return new MessageStream<>(channel, method).start(metadata);
  }

  /** Returns the stream for the steps of the scheduler of the server's engine. It opens with the first step. */
  public Steps steps() {
    return new Steps(withTraceparent(""), options);
  }

  /**
   * Waits until the transfer is over ({@code ENDED}), until its memory is returned as well ({@code RETURNED}), or until
   * the time is over. The reply's {@code condition_met} tells whether the condition was met. The timeout may exceed
   * that of one call. While time is left, the call is repeated when the server cannot be reached or is too busy. A
   * silent server can add 10 s. The wait also ends with the client, and with the current {@link io.grpc.Context}.
   */
  public WaitTransferResponse await(String transferId, WaitCondition until, Duration timeout) {
    return new Waiting(this, transferId, until).run(timeout);
  }

  /** Watches the changes of matching transfers, after an event, until the watch is closed. */
  public TransferWatch watch(TransferFilter filter, TransferWatch.After after) {
    return new TransferWatch(this, filter, after);
  }

  /** Watches the status of the engine: at once and whenever it changes, also after restarts. */
  public EngineWatch watchEngine() {
    return new EngineWatch(this, null);
  }

  /** Watches as {@link #watchEngine()} does, with at most one status in {@code minInterval}. */
  public EngineWatch watchEngine(Duration minInterval) {
    return new EngineWatch(this, minInterval);
  }

  /** Renews these leases in time, each with the TTL that it was granted with. */
  public LeaseKeeper keepAlive(List<LeaseRef> leases) {
    return keepAlive(leases, null);
  }

  /** Renews as {@link #keepAlive(List)} does, with {@code ttl} as the TTL of every renewal. */
  public LeaseKeeper keepAlive(List<LeaseRef> leases, Duration ttl) {
    LeaseKeeper keeper = new LeaseKeeper(this, ttl);
    leases.forEach(keeper::keep);
    keepers.add(keeper);
    return keeper.start();
  }

  /** Ends calls, watches and renewals. Transfers and leases continue at the server. */
  @Override
  public void close() {
    connection.shutdownNow();
    // The keepers are closed after that, because a keeper that starts meanwhile then finds no connection.
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
