"""Path `shm`: the destination maps the source's pool read-only and copies runs out of it.

The path serves pools in `SharedMemory` on one host; the destination may be any memory that the processor can address.
To connect, a rank fetches a descriptor with a token, which is valid once under each rank number. A descriptor that
could kill a reader is refused. A nonce, read through the new mapping, proves that the mapping is the pool that the peer
offered. Nothing else has to prove that both ranks see one memory: a descriptor passes through a socket of one kernel
only, also between namespaces, and means the same file at both ends.

The mapping outlives the peer: when its process is gone, reads still find the bytes that it left and end DONE. The
settle after the last byte decides if they were still valid, not this path.
"""

import contextlib
import fcntl
import hmac
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import RankEndpoint, Segment, ShmEndpoint
from kvgrpc.core.values.strips import Strip
from kvgrpc.datapath.base import Buffer, DataPathFailed, DataPathUnavailable, Memory
from kvgrpc.datapath.copy import copy_methods
from kvgrpc.datapath.copy.checksums import ChecksumJob, Work
from kvgrpc.datapath.copy.copy_methods import CopyMethod
from kvgrpc.datapath.copy.crew import PIECE_BYTES_MIN, Crew, PiecesPosting, piece_bytes
from kvgrpc.datapath.copy.strips import works_of
from kvgrpc.datapath.host.addresses import by_source, check_runs, groups, to_rows
from kvgrpc.datapath.host.memory import NONCE_BYTES, SharedMemory, check_sealed, is_host, memory_bytes
from kvgrpc.datapath.host.process_socket import ProcessSocket, SocketReply
from kvgrpc.datapath.questions import Answer, ProcessEnd, Question

_ROWS_MAX = 1 << 16  # rows of one call
_FEW_RUNS = 1 << 10  # runs whose rows are made in less than a tenth of a millisecond


class ShmPath:
    """Offers this rank's pool if it is a `SharedMemory`, and reads those of peers.

    `copy_threads` threads copy. `copy_method` None takes the fastest that works here. Peers ask for the descriptor at
    `socket`, which all paths of a rank share.
    """

    name = "shm"
    needs_polling = False
    peers_need_turns = False

    def __init__(
        self,
        memory: Memory,
        *,
        copy_threads: int = 2,
        copy_method: CopyMethod | None = None,
        socket: ProcessSocket | None = None,
    ) -> None:
        self._memory = memory
        self._method = copy_method
        self._crew = Crew("kvgrpc-shm-copy", copy_threads)
        self._socket = socket or ProcessSocket()

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        memory = self._memory
        if not isinstance(memory, SharedMemory):
            raise DataPathUnavailable("this rank's memory is not in a pool that can be shared")
        path, token = self._socket.mint(peer, self.name, lambda *_: SocketReply(fds=(memory.reopen_read_only(),)))
        part = ShmEndpoint(path, token, memory.nbytes, memory.nonce, memory.nonce_offset)
        return replace(endpoint, shm=part)

    def withdraw(self, peer: str) -> None:
        self._socket.revoke(peer)

    def question(self, endpoint: RankEndpoint) -> Question:
        part = self._part(endpoint)
        return self._socket.question(part.socket_path, part.token)

    def connect(self, endpoint: RankEndpoint, answer: Answer | str) -> "ShmRemote":
        part = self._part(endpoint)
        if isinstance(answer, str):
            raise DataPathUnavailable(answer)
        fds = answer.take_fds()
        if not fds:
            raise DataPathUnavailable("the peer answered with something else than a descriptor")
        (fd,) = fds
        try:
            mapping = _map_read_only(fd, part)
        finally:
            os.close(fd)
        return ShmRemote(mapping, answer.take_end(), part.nbytes, self._memory.segments, self._crew, self._method)

    def _part(self, endpoint: RankEndpoint) -> ShmEndpoint:
        part = endpoint.shm
        if part is None:
            raise DataPathUnavailable("the peer offers no shared pool")
        if not is_host(self._memory.segments):
            raise DataPathUnavailable("this rank's memory is on a device")
        if len(part.nonce) != NONCE_BYTES or not 0 < part.nbytes <= part.nonce_offset:
            raise DataPathUnavailable("the peer's description of its pool contradicts itself")
        return part

    def progress(self) -> None:
        """Does nothing: the copy threads need no turn."""

    def close(self) -> None:
        """Ends the copy threads, after the piece that each is at, and the socket."""
        self._crew.close()
        self._socket.close()


