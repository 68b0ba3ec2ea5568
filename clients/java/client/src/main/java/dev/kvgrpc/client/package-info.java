/**
 * A client of kvgrpc. {@link dev.kvgrpc.client.KvgrpcClient#connect} is where to start; the messages are those of
 * {@code dev.kvgrpc.v1}, whose comments are the contract.
 *
 * <p>Rules:
 *
 * <ul>
 *   <li>Every unary call has a deadline, an idempotency key where its request has the field, and the trace context.
 *       One interceptor sees to it, so that it is true of every stub on {@code channel()}.
 *   <li>gRPC repeats UNAVAILABLE by itself and nothing else. Streams are opened again by their readers, because only
 *       they know where to go on.
 *   <li>Nothing here starts a thread, but a {@link dev.kvgrpc.client.LeaseKeeper}.
 *   <li>Blocking methods of an interrupted thread end as gRPC's blocking stubs do: with CANCELLED, the interrupt kept.
 * </ul>
 */
package dev.kvgrpc.client;
