"""The peers of a mover: links to connected ranks, and ends of their processes. Only the mover's thread uses them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import ProcessEnded
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import (
    CmaEndpoint,
    CollectiveEndpoint,
    CudaVmmEndpoint,
    LoopbackEndpoint,
    NixlEndpoint,
    RankEndpoint,
    ShmEndpoint,
    WindowEndpoint,
)
from kvgrpc.core.values.strips import Repack, Strip
from kvgrpc.datapath.base import (
    Buffer,
    DataPath,
    DataPathFailed,
    PeerProcess,
    Posting,
    PromptRemote,
    Remote,
    SentRemote,
    SlicingRemote,
    StagingRemote,
    StripsRemote,
    WritableRemote,
    WrittenByPeers,
)
from kvgrpc.datapath.copy.checksums import ChecksumJob, ChecksummedSlices, ChecksummingRemote, ReadChecksums, Work
from kvgrpc.datapath.guarded_calls import text
from kvgrpc.datapath.host.memory import memory_bytes
from kvgrpc.datapath.path_attempts import ConnectAttempt, Name, PathAttempts
from kvgrpc.datapath.reports import Disconnected, Report

_log = logging.getLogger(__name__)
END_S = 0.05
"""Interval between looks at processes whose end is awaited, in seconds."""


class PeerLink:
    """A connected rank of a peer."""

    def __init__(self, name: Name, path: DataPath, remote: Remote, endpoint: RankEndpoint) -> None:
        self.name = name
        self.path = path
        self.peer_bytes = _offered_bytes(endpoint, path.name)
        """Length of the peer's memory, in bytes."""
        self.flights = 0
        self.closing = False
        self.lost = False
        """True if a posting was lost: the library may still use what `close` would free."""
        self.unproved = False
        """True if a write ended whose bytes may still land in the peer's memory."""
        self._remote = remote
        # The remote's abilities are looked up once: isinstance of a protocol costs as much as a small copy.
        self._prompt = remote if isinstance(remote, PromptRemote) else None
        self._writable = remote if isinstance(remote, WritableRemote) else None
        self._sent = remote if isinstance(remote, SentRemote) else None
        self._staging = remote if isinstance(remote, StagingRemote) else None
        self._strips = remote if isinstance(remote, StripsRemote) else None
        self._slicing = remote if isinstance(remote, SlicingRemote) else None
        self._checksumming = remote if isinstance(remote, ChecksummingRemote) else None
        self._process = remote.process

    @property
    def writable(self) -> bool:
        """True if ranks write each other's memory by this path. The peer's end then proves something here, too."""
        return self._writable is not None

    def check_offers(self, operation: Operation) -> None:
        """Raises DataPathFailed if the data path does not move bytes that way."""
        if operation is Operation.WRITE and not self.writable:
            raise DataPathFailed(
                f"by {self.path.name} no rank writes another's memory: the destination reads, or both use nixl"
            )

    def ends_at_once(self, runs: Runs) -> bool:
        """Returns True if a read of these runs is over once it has been started, in any thread."""
        return self._prompt is not None and self._prompt.ends_at_once(runs)

    def start(self, posting_id: str, runs: Runs, operation: Operation, wake: Callable[[], None]) -> Posting:
        """Starts a read or a write. Raises as `Remote.read` does."""
        if self._sent is not None:
            return self._sent.read_sent(posting_id, runs, wake)
        if operation is Operation.READ:
            return self._remote.read(runs, wake)
        assert self._writable is not None  # see check_offers
        return self._writable.write(runs, wake)

    def check_stages(self) -> None:
        """Raises DataPathFailed if the data path reads into no staging buffer."""
        if self._staging is None and self._sent is None:
            raise DataPathFailed(f"{self.path.name} reads into no staging buffer: plan this posting without a re-pack")

    def read_into(self, posting_id: str, buffer: Buffer, runs: Runs, wake: Callable[[], None]) -> Posting:
        """Starts a read into a buffer. Raises as `StagingRemote.read_into` does."""
        if self._sent is not None:
            return self._sent.read_sent(posting_id, runs, wake, buffer)
        assert self._staging is not None  # see check_stages
        return self._staging.read_into(buffer, runs, wake)

    def strips_of(self, repack: Repack, runs: Runs) -> Sequence[Strip] | None:
        """Returns the strips to copy straight out of the peer's memory, or None if a staging buffer is needed."""
        return None if self._strips is None else repack.at_source(runs)

    def read_strips(self, strips: Sequence[Strip], wake: Callable[[], None]) -> Posting:
        """Starts to copy the strips that `strips_of` returned."""
        assert self._strips is not None
        return self._strips.read_strips(strips, wake)

    def read_slices(self, posting_id: str, slices: ChecksummedSlices, wake: Callable[[], None]) -> Posting:
        """Starts a read slice by slice if the data path can, else as one."""
        if self._slicing is not None:
            return self._slicing.read_slices(slices.runs, slices.ends, slices.arrived, wake)
        return self.start(posting_id, slices.runs, Operation.READ, wake)

    def together(self, arrival: ReadChecksums, runs: Runs) -> tuple[ChecksumJob, list[Work]] | None:
        """Returns the work that reads and checksums these runs, or None if checksums are computed after the read."""
        return None if self._checksumming is None else arrival.together(runs, self._checksumming.source)

    def read_and_checksum(self, job: ChecksumJob, works: list[Work], wake: Callable[[], None]) -> Posting:
        """Starts the work that `together` returned."""
        assert self._checksumming is not None
        return self._checksumming.read_and_checksum(job, works, wake)

    def disconnected(self, error: str) -> Disconnected:
        return Disconnected(self.name[0], error, self.name[1])

    def take_process(self) -> PeerProcess | None:
        """Returns the peer's process to a caller that awaits its end and then closes it. Only the first call does."""
        process, self._process = self._process, None
        return process

    def close(self) -> str:
        """Closes the transport. Returns why that is not proved, or an empty text."""
        if (process := self.take_process()) is not None:
            process.close()
        if self.lost:
            return "a posting ended without proof that no access follows"
        try:
            self._remote.close()
        except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
            _log.exception("closing the %s transport to rank %d of %s failed", self.path.name, *self.name[::-1])
            return text(error)
        return "bytes of a write may still land in the peer's memory" if self.unproved else ""