class ShmRemote:
    """A peer's pool, mapped read-only."""

    def __init__(
        self,
        mapping: mmap.mmap,
        process: ProcessEnd | None,
        nbytes: int,
        destination: tuple[Segment, ...],
        crew: Crew,
        method: CopyMethod | None,
    ) -> None:
        self._mapping = mapping
        self.process = process
        self.source: tuple[Segment, ...] = (Segment(int(np.frombuffer(mapping, np.uint8).ctypes.data), nbytes),)
        self._nbytes = nbytes
        self._destination = destination
        self._crew = crew
        self._method = method

    @property
    def why(self) -> str:
        method = self._method or copy_methods.best(copy_methods.KERNEL_ROW_BYTES)
        return (
            f"same host: the peer's pool of {self._nbytes} bytes is mapped read-only and copied by"
            f" {self._crew.size} threads ({method.why})"
        )

    def read(self, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        return self._read(runs, self._destination, wake)

    def read_into(self, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        return self._read(runs, (buffer.segment,), wake)

    def _read(self, runs: Runs, destination: Sequence[Segment], wake: Callable[[], None]) -> PiecesPosting:
        check_runs(runs, self._nbytes, memory_bytes(destination))
        total = runs.total_bytes
        piece = piece_bytes(total, self._crew.size)
        rows = to_rows(runs, self.source, destination, piece)
        if total > piece:
            rows = by_source(rows)
        method = self._method or copy_methods.best(total / max(len(rows), 1))
        copy = copy_methods.copier(method)
        if copy is None:
            raise DataPathUnavailable(f"this machine cannot copy by the method {method.value}")
        ranges = groups(rows[:, 2], piece, _ROWS_MAX)

        def copy_piece(i: int) -> None:
            first, end = ranges[i]
            copy(rows[first:end])

        posting = PiecesPosting(len(ranges), copy_piece, wake)
        self._crew.start(posting)
        return posting

    def read_strips(self, strips: Sequence[Strip], wake: Callable[[], None]) -> PiecesPosting:
        (source,) = self.source
        piece = piece_bytes(sum(strip.total_bytes for strip in strips), self._crew.size)
        works = works_of(strips, source, self._destination, piece)
        posting = PiecesPosting(len(works), lambda i: works[i](), wake)
        self._crew.start(posting)
        return posting

    def ends_at_once(self, runs: Runs) -> bool:
        """Returns True for runs that make one piece, with rows as the runs are: `Crew.start` copies it."""
        little = len(runs) <= _FEW_RUNS and runs.total_bytes <= PIECE_BYTES_MIN
        return little and len(self._destination) == 1

    def read_and_checksum(self, job: ChecksumJob, works: Sequence[Work], wake: Callable[[], None]) -> PiecesPosting:
        def copy_piece(i: int) -> None:
            job.run(works[i])
            if job.error:
                raise DataPathFailed(job.error)

        posting = PiecesPosting(len(works), copy_piece, wake)
        self._crew.start(posting)
        return posting

    def close(self) -> None:
        """Unmaps the pool. Idempotent."""
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _map_read_only(fd: int, part: ShmEndpoint) -> mmap.mmap:
    """Maps the descriptor that the peer gave, if it is safe to read and is the offered pool."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            raise ValueError("it is writable")
        check_sealed(fd)
        size = os.fstat(fd).st_size
        if size < part.nonce_offset + NONCE_BYTES:
            raise ValueError(f"it has {size} bytes, fewer than the pool that the peer spoke of")
        mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise DataPathUnavailable(f"the peer's descriptor is not a pool to map: {error}") from error
    nonce = mapping[part.nonce_offset : part.nonce_offset + NONCE_BYTES]
    if not hmac.compare_digest(nonce, part.nonce):
        mapping.close()
        raise DataPathUnavailable("the mapping is of another pool than the peer spoke of")
    return mapping
