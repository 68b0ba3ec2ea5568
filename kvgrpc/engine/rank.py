"""Rank: a worker's share of the pool.

With shared memory the lead made the pool and moves the bytes; the worker maps it. With private memory the worker
brings tensors of its own, and the mover runs here, in a thread that posts and polls with the interpreter lock
released.
"""

import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core import events
from kvgrpc.datapath.memory import PrivateMemory, SharedMemory
from kvgrpc.engine.connection import Connection
from kvgrpc.engine.ticket import RankTicket
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason, Unavailable
from kvgrpc.local_rank import LocalRank, make_paths
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire import session as wire
from kvgrpc.wire.description import endpoint_from_proto, pool_from_proto

CLOSE_S = 2.0
_WAIT_S = 3600.0
"""The command thread wakes for frames and for the end only."""


class Rank:
    """One rank of an engine, attached to its lead. `with` detaches, which ends the engine's life."""

    def __init__(
        self,
        ticket: RankTicket,
        rank: int = 0,
        tensors: Sequence[Any] = (),
        *,
        data_paths: tuple[str, ...] = ("cma", "nixl"),
        copy_threads: int = 2,
    ) -> None:
        """Attaches. `tensors`: the worker's own memory, in the order of the pool's linear offsets; none: shared.

        Raises Unavailable, PermissionDenied, or PreconditionFailed (POOL_KIND_MISMATCH) for memory of another size.
        """
        self.rank = rank
        self._connection = Connection(ticket.socket_path)
        self._send_lock = threading.Lock()
        self._mover: LocalRank | None = None
        self._thread: threading.Thread | None = None
        self._shared: SharedMemory | None = None
        try:
            self._attach(ticket, tensors, data_paths, copy_threads)
        except BaseException:
            self._connection.close()
            raise

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The rank's shared pool, shape [total_bytes], writable."""
        if self._shared is None:
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, "this rank brought its own memory")
        return self._shared.as_numpy()

    def step_done(self, step: int) -> None:
        """All work of the engine's steps up to `step` is done on this rank."""
        self._report(events.StepDone(self.rank, step))

    def close(self) -> None:
        """Detaches. Idempotent."""
        self._connection.shutdown()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)
        if self._mover is not None:
            self._mover.close(CLOSE_S)
        self._connection.close()
        if self._shared is not None:
            self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(
        self, ticket: RankTicket, tensors: Sequence[Any], data_paths: tuple[str, ...], copy_threads: int
    ) -> None:
        request = session_pb2.AttachRankRequest(ticket=ticket.secret, rank=self.rank, private_memory=bool(tensors))
        answer, descriptor = self._connection.attach(session_pb2.ClientFrame(attach_rank=request))
        self.pool = pool_from_proto(answer.rank_attached.pool, "pool")
        if not tensors:
            self._map(descriptor)
            return
        memory = PrivateMemory.of(*tensors)
        if memory.nbytes != self.pool.total_bytes:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH,
                f"the tensors have {memory.nbytes} bytes; the pool has {self.pool.total_bytes} on each rank",
            )
        paths, _ = make_paths(memory, data_paths, copy_threads)
        self._mover = LocalRank(self.rank, memory, paths, self._report)
        self._thread = threading.Thread(target=self._obey, name=f"kvgrpc-rank-{self.rank}", daemon=True)
        self._thread.start()

    def _map(self, descriptor: int) -> None:
        import os

        if descriptor < 0:
            raise Unavailable(Reason.NO_POOL, "the lead sent no memory")
        try:
            self._shared = SharedMemory.attach(descriptor)
        finally:
            os.close(descriptor)

    def _report(self, event: events.Event) -> None:
        batch = session_pb2.RankReportBatch(reports=[wire.event_to_report(event)])
        try:
            with self._send_lock:
                self._connection.send(session_pb2.ClientFrame(reports=batch))
        except Unavailable:
            self._connection.shutdown()

    def _obey(self) -> None:
        """Performs the lead's commands until the connection ends."""
        while not self._connection.closed:
            try:
                for frame in self._connection.receive(_WAIT_S):
                    for command in frame.commands.commands:
                        self._perform(command)
            except (KVGrpcError, ValueError):
                return

    def _perform(self, command: rank_pb2.RankCommand) -> None:
        mover = self._mover
        assert mover is not None
        match command.WhichOneof("command"):
            case "offer":
                mover.offer(command.offer.key)
            case "connect":
                mover.map_peer(command.connect.peer, endpoint_from_proto(command.connect.endpoint))
            case "disconnect":
                mover.unmap_peer(command.disconnect.peer)
            case "post":
                mover.post(command.post.posting_id, command.post.peer, wire.runs_of(command.post))
            case "expect":
                mover.expect(command.expect.access, command.expect.open)
            case _:
                return