@dataclass(frozen=True)
class _Awaited:
    """A process whose end is awaited."""

    process: PeerProcess
    drained: bool
    """True if none of its writes lands after its end."""


class PeerLinks:
    """Connected ranks of peers, and those that are being connected.

    `later` runs something in the mover's thread.
    """

    def __init__(
        self,
        rank: int,
        paths: Mapping[str, DataPath],
        later: Callable[[Callable[[], None]], None],
        report: Callable[[Report], None],
    ) -> None:
        self._rank = rank
        self._paths = paths
        self._report = report
        self._links: dict[Name, PeerLink] = {}
        self._attempts = PathAttempts(rank, paths, later, report, self._connected)
        self._awaited: dict[Name, _Awaited] = {}
        self._look_at = 0.0

    def get(self, peer: str, peer_rank: int) -> PeerLink | None:
        return self._links.get((peer, peer_rank))

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(self._links.values())

    def connect(self, attempt: ConnectAttempt) -> None:
        """Begins to connect a rank; PeerMapped answers."""
        if attempt.name in self._links or attempt.name in self._attempts:
            self._attempts.refuse(attempt, "that rank of the peer is connected, or about to be: disconnect it first")
        else:
            self._attempts.begin(attempt)

    def _connected(self, attempt: ConnectAttempt, path: DataPath, remote: Remote) -> None:
        self._links[attempt.name] = PeerLink(attempt.name, path, remote, attempt.endpoint)

    def disconnect(self, peer: str, watch: bool, gone: bool, peer_rank: int | None) -> None:
        """Closes links; Disconnected answers, at once or when the last posting has ended (see `ended`). Without
        `watch`, ends of their processes are not awaited any more. With `gone`, the peer's offers are withdrawn.
        """

        def meant(names: Iterable[Name]) -> list[Name]:
            return [name for name in names if name[0] == peer and peer_rank in (None, name[1])]

        if gone:
            for path in self._paths.values():
                path.withdraw(peer)
        for name in [] if watch else meant(self._awaited):
            self._let_go(name)
        for name in meant(self._attempts):
            self._attempts.cancel(name, "disconnected before it was connected")
        closing = [self._links.pop(name) for name in meant(self._links)]
        if not closing:
            self._report(Disconnected(peer))
        for link in closing:
            link.closing = True
            self._close_if_idle(link)

    def await_end(self, peer: str) -> None:
        """Begins to await the ends of the processes of the peer's connected ranks. ProcessEnded reports each. An end
        that cannot be seen is never reported.
        """
        for link in self:
            if link.name[0] == peer and (process := link.take_process()) is not None:
                self._let_go(link.name)
                path = link.path
                drained = isinstance(path, WrittenByPeers) and path.ends_with_process
                self._awaited[link.name] = _Awaited(process, drained)

    @property
    def awaits_end(self) -> bool:
        return bool(self._awaited)

    def look_for_ends(self, now: float) -> None:
        """Reports processes that are gone, looking once per END_S, however often it is called."""
        if now < self._look_at:
            return
        self._look_at = now + END_S
        for name, awaited in list(self._awaited.items()):
            if awaited.process.ended:
                self._let_go(name)
                self._report(ProcessEnded(self._rank, name[0], awaited.drained, name[1]))

    def let_go(self) -> None:
        """Stops awaiting all ends."""
        for name in list(self._awaited):
            self._let_go(name)

    def _let_go(self, name: Name) -> None:
        awaited = self._awaited.pop(name, None)
        if awaited is not None:
            awaited.process.close()

    def ended(self, link: PeerLink) -> None:
        link.flights -= 1
        self._close_if_idle(link)

    def drop(self, path: DataPath) -> list[PeerLink]:
        """Forgets the links of a closed path. The caller closes and reports them."""
        dropped = [link for link in self if link.path is path]
        for link in dropped:
            del self._links[link.name]
        return dropped

    def begin_close(self) -> None:
        """Cancels all attempts; no peer is connected any more."""
        self._attempts.close("the mover is closing")

    def _close_if_idle(self, link: PeerLink) -> None:
        if link.closing and not link.flights:
            self._report(link.disconnected(link.close()))


def _offered_bytes(endpoint: RankEndpoint, path: str) -> int:
    """Returns the length of the peer's memory by that path. For a foreign path there is no limit here, since the path
    itself checks every run, too.
    """
    part = getattr(endpoint, path, None)
    match part:
        case ShmEndpoint() | CudaVmmEndpoint() | CollectiveEndpoint() | LoopbackEndpoint() | WindowEndpoint():
            return part.nbytes
        case CmaEndpoint() | NixlEndpoint():
            return memory_bytes(part.segments)
    return 1 << 62
