/**
 * The Java client of kvgrpc. Start at {@link dev.kvgrpc.client.KvgrpcClient#connect}. The messages are those of {@code
 * dev.kvgrpc.v1}, and their comments are the contract.
 *
 * <p>Rules:
 *
 * <ul>
 *   <li>Every unary call has a deadline, the trace context, and an idempotency key where its request has the field. One
 *       interceptor sets them, so that this holds for every stub on {@code channel()}.
 *   <li>gRPC retries UNAVAILABLE and nothing else. The readers of streams open them again, because only they know where
 *       to resume.
 *   <li>Only a {@link dev.kvgrpc.client.LeaseKeeper} starts a thread.
 *   <li>A blocking method of an interrupted thread ends as gRPC's blocking stubs do: with CANCELLED, and the thread
 *       stays interrupted.
 * </ul>
 */
package dev.kvgrpc.client;
