"""A posting in flight, and the link to a peer that it runs on. Used by the mover's thread only."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvgrpc.core.descriptors import Runs
from kvgrpc.core.endpoints import (
    CmaEndpoint,
    LoopbackEndpoint,
    NixlEndpoint,
    RankEndpoint,
    ShmEndpoint,
)
from kvgrpc.datapath.addresses import check_runs, slices
from kvgrpc.datapath.base import DataPath, Posting, PostingState, Remote
from kvgrpc.datapath.memory import memory_bytes
from kvgrpc.datapath.reports import PostingEnded
from kvgrpc.datapath.throttle import Pace
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """A connect that is under way: the paths still to try and why the others were not taken."""

    peer: str
    endpoint: RankEndpoint
    allowed: list[str]
    rejected: list[tuple[str, str]] = field(default_factory=list)
    cancelled: bool = False


class Link:
    """A connected peer."""

    def __init__(self, peer: str, path: DataPath, remote: Remote, endpoint: RankEndpoint) -> None:
        self.peer = peer
        self.path = path
        self.source_bytes = _offered_bytes(endpoint, path.name)
        """Length of the peer's memory."""
        self.flights = 0
        self.closing = False
        self.unproved = False
        """A posting on it ended without proof: the library may still use what close would free."""
        self._remote = remote

    def read(self, runs: Runs, wake: Callable[[], None]) -> Posting:
        return self._remote.read(runs, wake)

    def close(self) -> str:
        """Closes the transport; returns why that is not proved, empty when it is."""
        if self.unproved:
            return "a posting ended without proof that no access follows"
        try:
            self._remote.close()
        except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
            _log.exception("closing the %s transport to %s failed", self.path.name, self.peer)
            return _text(error)
        return ""


class Flight:
    """One posting: read as a whole, or in slices at the pace of a cap.

    Raises DataPathFailed when a run lies outside either memory: all runs are checked before the
    first slice moves.
    """

    def __init__(self, posting: str, link: Link, runs: Runs, destination_bytes: int, pace: Pace | None) -> None:
        check_runs(runs, link.source_bytes, destination_bytes)
        self.posting = posting
        self.link = link
        self.wake: Callable[[], None] = lambda: None
        self.start_at: float | None = None
        """When the next slice may start; None while there is none, or one is under way."""
        self.news_at: float | None = None
        """When the slice under way was started; None while there is none."""
        self._pace = pace
        whole: Sequence[Runs] = (runs,)
        self._slices: Iterator[Runs] = iter(whole if pace is None else slices(runs, pace.slice_bytes))
        self._next = next(self._slices, None)
        self._current: Posting | None = None
        self._current_bytes = 0
        self._nbytes = 0
        self._began: float | None = None

    def turn(self, now: float) -> PostingEnded | None:
        """Gets as far as it can without waiting; its end, when it has come. Never raises."""
        while True:
            if self._current is not None:
                ended = self._look()
                if ended is not None or self._current is not None:
                    return ended
            if self._next is None:
                return self._end(PostingState.DONE)
            if self._pace is not None and self.start_at is None:
                self.start_at = self._pace.book(self._next.total_bytes, now)
                self._began = self._began or now
            if self.start_at is not None and now < self.start_at:
                return None
            if (ended := self._start(self._next, now)) is not None:
                return ended

    def abandon(self, error: str, quiesced: bool) -> PostingEnded:
        """Its end when the data path was closed under it; `quiesced`: whether that went well."""
        if self._current is not None and (ended := self._look()) is not None:
            return ended
        if self._current is None and self._next is None:
            return self._end(PostingState.DONE)
        return self._end(PostingState.FAILED, error, quiesced or self._current is None)

    def _start(self, runs: Runs, now: float) -> PostingEnded | None:
        self._began = self._began or now
        self.start_at = None
        self._next = None
        try:
            self._current = self.link.read(runs, self.wake)
        except KVGrpcError as error:
            return self._end(PostingState.FAILED, error.message)
        except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
            # Not the error that says "nothing was started": what is under way, nobody knows.
            _log.exception("%s failed to start posting %s", self.link.path.name, self.posting)
            return self._end(PostingState.FAILED, _text(error), quiesced=False)
        self._current_bytes = runs.total_bytes
        self.news_at = now
        return None

    def _look(self) -> PostingEnded | None:
        """Whether the slice under way has ended; the posting's end, when it failed."""
        assert self._current is not None
        try:
            state, error = self._current.poll(), self._current.error
        except Exception as bug:  # noqa: BLE001 - logged, and the thread goes on
            _log.exception("%s lost posting %s", self.link.path.name, self.posting)
            return self._end(PostingState.FAILED, _text(bug), quiesced=False)
        if state is PostingState.PENDING:
            return None
        self.news_at = None
        if state is PostingState.FAILED:
            return self._end(PostingState.FAILED, error)
        self._current = None
        self._nbytes += self._current_bytes
        self._next = next(self._slices, None)
        return None

    def _end(self, state: PostingState, error: str = "", quiesced: bool = True) -> PostingEnded:
        self.link.unproved |= not quiesced
        wire_s = 0.0 if self._began is None else time.monotonic() - self._began
        return PostingEnded(self.posting, state, self._nbytes, wire_s, error, quiesced)


def connect(path: DataPath, endpoint: RankEndpoint) -> Remote | str:
    """The connected peer, or why it cannot be reached this way. Never raises."""
    try:
        return path.connect(endpoint)
    except KVGrpcError as error:
        return error.message
    except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
        _log.exception("%s broke while connecting", path.name)
        return _text(error)


def offer(path: DataPath, endpoint: RankEndpoint) -> RankEndpoint | str:
    """`endpoint` with this path's part, or why there is none. Never raises."""
    try:
        return path.offer(endpoint)
    except KVGrpcError as error:
        return error.message
    except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
        _log.exception("%s broke while offering this rank's memory", path.name)
        return _text(error)


def _offered_bytes(endpoint: RankEndpoint, path: str) -> int:
    """Length of the peer's memory by that path. None is known for a path of somebody else's: no
    limit then, since the path itself checks every run, too.
    """
    part = getattr(endpoint, path, None)
    match part:
        case ShmEndpoint() | LoopbackEndpoint():
            return part.nbytes
        case CmaEndpoint() | NixlEndpoint():
            return memory_bytes(part.segments)
    return 1 << 62


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
