"""A posting in flight. Only the mover's thread uses it."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.events import PostingEnded
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.strips import Repack, Strip
from kvgrpc.datapath.bandwidth_cap import BandwidthCap
from kvgrpc.datapath.base import Buffer, DataPathFailed, Posting, PostingState
from kvgrpc.datapath.copy.checksums import ReadChecksums
from kvgrpc.datapath.copy.strips import slices_of
from kvgrpc.datapath.guarded_calls import text
from kvgrpc.datapath.host.addresses import check_runs, slices
from kvgrpc.datapath.links import PeerLink
from kvgrpc.datapath.mirror.mirror import OnwardCopy
from kvgrpc.datapath.staging_arena import RoomClaim, StagingArena
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)


class _FlightSlice(NamedTuple):
    """A part of a posting that is moved at once."""

    nbytes: int
    start: Callable[[], Posting]


def flight_with_repack(
    post: Post, link: PeerLink, staging: StagingArena, cap: BandwidthCap | None, onward: OnwardCopy | None = None
) -> "Flight":
    """Makes the flight of a posting with a re-pack. Raises DataPathFailed as Flight does, and for invalid strips."""
    repack = staging.check(post)
    strips = link.strips_of(repack, post.runs)
    if strips is not None:
        return StripsFlight(post, link, repack, strips, cap, onward)
    return StagedFlight(post, link, repack, staging, cap, onward)


class Flight:
    """One posting, moved as a whole or in slices at the pace of a cap, and then copied on from a mirror (`onward`).

    `own_bytes` is the length of the memory that it reads into, or writes from. Raises DataPathFailed if the link does
    not move bytes that way, or a run lies outside either side's memory. All runs are checked before the first moves.
    """

    def __init__(
        self, post: Post, arrival: ReadChecksums | None, link: PeerLink, own_bytes: int, cap: BandwidthCap | None,
        onward: OnwardCopy | None = None,
    ) -> None:  # fmt: skip
        runs, operation = post.runs, post.operation
        link.check_offers(operation)
        reads = operation is Operation.READ
        check_runs(runs, *((link.peer_bytes, own_bytes) if reads else (own_bytes, link.peer_bytes)))
        self.operation = operation
        self.posting = post.posting_id
        self.link = link
        self.wake: Callable[[], None] = lambda: None
        self.start_at: float | None = None
        """Time at which the next slice may start; None if there is no next slice, or one is in flight."""
        self.news_at: float | None = None
        """Time at which the slice in flight was started; None if there is none."""
        self._cap = cap
        self._onward = onward
        self._together = None if arrival is None or cap is not None else link.together(arrival, runs)
        self._summed = None if arrival is None or self._together is not None else arrival.slices(runs)
        if self._summed is not None:
            runs = self._summed.runs
        self._left = self._cut(runs, cap)
        self._next = next(self._left, None)
        self._current: Posting | None = None
        self._current_bytes = 0
        self._nbytes = 0
        self._began: float | None = None
        self._post_s = 0.0

    def turn(self, now: float) -> PostingEnded | None:
        """Advances as far as possible without waiting. Returns the posting's end once it has come. Never raises."""
        try:
            if self._onward is not None and not self._onward.may_come(self.wake):
                return None
        except DataPathFailed as error:
            return self._failed(error.message)
        return self._go_on(now)

    def _go_on(self, now: float) -> PostingEnded | None:
        while True:
            if self._current is not None:
                ended = self._look()
                if ended is not None or self._current is not None:
                    return ended
            if self._next is None:
                if (ended := self._all_moved(now)) is not None:
                    return ended
                continue
            if self._cap is not None and self.start_at is None:
                self.start_at = self._cap.book(self._next.nbytes, now)
                self._began = self._began or now
            if self.start_at is not None and now < self.start_at:
                return None
            some, self._next, self.start_at = self._next, None, None
            if (ended := self._start(some.start, some.nbytes, now)) is not None:
                return ended

    def abandon(self, error: str, quiesced: bool) -> PostingEnded:
        """Returns the posting's end after its data path was closed. `quiesced` says if the close succeeded."""
        if self._current is not None and (ended := self._look()) is not None:
            return ended
        if self._is_over():
            return self._done()
        return self._failed(error, (quiesced and not self.lands) or self._current is None)

    @property
    def lands(self) -> bool:
        """True if the bytes have come and only a mirror's copies are in flight, for which no data path can speak."""
        return self._onward is not None and self._onward.begun

    def release(self, at_rest: bool) -> None:
        """Releases what the posting holds, after its end. If not `at_rest`, it may still be accessed; then `release` is
        called again when it is proved to be at rest.
        """

    @property
    def repacks(self) -> bool:
        """True if bytes are being copied from a staging buffer."""
        return False

    @property
    def _by(self) -> str:
        """Name of what moves the bytes at the moment."""
        return "the device" if self.lands else self.link.path.name

    def _is_over(self) -> bool:
        return self._current is None and self._next is None and (self._onward is None or self._onward.begun)

    def _all_moved(self, now: float) -> PostingEnded | None:
        """Goes on after the last slice. Returns the posting's end, or None if more was begun."""
        if self._onward is None or self._onward.begun:
            return self._done()
        onward = self._onward
        return self._start(lambda: onward.start(self.wake), 0, now)

    def _cut(self, runs: Runs, cap: BandwidthCap | None) -> Iterator[_FlightSlice]:
        """Yields the runs as one slice, or as slices of a pace."""
        for some in [runs] if cap is None else slices(runs, cap.slice_bytes):
            yield _FlightSlice(some.total_bytes, partial(self._submit, some))

    def _submit(self, runs: Runs) -> Posting:
        if self._together is not None:
            return self.link.read_and_checksum(*self._together, self.wake)
        if self._summed is not None and self._cap is None:
            return self.link.read_slices(self.posting, self._summed, self.wake)
        return self.link.start(self.posting, runs, self.operation, self.wake)

    def _start(self, start: Callable[[], Posting], nbytes: int, now: float) -> PostingEnded | None:
        self._began = self._began or now
        begun = time.monotonic()
        try:
            self._current = start()
        except KVGrpcError as error:
            return self._failed(error.message)
        except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
            # The error is not "nothing was started", so something may be in flight.
            _log.exception("%s failed to start posting %s", self._by, self.posting)
            return self._failed(text(error), quiesced=False)
        self._post_s += time.monotonic() - begun
        self._current_bytes = nbytes
        self.news_at = now
        return None

    def _look(self) -> PostingEnded | None:
        """Polls the slice in flight. Returns the posting's end if the slice failed."""
        assert self._current is not None
        try:
            state, error = self._current.poll(), self._current.error
        except Exception as bug:  # noqa: BLE001 - logged, and the thread goes on
            _log.exception("%s lost posting %s", self._by, self.posting)
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
        self.link.lost |= not quiesced and not self.lands
        return self._ended(False, error, quiesced, own_at_rest=quiesced)

    def _done(self) -> PostingEnded:
        if self._summed is not None:
            self._summed.all_there()
        return self._ended(True)

    def _ended(self, done: bool, error: str = "", quiesced: bool = True, own_at_rest: bool = True) -> PostingEnded:
        wire_s = self._wire_s()
        return PostingEnded(self.posting, done, self._nbytes, wire_s, error, quiesced, own_at_rest, self._post_s)

    def _wire_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began


