"""Workers of a session: the ranks whose memory is private, and the worker attached for each rank.

A worker is at the other end of the session socket, or, on another host, of a ConnectRank stream. `WorkerEnd` is their
common interface.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvgrpc.core import events
from kvgrpc.core.actions import ComputeChecksums, CopyOut, MapPeer, Post, RankAction, Send
from kvgrpc.errors import AlreadyExists, OutOfRange, PreconditionFailed, Reason, Unavailable, invalid
from kvgrpc.open_files import received_with_descriptor
from kvgrpc.service.runner import RankPort
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire.frames import encode
from kvgrpc.wire.rank_commands import command_of

_log = logging.getLogger(__name__)

Reports = Sequence[rank_pb2.RankReport]
UNREAD_BYTES_MAX = 256 * 1024 * 1024
"""Maximum number of unread bytes of a connection; a process further behind is declared dead."""
MEMORY_TIMEOUT_S = 5.0
"""Maximum wait for a worker's memory, in seconds."""
SHARED = (
    "shared memory, which stays on its host, and ranks bring none: attach it with private_memory or mirrored, if its "
    "ranks bring memory or are on other hosts"
)
IN_WORKERS = {
    session_pb2.POOL_MEMORY_PRIVATE: "private memory: give each rank its tensors",
    session_pb2.POOL_MEMORY_MIRRORED: "mirrored memory: give each rank a device",
}
"""Memory that an engine has in its workers -> what is told to a rank with another kind. All other memory is shared."""


class WorkerEnd(Protocol):
    """The lead's end of a worker's connection. Only `memory` waits."""

    def attached(self, reply: session_pb2.AttachRankResponse, memory: int) -> None:
        """Says that the worker is attached; `memory`: the descriptor of its shared memory, or -1."""

    def command(self, command: rank_pb2.RankCommand) -> None:
        """Sends a command. Raises OutOfRange (LIMIT_EXCEEDED) for one too long for any worker."""

    def close(self, why: str) -> None:
        """Ends the connection. `why` is told to the worker; empty if it is this lead's life that ends."""

    async def memory(self) -> int:
        """Returns the descriptor of the worker's shared memory. Raises Unavailable if it gives none."""


class SocketEnd:
    """A worker at the session socket."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def attached(self, reply: session_pb2.AttachRankResponse, memory: int) -> None:
        frame = encode(session_pb2.ServerFrame(rank_attached=reply))
        if memory < 0:
            write(self._writer, frame)
        else:
            write_with_descriptor(self._writer, frame, memory)

    def command(self, command: rank_pb2.RankCommand) -> None:
        made = session_pb2.ServerFrame()
        made.commands.commands.add().CopyFrom(command)
        write(self._writer, encode(made))

    def close(self, why: str) -> None:
        write(self._writer, encode(session_pb2.ServerFrame(over=session_pb2.SessionOver(message=why))) if why else b"")
        self._writer.close()

    async def memory(self) -> int:
        here, there = socket.socketpair()
        with here:
            with there:
                frame = session_pb2.ServerFrame(memory_wanted=session_pb2.MemoryWanted())
                write_with_descriptor(self._writer, encode(frame), there.fileno())
            given = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(here, given.set)
            try:
                async with asyncio.timeout(MEMORY_TIMEOUT_S):
                    await given.wait()
            except TimeoutError:
                raise Unavailable(Reason.ENGINE_LOST, "the worker gave no memory in time") from None
            finally:
                loop.remove_reader(here)
            _, descriptors = received_with_descriptor(here, 1)
        if not descriptors:
            raise Unavailable(Reason.ENGINE_LOST, "the worker gave no memory")
        return descriptors[0]


def in_workers(memory: "session_pb2.PoolMemory.ValueType") -> bool:
    """Returns whether an engine with that kind of memory has it in its workers, which move the bytes."""
    return memory in IN_WORKERS


def check_memory(request: session_pb2.AttachRankRequest, memory: "session_pb2.PoolMemory.ValueType") -> None:
    """Raises PreconditionFailed (POOL_KIND_MISMATCH) unless a worker's memory is of the kind that its engine named."""
    mirrored = memory == session_pb2.POOL_MEMORY_MIRRORED
    if (request.private_memory, request.mirrored) != (in_workers(memory), mirrored):
        kind = IN_WORKERS.get(memory, SHARED)
        raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, f"this engine attached with {kind}")


