"""Path `cma`: the destination reads the source process's own memory with process_vm_readv.

The path serves memory that an engine allocated itself, of the same user on the same host. The source's process does
nothing except prove its identity, once. Shared pools can be read, too. The process is held from before that proof (see
`process`), so that the proof and every byte are of one process and never of another that got its number. After the last
byte it must still be alive and still have that memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import CmaEndpoint, RankEndpoint, Segment
from kvgrpc.datapath.base import Buffer, DataPathUnavailable
from kvgrpc.datapath.copy.crew import Crew, PiecesPosting, piece_bytes
from kvgrpc.datapath.host import libc
from kvgrpc.datapath.host.addresses import check_runs, groups, to_rows
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory, is_host, memory_bytes
from kvgrpc.datapath.host.process import ADDRESS_MAX, HeldProcess, OwnProcess, digest, prove
from kvgrpc.datapath.host.process_socket import ProcessSocket
from kvgrpc.datapath.questions import Answer, Question

AT_ONCE_BYTES = 1 << 20
"""Maximum number of bytes of a read that the calling thread makes itself, about 0.2 ms of copying."""
_SEGMENTS_MAX = 1 << 16


class CmaPath:
    """Offers this rank's memory to readers on this host, and reads that of peers.

    Readers ask this process at `socket`, which all paths of a rank share.
    """

    name = "cma"
    needs_polling = False
    peers_need_turns = False

    def __init__(
        self,
        memory: SharedMemory | PrivateMemory,
        *,
        copy_threads: int = 2,
        socket: ProcessSocket | None = None,
    ) -> None:
        self._memory = memory
        self._crew = Crew("kvgrpc-cma-copy", copy_threads)
        self._socket = socket or ProcessSocket()
        self._process = OwnProcess(memory, self._socket)
        self._offered = digest(memory.segments)

    def offer(self, endpoint: RankEndpoint, peer: str = "") -> RankEndpoint:
        if not is_host(self._memory.segments):
            raise DataPathUnavailable("this rank's memory is on a device")
        process = self._process.offer(peer, self.name, self._offered)
        return replace(endpoint, cma=CmaEndpoint(process, self._memory.segments))

    def withdraw(self, peer: str) -> None:
        self._socket.revoke(peer)

    def question(self, endpoint: RankEndpoint) -> Question:
        part = self._part(endpoint)
        return self._socket.question(part.process.socket_path, part.process.token)

    def connect(self, endpoint: RankEndpoint, answer: Answer | str) -> "CmaRemote":
        part = self._part(endpoint)
        process = prove(answer, digest(part.segments))
        return CmaRemote(process, part.segments, self._memory.segments, self._crew)

    def _part(self, endpoint: RankEndpoint) -> CmaEndpoint:
        part = endpoint.cma
        if part is None:
            raise DataPathUnavailable("the peer offers no reading of its memory")
        if not is_host([*self._memory.segments, *part.segments]):
            raise DataPathUnavailable("memory of one side is on a device")
        _check_segments(part.segments)
        return part

    def progress(self) -> None:
        """Does nothing: the kernel copies in the calling threads."""

    def close(self) -> None:
        """Ends the copy threads, after the piece that each is at, and the socket."""
        self._crew.close()
        self._socket.close()


class CmaRemote:
    """A peer's process whose memory can be read."""

    def __init__(
        self,
        process: HeldProcess,
        source: tuple[Segment, ...],
        destination: tuple[Segment, ...],
        crew: Crew,
    ) -> None:
        self._process = process
        self.process = process.end.another()
        self._source = source
        self._source_bytes = memory_bytes(source)
        self._destination = destination
        self._crew = crew

    @property
    def why(self) -> str:
        return (
            f"same host and user: {self._source_bytes} bytes of process {self._process.pid} are"
            f" read by {self._crew.size} threads (process_vm_readv, {libc.IOV_MAX} runs a call)"
        )

    def read(self, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        return self._read(runs, self._destination, wake)

    def read_into(self, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> PiecesPosting:
        return self._read(runs, (buffer.segment,), wake)

    def _read(self, runs: Runs, destination: Sequence[Segment], wake: Callable[[], None]) -> PiecesPosting:
        check_runs(runs, self._source_bytes, memory_bytes(destination))
        little = self.ends_at_once(runs)
        piece = AT_ONCE_BYTES if little else piece_bytes(runs.total_bytes, self._crew.size)
        rows = to_rows(runs, self._source, destination, piece)
        ranges = groups(rows[:, 2], piece, max(len(rows), 1) if little else libc.IOV_MAX)

        def copy_piece(i: int) -> None:
            first, end = ranges[i]
            self._process.read(rows[first:end])

        posting = PiecesPosting(len(ranges), copy_piece, wake, verify=self._process.check)
        self._crew.start(posting)
        return posting

    def ends_at_once(self, runs: Runs) -> bool:
        """Returns True for runs that `read` makes one piece of: `Crew.start` copies it."""
        return len(runs) <= libc.IOV_MAX and runs.total_bytes <= AT_ONCE_BYTES

    def close(self) -> None:
        """Lets go of the process. Idempotent."""
        self._process.close()


def _check_segments(segments: tuple[Segment, ...]) -> None:
    """Raises DataPathUnavailable for numbers that the calls above cannot take."""
    spans = [(segment.address, segment.nbytes) for segment in segments]
    sane = all(0 < address < ADDRESS_MAX and 0 < size < ADDRESS_MAX for address, size in spans)
    total = sum(size for _, size in spans)
    if not (sane and total < ADDRESS_MAX and 0 < len(spans) <= _SEGMENTS_MAX):
        raise DataPathUnavailable("the peer's list of its memory makes no sense")