class StripsFlight(Flight):
    """A read whose re-pack is copied straight out of the peer's memory. Raises DataPathFailed as Flight does."""

    def __init__(
        self, post: Post, link: PeerLink, repack: Repack, strips: Sequence[Strip], cap: BandwidthCap | None,
        onward: OnwardCopy | None = None,
    ) -> None:  # fmt: skip
        self._strips = strips
        super().__init__(post, None, link, repack.staging_bytes, cap, onward)

    def _cut(self, runs: Runs, cap: BandwidthCap | None) -> Iterator[_FlightSlice]:  # noqa: ARG002 - strips replace the runs
        for some in [self._strips] if cap is None else slices_of(self._strips, cap.slice_bytes):
            nbytes = sum(strip.total_bytes for strip in some)
            yield _FlightSlice(nbytes, lambda some=some: self.link.read_strips(some, self.wake))  # type: ignore[misc]


class StagedFlight(Flight):
    """A read into a staging buffer, for which it may have to wait, and a re-pack from there into the rank's memory.

    Raises DataPathFailed as Flight does, if the link reads into no buffer, or if the buffer can never be had.
    """

    def __init__(
        self, post: Post, link: PeerLink, repack: Repack, staging: StagingArena, cap: BandwidthCap | None,
        onward: OnwardCopy | None = None,
    ) -> None:  # fmt: skip
        self._repack = repack
        staging.check_room(repack.staging_bytes)
        link.check_stages()
        super().__init__(post, None, link, self._repack.staging_bytes, cap, onward)
        self._staging = staging
        self._claim: RoomClaim | None = None
        self._repacked = False

    def turn(self, now: float) -> PostingEnded | None:
        if self._claim is None:
            self._claim = self._staging.claim(self._repack.staging_bytes, self.wake)
        if self._claim.refused:
            return self._failed(self._claim.refused)
        return None if self._claim.buffer is None else super().turn(now)

    def release(self, at_rest: bool) -> None:
        if self._claim is not None:
            self._staging.end(self._claim, at_rest)

    @property
    def repacks(self) -> bool:
        return self._repacked and self._current is not None

    def _submit(self, runs: Runs) -> Posting:
        return self.link.read_into(self.posting, self._buffer, runs, self.wake)

    def _is_over(self) -> bool:
        return self._repacked and super()._is_over()

    def _all_moved(self, now: float) -> PostingEnded | None:
        if self._repacked:
            return super()._all_moved(now)
        self._repacked = True
        return self._start(lambda: self._staging.start(self._repack, self._buffer, self.wake), 0, now)

    def _ended(self, done: bool, error: str = "", quiesced: bool = True, own_at_rest: bool = True) -> PostingEnded:
        """Ends the posting. None of its bytes are in the rank's memory before all are."""
        self._nbytes = self._repack.total_bytes if done else 0
        return super()._ended(done, error, quiesced, own_at_rest)

    @property
    def _buffer(self) -> Buffer:
        assert self._claim is not None
        assert self._claim.buffer is not None, "there is room for it"
        return self._claim.buffer