class WorkerRank:
    """A rank whose mover runs in a worker. Commands go out over the worker's connection, or wait for it. `report`
    takes, in the worker's place, failures of commands that are longer than a frame.
    """

    def __init__(self, rank: int, data_paths: Sequence[str], report: Callable[[events.Event], None]) -> None:
        self._rank = rank
        self._data_paths = data_paths
        self._report = report
        self._waiting: list[RankAction] = []
        self._end: WorkerEnd | None = None

    def connected(self, end: WorkerEnd) -> None:
        """Takes the worker's connection and sends the waiting commands."""
        self._end = end
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self.perform(action)

    def perform(self, action: RankAction) -> None:
        """Sends a command, or keeps it until the worker is there."""
        if self._end is None:
            self._waiting.append(action)
            return
        try:
            self._end.command(command_of(action, self._data_paths))
        except OutOfRange as error:
            why = f"the command for its worker does not fit into a frame: {error.message}"
            self._report(self._failure(action, why))

    def _failure(self, action: RankAction, why: str) -> events.Event:
        """Makes the report of a command that was not sent."""
        match action:
            case MapPeer():
                peer, rejected = action.peer, tuple((path, why) for path in self._data_paths)
                return events.PeerMapped(self._rank, peer, "", "", rejected, action.attempt, action.endpoint.rank)
            case Post():
                return events.PostingEnded(action.posting_id, done=False, message=why)
            case ComputeChecksums():
                return events.ChecksumsComputed(self._rank, action.name, b"", why)
            case CopyOut():
                return events.CopiedOut(self._rank, action.name, why)
            case Send():
                return events.SendPosted(self._rank, action.name, message=why)
        raise AssertionError(f"{type(action).__name__} is a command of a few bytes")


class Workers:
    """The workers of one session. `data_paths`: those that the server allows, best first. `memory`: where the pool is,
    and who moves the bytes. `report` takes failures of commands that cannot be sent.
    """

    def __init__(
        self,
        data_paths: Sequence[str],
        report: Callable[[events.Event], None],
        memory: "session_pb2.PoolMemory.ValueType",
    ) -> None:
        self._data_paths = data_paths
        self._report = report
        self._memory = memory
        self._ranks: dict[int, WorkerRank] = {}
        self._attached: dict[int, WorkerEnd] = {}
        self.reports_steps = False
        """True once a worker has reported a step: the scheduler does not see its queue, and cannot speak for it."""

    def make_rank(self, rank: int) -> RankPort:
        """Returns a rank whose worker may still be to come."""
        return self._ranks.setdefault(rank, WorkerRank(rank, self._data_paths, self._report))

    def allowed(self, event: events.Event) -> events.Event:
        """Returns a worker's event, without endpoints of data paths that the server does not allow. Raises
        InvalidRequest for an endpoint of another rank.
        """
        if isinstance(event, events.EndpointOffered):
            if event.endpoint.rank != event.rank:
                other = event.endpoint.rank
                raise invalid("reports.offer.endpoint.rank", f"is {other}, of the worker of rank {event.rank}")
            return replace(event, endpoint=event.endpoint.only(self._data_paths))
        return event

    def check(self, request: session_pb2.AttachRankRequest) -> None:
        """Raises PreconditionFailed for the wrong kind of memory or an unknown rank, AlreadyExists for a taken one."""
        check_memory(request, self._memory)
        if in_workers(self._memory) and request.rank not in self._ranks:
            raise PreconditionFailed(Reason.POOL_KIND_MISMATCH, f"this engine has no rank {request.rank}")
        if request.rank in self._attached:
            raise AlreadyExists(Reason.ENGINE_ATTACHED, f"rank {request.rank} has a worker already")

    def attached(self, rank: int, end: WorkerEnd) -> None:
        """Takes a worker that attached and was told so."""
        self._attached[rank] = end
        if rank in self._ranks:
            self._ranks[rank].connected(end)

    @property
    def ends(self) -> Iterable[WorkerEnd]:
        return self._attached.values()


def write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Sends a frame, unless the connection is closing. Ends a connection whose reader is too far behind."""
    if writer.is_closing() or not frame:
        return
    writer.write(frame)
    if writer.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
        _log.error("a session's connection is not read; its process is declared dead")
        writer.transport.abort()


def write_with_descriptor(writer: asyncio.StreamWriter, frame: bytes, fd: int) -> None:
    """Sends a frame with a descriptor beside its first bytes. Nothing else may be in flight on the connection yet."""
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
        sent = socket.send_fds(sock, [frame], [fd])
    if sent < len(frame):
        write(writer, frame[sent:])
