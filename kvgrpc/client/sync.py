"""The same client for code without an event loop: every method blocks until its coroutine is done.

A method here is made from the coroutine of the same name and has its signature. The coroutines of all synchronous
clients of a process run in one event loop, in a thread of its own. Any number of threads may share one client. It must
not be used inside a coroutine, because it would block that loop. In a process that was forked while a client was open,
everything raises RuntimeError.
"""

import asyncio
import concurrent.futures
import functools
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kvgrpc.client.cleaning import CleanedUp, CleanUp, clean_up
from kvgrpc.client.client import Client, connect
from kvgrpc.client.leases import HeldLease
from kvgrpc.client.moving import Moved, move
from kvgrpc.client.scheduler import Scheduler
from kvgrpc.client.tensors import Tensors
from kvgrpc.client.transfers import WAIT_S
from kvgrpc.client.values import AnyBlocks, Tokens
from kvgrpc.errors import Reason
from kvgrpc.v1.common_pb2 import Grant
from kvgrpc.v1.lease_pb2 import LeaseState

A_co = TypeVar("A_co", covariant=True)
B = TypeVar("B")
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")


LEFT_BEHIND = (
    "gRPC does not work in a process that was forked from one with open clients: fork before the first one is opened, "
    "or start the process anew (multiprocessing's 'spawn' or 'forkserver')"
)


