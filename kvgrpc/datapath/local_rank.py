"""A rank in the lead's own process: its memory, its data paths, its mover, and their reports."""

import logging
from collections.abc import Callable
from typing import assert_never

from kvgrpc.core import events
from kvgrpc.core.actions import (
    AnswerSend,
    AwaitEnd,
    ComputeChecksums,
    CopyOut,
    Expect,
    MakeOffer,
    MapPeer,
    Operation,
    Post,
    RankAction,
    Rekey,
    Send,
    UnmapPeer,
)
from kvgrpc.core.events import Event
from kvgrpc.datapath.base import DataPath, DataPathUnavailable, LoadsLibrary, SaysWhy
from kvgrpc.datapath.copy.checksums import ChecksumThreads
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.host.own_host import LOOPBACK
from kvgrpc.datapath.host.process_socket import ProcessSocket
from kvgrpc.datapath.mirror.device import Device
from kvgrpc.datapath.mirror.mirror import Mirror
from kvgrpc.datapath.mover import Mover
from kvgrpc.datapath.reports import Disconnected, Report
from kvgrpc.datapath.settings import MoverSettings
from kvgrpc.datapath.shared_folder import SharedFolder

_log = logging.getLogger(__name__)

DataPathStatus = tuple[str, bool, str]
"""Name, True if the path can be used, and why or why not."""

OwnReport = events.ChecksumsComputed | events.CopiedOut
"""Reports of a rank on its own memory, beside those of its mover."""

UNAIDED = frozenset({"shm", "cma", "cuda_vmm", "collective", "window"})
"""Data paths over which peers read without turns of the mover of the rank that is read."""

_KEPT: list[SharedMemory | PrivateMemory] = []
"""Memories that were not at rest when their ranks were closed."""


def make_paths(
    memory: SharedMemory | PrivateMemory,
    names: tuple[str, ...],
    copy_threads: int,
    host: str = LOOPBACK,
    folder: SharedFolder | None = None,
) -> tuple[list[DataPath], list[DataPathStatus]]:
    """Makes the data paths of `names` that work on this machine for this memory, and a status of each. `host` is the
    address by which ranks of peers reach this one, where it listens for them. `folder`: where ranks of this host meet
    whose network namespaces differ.
    """
    paths: list[DataPath] = []
    status: list[DataPathStatus] = []
    socket = ProcessSocket(folder)
    for name in names:
        try:
            path = _make(name, memory, copy_threads, socket, host, folder)
        except DataPathUnavailable as error:
            status.append((name, False, error.message))
            _log.info("the data path %s is left out: %s", name, error.message)
        else:
            paths.append(path)
            status.append((name, True, path.why if isinstance(path, SaysWhy) else _WHY[name]))
    if paths and isinstance(paths[0], LoadsLibrary):
        paths[0].load()
    return paths, status


_WHY = {
    "shm": "shared pools of peers on this host are mapped read-only and copied",
    "cma": "memory of this user's processes on one host is read with process_vm_readv",
    "nixl": "NIXL has registered this memory; UCX chooses the transport",
    "window": "what peers on this host ask for is copied into memory that each of them alone may map",
    "collective": "torch is installed; Gloo sends over TCP",
}


def _make(
    name: str,
    memory: SharedMemory | PrivateMemory,
    copy_threads: int,
    socket: ProcessSocket,
    host: str,
    folder: SharedFolder | None,
) -> DataPath:
    if name == "shm":
        from kvgrpc.datapath.paths.shm import ShmPath

        return ShmPath(memory, copy_threads=copy_threads, socket=socket)
    if name == "cma":
        from kvgrpc.datapath.paths.cma import CmaPath

        return CmaPath(memory, copy_threads=copy_threads, socket=socket)
    if name == "window":
        from kvgrpc.datapath.paths.window import WindowPath

        return WindowPath(memory, folder)
    if name == "cuda_vmm":
        from kvgrpc.datapath.cuda_vmm.path import CudaVmmPath

        return CudaVmmPath(memory, socket=socket)
    if name == "collective":
        from kvgrpc.datapath.collective.path import CollectivePath

        return CollectivePath(memory, host)
    from kvgrpc.datapath.nixl.path import NixlPath

    return NixlPath(memory, socket=socket)


