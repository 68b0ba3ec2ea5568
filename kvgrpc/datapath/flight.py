"""A posting in flight. Used by the mover's thread only."""

import logging
import time
from collections.abc import Callable

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.events import PostingEnded
from kvgrpc.core.values.descriptors import Runs
from kvgrpc.datapath.base import Posting, PostingState
from kvgrpc.datapath.copy.checksums import Arrival
from kvgrpc.datapath.host.addresses import check_runs, slices
from kvgrpc.datapath.links import Link, text
from kvgrpc.datapath.throttle import Pace
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)


class Flight:
    """One posting: moved as a whole, or in slices at the pace of a cap.

    Raises DataPathFailed when the link does not move bytes that way, or a run lies outside either
    memory: all runs are checked before the first slice moves.
    """

    def __init__(self, post: Post, arrival: Arrival | None, link: Link, own_bytes: int, pace: Pace | None) -> None:
        runs, operation = post.runs, post.operation
        link.check_offers(operation)
        reads = operation is Operation.READ
        check_runs(runs, *((link.peer_bytes, own_bytes) if reads else (own_bytes, link.peer_bytes)))
        self.operation = operation
        self.posting = post.posting_id
        self.link = link
        self.wake: Callable[[], None] = lambda: None
        self.start_at: float | None = None
        """When the next slice may start; None while there is none, or one is under way."""
        self.news_at: float | None = None
        """When the slice under way was started; None while there is none."""
        self._pace = pace
        self._together = None if arrival is None or pace is not None else link.together(arrival, runs)
        self._summed = None if arrival is None or self._together is not None else arrival.slices(runs)
        if self._summed is not None:
            runs = self._summed.runs
        self._left = iter([runs]) if pace is None else slices(runs, pace.slice_bytes)
        self._next = next(self._left, None)
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
                return self._done()
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
            return self._done()
        return self._failed(error, quiesced or self._current is None)

    def _start(self, runs: Runs, now: float) -> PostingEnded | None:
        self._began = self._began or now
        self.start_at = None
        self._next = None
        try:
            if self._together is not None:
                self._current = self.link.read_and_checksum(*self._together, self.wake)
            elif self._summed is not None and self._pace is None:
                self._current = self.link.read_slices(self._summed, self.wake)
            else:
                self._current = self.link.start(runs, self.operation, self.wake)
        except KVGrpcError as error:
            return self._failed(error.message)
        except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
            # Not the error that says "nothing was started": what is under way is not known.
            _log.exception("%s failed to start posting %s", self.link.path.name, self.posting)
            return self._failed(text(error), quiesced=False)
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
            return self._failed(text(bug), quiesced=False)
        if state is PostingState.PENDING:
            return None
        self.news_at = None
        if state is PostingState.UNPROVED:
            self.link.unproved = True
            return self._ended(False, error, quiesced=False, own_at_rest=True)
        if state is PostingState.FAILED:
            return self._failed(error)
        self._current = None
        self._nbytes += self._current_bytes
        self._next = next(self._left, None)
        return None

    def _failed(self, error: str, quiesced: bool = True) -> PostingEnded:
        self.link.lost |= not quiesced
        return self._ended(False, error, quiesced, own_at_rest=quiesced)

    def _done(self) -> PostingEnded:
        if self._summed is not None:
            self._summed.all_there()
        return self._ended(True)

    def _ended(self, done: bool, error: str = "", quiesced: bool = True, own_at_rest: bool = True) -> PostingEnded:
        return PostingEnded(self.posting, done, self._nbytes, self._wire_s(), error, quiesced, own_at_rest)

    def _wire_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began