class _LoopThread:
    """The event loop of all synchronous clients. It lives from the start of the first to the end of the last."""

    _lock = threading.Lock()
    _shared: "_LoopThread | None" = None
    _left_behind = False
    """True if this process was forked from one that had such a thread."""

    def __init__(self) -> None:
        self.users = 0
        self._loop: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._end = asyncio.Event()
        self._ending: set[asyncio.Task[Any]] = set()
        # A daemon, so that a client that was not closed does not keep a program from ending.
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="kvgrpc client", daemon=True)
        self._thread.start()

    @classmethod
    def enter(cls) -> "_LoopThread":
        with cls._lock:
            if cls._left_behind:
                raise RuntimeError(LEFT_BEHIND)
            cls._shared = cls._shared or cls()
            cls._shared.users += 1
            return cls._shared

    @classmethod
    def forked(cls) -> None:
        """Resets the state in a forked child, where the threads of this class and of gRPC are gone. gRPC then hangs or
        crashes.
        """
        cls._lock = threading.Lock()
        if cls._shared is not None:
            cls._shared.users, cls._shared, cls._left_behind = 0, None, True

    def leave(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users:
                return
            _LoopThread._shared = None
        self._loop.result().call_soon_threadsafe(self._end.set)
        self._thread.join()

    def end(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        """Runs a coroutine that ends an iterator or a context, like `run`. The garbage collector may end one in the
        loop's own thread, which must not wait for itself: there it returns None at once.
        """
        if threading.current_thread() is not self._thread:
            return self.run(coroutine)
        task = self._loop.result().create_task(coroutine)
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return None

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # no caller is left to be told

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine, which has a deadline of its own. An interrupt of the caller cancels it."""
        if not self.alive:
            coroutine.close()
            raise RuntimeError(LEFT_BEHIND if self._left_behind else "this client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop.result())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def alive(self) -> bool:
        return self.users > 0

    async def _main(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._end.wait()


os.register_at_fork(after_in_child=_LoopThread.forked)


class _Twin(Generic[A_co]):
    """An object whose coroutines run in the loop thread."""

    def __init__(self, target: A_co, thread: _LoopThread) -> None:
        self._target = target
        self._thread = thread
        self._closed = False

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            coroutine.close()
            raise RuntimeError("this client is closed")
        return self._thread.run(coroutine)


def _blocking(method: Callable[Concatenate[B, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_Twin[B], P], T]:
    @functools.wraps(method)
    def call(self: _Twin[B], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._target, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[B, P], AsyncIterator[T]],
) -> Callable[Concatenate[_Twin[B], P], Generator[T, None, None]]:
    @functools.wraps(method)
    def call(self: _Twin[B], /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        events = method(self._target, *args, **kwargs)
        try:
            while True:
                yield self._run(_next(events))
        except StopAsyncIteration:
            return
        finally:
            if self._thread.alive:  # else the stream ended with its loop
                self._thread.end(_close(events))

    return call


def _managing(
    method: Callable[Concatenate[B, P], AbstractAsyncContextManager[T]], twin: Callable[[T, _LoopThread], S]
) -> Callable[Concatenate[_Twin[B], P], AbstractContextManager[S]]:
    @functools.wraps(method)
    @contextmanager
    def call(self: _Twin[B], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[S]:
        manager = method(self._target, *args, **kwargs)
        value = self._run(_enter(manager))
        try:
            yield twin(value, self._thread)
        except BaseException as error:
            if not self._thread.end(_exit(manager, error)):
                raise
        else:
            self._thread.end(_exit(manager, None))

    return call


class SyncHeldLease(_Twin[HeldLease]):
    """A lease that is kept alive."""

    @property
    def lease_id(self) -> str:
        return self._target.lease_id

    @property
    def grant(self) -> Grant | None:
        """Grant for consumers to pull with; None for a lease that was named by its id."""
        return self._target.grant

    @property
    def reason(self) -> Reason | None:
        """Why the lease is over; None while it lives. LEASE_RELEASED can also mean that its consumers are done: see
        `state`.
        """
        return self._target.reason

    @property
    def state(self) -> LeaseState.ValueType:
        """The state that the server named last; DONE means that the consumers have their KV. EXPIRED also if the lease
        could not be renewed in time, whatever the server may know.
        """
        return self._target.state

    def check(self) -> None:
        """Raises the error that says why the lease is over, if it is."""
        self._target.check()

    wait_over = _blocking(HeldLease.wait_over)


class SyncScheduler(_Twin[Scheduler]):
    """SchedulerService for an engine's scheduler; the methods are those of `Scheduler`."""

    @property
    def incarnation(self) -> int:
        """Life of the engine that the requests and blocks belong to; 0 before the first reply."""
        return self._target.incarnation

    def start_over(self) -> None:
        """Starts over in the engine's new life, which knows no request. Blocks kept for the last life are gone."""
        self._target.start_over()

    abort_request = _blocking(Scheduler.abort_request)
    blocks_allocated = _blocking(Scheduler.blocks_allocated)
    blocks_loaded = _blocking(Scheduler.blocks_loaded)
    blocks_needed = _blocking(Scheduler.blocks_needed)
    match_tokens = _blocking(Scheduler.match_tokens)
    poll = _blocking(Scheduler.poll)
    request_arrived = _blocking(Scheduler.request_arrived)
    request_finished = _blocking(Scheduler.request_finished)
    request_preempted = _blocking(Scheduler.request_preempted)
    step = _blocking(Scheduler.step)
    tokens_computed = _blocking(Scheduler.tokens_computed)


class SyncTensors(_Twin[Tensors]):
    """TensorService; the methods are those of `Tensors`."""

    get = _blocking(Tensors.get)
    list = _blocking(Tensors.list)
    put = _blocking(Tensors.put)
    release = _blocking(Tensors.release)
    status = _blocking(Tensors.status)


class SyncClient(_Twin[Client]):
    """One server, as seen from any number of threads; `connect_sync` makes it. The methods are those of `Client`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends calls, watches and renewals. Transfers and leases stay alive at the server."""
        if not self._closed:
            self._closed = True
            if self._thread.alive:  # not in a child that was forked
                self._thread.run(self._target.close())
                self._thread.leave()

    def scheduler(self) -> SyncScheduler:
        """Returns the policy for the scheduler of this server's engine. An engine has one: only the first caller gets
        the news.
        """
        return SyncScheduler(self._target.scheduler(), self._thread)

    def tensors(self) -> SyncTensors:
        """Returns the named tensors of a server whose pool is a staging store."""
        return SyncTensors(self._target.tensors(), self._thread)

    acknowledge = _blocking(Client.acknowledge)
    allocate = _blocking(Client.allocate)
    allocations = _blocking(Client.allocations)
    audit_records = _blocking(Client.audit_records)
    cancel = _blocking(Client.cancel)
    cancel_drain = _blocking(Client.cancel_drain)
    capabilities = _blocking(Client.capabilities)
    check_compatibility = _blocking(Client.check_compatibility)
    connect_peer = _blocking(Client.connect_peer)
    describe_pools = _blocking(Client.describe_pools)
    finished_blocks = _blocking(Client.finished_blocks)
    forget_engine = _blocking(Client.forget_engine)
    free = _blocking(Client.free)
    get_drain = _blocking(Client.get_drain)
    get_engine = _blocking(Client.get_engine)
    get_lease = _blocking(Client.get_lease)
    get_transfer = _blocking(Client.get_transfer)
    grant_lease = _blocking(Client.grant_lease)
    handshake = _blocking(Client.handshake)
    keep_alive = _managing(Client.keep_alive, SyncHeldLease)
    lease = _managing(Client.lease, SyncHeldLease)
    list_leases = _blocking(Client.list_leases)
    list_transfers = _blocking(Client.list_transfers)
    peers = _blocking(Client.peers)
    pins = _blocking(Client.pins)
    release_quarantine = _blocking(Client.release_quarantine)
    pool_status = _blocking(Client.pool_status)
    pull = _blocking(Client.pull)
    pull_blocks = _blocking(Client.pull_blocks)
    push_part = _blocking(Client.push_part)
    read_blocks = _blocking(Client.read_blocks)
    receive = _blocking(Client.receive)
    register_push = _blocking(Client.register_push)
    release_lease = _blocking(Client.release_lease)
    reclaim = _blocking(Client.reclaim)
    renew_allocation = _blocking(Client.renew_allocation)
    renew_leases = _blocking(Client.renew_leases)
    reserve_blocks = _blocking(Client.reserve_blocks)
    spans = _blocking(Client.spans)
    source_failed = _blocking(Client.source_failed)
    start_drain = _blocking(Client.start_drain)
    status = _blocking(Client.status)
    wait = _blocking(Client.wait)
    wait_transfers = _blocking(Client.wait_transfers)
    watch = _iterating(Client.watch)
    watch_engine = _iterating(Client.watch_engine)


async def _connected(make: Callable[P, Client], *args: P.args, **kwargs: P.kwargs) -> Client:
    return make(*args, **kwargs)


def _connecting(make: Callable[P, Client]) -> Callable[P, SyncClient]:
    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> SyncClient:
        thread = _LoopThread.enter()
        try:
            return SyncClient(thread.run(_connected(make, *args, **kwargs)), thread)
        except BaseException:
            thread.leave()
            raise

    return call


connect_sync = _connecting(connect)
"""Returns a SyncClient, like `connect`: `with connect_sync("127.0.0.1:50051") as client: ...`"""


def clean_up_sync(
    sides: Sequence[CleanUp[SyncClient]], *, message: str = "", timeout_s: float | None = None
) -> list[CleanedUp]:
    """Cleans up like `clean_up`, for synchronous clients."""
    clients = [side.client for side in sides]
    told = [CleanUp(side.client._target, side.transfer, side.free_allocation_ids) for side in sides]  # noqa: SLF001
    if not clients:
        return []
    one = next((client for client in clients if not client._closed), clients[0])  # noqa: SLF001 - all have one loop
    return one._run(clean_up(told, message=message, timeout_s=timeout_s))  # noqa: SLF001


def move_sync(  # noqa: PLR0913 - by name, each with a default
    source: SyncClient, destination: SyncClient, blocks: AnyBlocks, content: Tokens, *,
    into: AnyBlocks | None = None, request_id: str = "", timeout_s: float = WAIT_S,
) -> Moved:  # fmt: skip
    """Moves KV like `move`, for synchronous clients."""
    sides = source._target, destination._target  # noqa: SLF001
    moving = move(*sides, blocks, content, into=into, request_id=request_id, timeout_s=timeout_s)
    return source._run(moving)  # noqa: SLF001


async def _next(events: AsyncIterator[T]) -> T:
    return await anext(events)


async def _close(events: AsyncIterator[object]) -> None:
    if isinstance(events, AsyncGenerator):
        await events.aclose()


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _exit(manager: AbstractAsyncContextManager[object], error: BaseException | None) -> bool | None:
    if error is None:
        return await manager.__aexit__(None, None, None)
    return await manager.__aexit__(type(error), error, error.__traceback__)