class LocalRank:
    """A Rank whose mover runs here. `feed` takes events from any thread."""

    feed_here: Callable[[Event], None] | None = None
    """Takes events from the thread that commands. With it, a command makes a small copy itself, sooner than it takes to
    wake the mover's thread. None if that thread may not copy.
    """

    retired = False
    """True once the rank's life is over: a later node would take its reports for news of its own ranks."""

    def __init__(  # noqa: PLR0913 - a rank has this many parts
        self,
        rank: int,
        memory: SharedMemory | PrivateMemory,
        paths: list[DataPath],
        feed: Callable[[Event], None],
        bandwidth_limit_bytes_per_s: float | None = None,
        copy_threads: int = 2,
        *,
        device: Device | None = None,
    ) -> None:
        """Makes a rank. `device`: the memory, which must be shared, is the mirror of this open device."""
        self.memory = memory
        self._rank = rank
        self._feed = feed
        self._order = tuple(path.name for path in paths)
        self._makes_progress = any(path.needs_polling for path in paths)
        settings = MoverSettings(bandwidth_limit_bytes_per_s, copy_threads)
        self._mirror = None
        if device is not None:
            assert isinstance(memory, SharedMemory)
            self._mirror = Mirror(rank, memory, device, self._report)
        self._mover = Mover(rank, memory, paths, self._report, settings, self._mirror)
        self._mover.start()
        self._sums = ChecksumThreads(rank, memory, copy_threads, self._report)
        self._postings: dict[str, str] = {}
        """Peers of postings that may still access memory, by posting id."""

    @property
    def accessed_peers(self) -> set[str]:
        """Peers whose memory this rank's postings may still access."""
        return set(self._postings.copy().values())

    def perform(self, action: RankAction) -> None:  # noqa: C901 - one case for each command
        """Begins a command, and returns at once."""
        match action:
            case Post():
                self._post(action)
            case Expect():
                self._expect(action)
            case MakeOffer():
                self._mover.offer(action.key, action.peer)
            case MapPeer():
                allowed = self._order if action.allowed is None else action.allowed
                self._mover.connect(action.peer, action.endpoint, allowed, action.attempt)
            case UnmapPeer():
                self._mover.disconnect(action.peer, watch=action.watch, gone=action.gone, peer_rank=action.peer_rank)
            case AwaitEnd():
                self._mover.await_end(action.peer)
            case Rekey():
                self._mover.rekey()
            case ComputeChecksums():
                self._sums.start(action.name, action.pieces)
            case CopyOut():
                assert self._mirror is not None, "only engines that said so have mirrors"
                self._mirror.copy_out(action.name, action.pieces)
            case Send():
                self._mover.send(action.name, action.peer, action.ask)
            case AnswerSend():
                self._mover.answer_send(action.peer, action.answer)
            case _:
                assert_never(action)

    def _post(self, post: Post) -> None:
        summing = post.checksums
        arrival = None if summing is None else self._sums.arrival(summing.name, summing.pieces)
        self._postings[post.posting_id] = post.peer
        feed = self.feed_here
        ended = self._mover.post(post, arrival, at_once=feed is not None)
        if ended is not None and feed is not None:
            self._hand_on(ended, feed)

    def _expect(self, action: Expect) -> None:
        if not self._makes_progress:
            return  # otherwise every read of a peer would wake the mover twice for nothing
        if action.open:
            self._mover.expect(action.access, Operation.WRITE if action.writes else Operation.READ)
        else:
            self._mover.unexpect(action.access)

    def progress_age_s(self) -> float:
        return self._mover.progress_age_s()

    def close(self, deadline_s: float) -> bool:
        """Ends the mover and its paths. Returns True if the memory is at rest, and then releases it. Else it is kept
        for ever: a library that still uses freed memory would hit another owner's.
        """
        self._sums.close()
        if self._mover.close(deadline_s):
            self.memory.close()
            return True
        if self.memory not in _KEPT:
            _KEPT.append(self.memory)
        _log.error("the memory of rank %d is kept: a data path may still use it", self._rank)
        return False

    def _report(self, report: Report | OwnReport) -> None:
        self._hand_on(report, self._feed)

    def _hand_on(self, report: Report | OwnReport, feed: Callable[[Event], None]) -> None:
        if isinstance(report, events.PostingEnded) and report.quiesced:
            self._postings.pop(report.posting_id, None)
        if not self.retired and not isinstance(report, Disconnected):
            feed(report)
