"""Rank: a worker's share of the pool.

With shared memory the lead made the pool and moves the bytes; the worker maps it. With private memory the worker
brings tensors of its own, and the mover runs here, in a thread that posts and polls with the interpreter lock
released.
"""

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core import events
from kvgrpc.datapath.local_rank import LocalRank, make_paths
from kvgrpc.datapath.memory import PrivateMemory, SharedMemory
from kvgrpc.engine.connection import Connection, LeadDied
from kvgrpc.engine.ticket import RankTicket
from kvgrpc.errors import InternalError, PreconditionFailed, Reason, Unavailable
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire import session as wire
from kvgrpc.wire.description import endpoint_from_proto, pool_from_proto
from kvgrpc.wire.frames import encode

CLOSE_S = 2.0
_log = logging.getLogger(__name__)


class Rank:
    """One rank of an engine, attached to its lead. `with` detaches, which ends the engine's life."""

    def __init__(
        self,
        ticket: RankTicket,
        rank: int = 0,
        tensors: Sequence[Any] = (),
        *,
        data_paths: tuple[str, ...] = ("shm", "cma", "nixl"),
        copy_threads: int = 2,
    ) -> None:
        """Attaches. `tensors`: the worker's own memory, in the order of the pool's linear offsets; none: shared.

        Raises PreconditionFailed (POOL_KIND_MISMATCH) for memory of another size or kind than the engine attached
        with, AlreadyExists (ENGINE_ATTACHED) when the rank has a worker, PermissionDenied (NOT_OWNER) for a ticket of
        another engine, Unavailable when no lead answers. None of them ends the engine's life.
        """
        self.rank = rank
        memory = PrivateMemory.of(*tensors) if tensors else None
        if memory is not None and memory.nbytes != ticket.memory_bytes:
            raise PreconditionFailed(
                Reason.POOL_KIND_MISMATCH,
                f"the tensors have {memory.nbytes} bytes; the pool has {ticket.memory_bytes} on each rank",
            )
        self._connection = Connection(ticket.socket_path)
        self._send_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._shared: SharedMemory | None = None
        self._at_rest = True
        try:
            self._attach(ticket, memory, data_paths, copy_threads)
        except BaseException:
            self.close()
            raise

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The rank's shared pool, shape [total_bytes], writable. Views of it stay readable after the end."""
        if self._shared is None:
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, "this rank brought its own memory")
        return self._shared.as_numpy()

    def step_done(self, step: int) -> None:
        """All work of the engine's steps up to `step` is done on this rank. Raises LeadDied when the session is over.

        What a later kernel must not overtake is the caller's to wait for first.
        """
        self._send(events.StepDone(self.rank, step))

    def layers_done(self, step: int, first: int, count: int) -> None:
        """As `step_done`, for some layers only: parts of a push that cover no others move from now on."""
        self._send(events.StepDone(self.rank, step, (first, count)))

    def close(self) -> None:
        """Detaches; memory of one's own is at rest when this returns. Idempotent.

        Raises InternalError (DATA_PATH_FAILED) when a data path may still use that memory, as often as it is called:
        keep the memory as it is, and end the process.
        """
        self._connection.shutdown()
        if self._thread is not None:
            self._thread.join()
        self._connection.close()
        if self._shared is not None:
            self._shared.close()
        if not self._at_rest:
            raise InternalError(
                Reason.DATA_PATH_FAILED,
                f"a data path of rank {self.rank} did not close and may still use its memory: free and reuse nothing "
                "of it, and end this process",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(
        self, ticket: RankTicket, memory: PrivateMemory | None, data_paths: tuple[str, ...], copy_threads: int
    ) -> None:
        request = session_pb2.AttachRankRequest(ticket=ticket.secret, rank=self.rank, private_memory=memory is not None)
        answer, descriptor = self._connection.attach(encode(session_pb2.ClientFrame(attach_rank=request)))
        self.pool = pool_from_proto(answer.rank_attached.pool, "pool")
        if memory is None:
            self._map(descriptor)
            return
        paths, _ = make_paths(memory, data_paths, copy_threads)
        mover = LocalRank(self.rank, memory, paths, self._report, copy_threads=copy_threads)
        self._at_rest = False
        self._thread = threading.Thread(target=self._obey, args=(mover,), name=f"kvgrpc-rank-{self.rank}", daemon=True)
        self._thread.start()

    def _map(self, descriptor: int) -> None:
        if descriptor < 0:
            raise Unavailable(Reason.NO_POOL, "the lead sent no memory")
        try:
            self._shared = SharedMemory.attach(descriptor)
        finally:
            os.close(descriptor)

    def _send(self, event: events.Event) -> None:
        batch = session_pb2.RankReportBatch(reports=[wire.event_to_report(event)])
        frame = encode(session_pb2.ClientFrame(reports=batch))
        with self._send_lock:
            self._connection.send(frame)

    def _report(self, event: events.Event) -> None:
        """What the mover reports, in its thread. When the session is over nobody is left to care."""
        try:
            self._send(event)
        except LeadDied:
            self._connection.shutdown()

    def _obey(self, mover: LocalRank) -> None:
        """Performs the lead's commands until the session ends, and then ends the mover: its postings end first.

        A command that cannot be performed ends the session: the lead would wait for its report for ever.
        """
        try:
            while not self._connection.closed:
                for frame in self._connection.receive(None):
                    for command in frame.commands.commands:
                        _perform(self.rank, mover, command)
        except LeadDied:
            _log.debug("the session of rank %d is over", self.rank)
        except Exception:  # noqa: BLE001 - logged; the session ends
            _log.exception("rank %d could not perform a command of its lead", self.rank)
        finally:
            self._connection.shutdown()
            self._at_rest = mover.close(CLOSE_S)


def _perform(rank: int, mover: LocalRank, command: rank_pb2.RankCommand) -> None:
    match command.WhichOneof("command"):
        case "offer":
            mover.offer(command.offer.key)
        case "connect":
            wire.check_peer_rank(rank, command.connect)
            mover.map_peer(
                command.connect.peer, endpoint_from_proto(command.connect.endpoint), tuple(command.connect.allowed)
            )
        case "disconnect":
            wire.check_peer_rank(rank, command.disconnect)
            mover.unmap_peer(command.disconnect.peer)
        case "post":
            wire.check_peer_rank(rank, command.post)
            post = command.post
            mover.post(post.posting_id, post.peer, wire.runs_of(post), wire.operation_of(post))
        case "expect":
            mover.expect(command.expect.access, command.expect.open)
        case "await_end":
            mover.await_end(command.await_end.peer)
        case "rekey":
            mover.rekey()
        case "sum":
            mover.sum(command.sum.name, wire.pieces_of(command.sum))
        case _:
            return  # of a newer lead, which knows from the attach what this worker can
