"""The mover of one rank: one thread that submits, polls and reports, and the only place that polls.

Everyone else only asks. Nothing here blocks a caller, who may make a small copy itself (`Mover.post`). The thread
blocks while nothing is in flight. Data paths whose threads call `wake` are polled when they do. Those that need polling
get turns while a posting or an expected access exists, with a back-off: at once for a moment, then after short waits.
Once this rank's memory has been offered they get a turn now and then for ever: a peer whose access is over may still
read, and its read comes to rest only with our help. An error in one posting ends that posting, never the thread.

`close` is explicit, ordered and bounded. A program that forgets it gets it at interpreter exit, since a copy into
memory that is being torn down would crash the process. A signal that ends the process without an interpreter exit needs
nothing: shared pools and sockets have no names.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.events import EndpointOffered, PostingEnded, Rekeyed
from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.core.values.sends import SendAnswer, SendAsk
from kvgrpc.datapath import guarded_calls
from kvgrpc.datapath.back_off import back_off_s
from kvgrpc.datapath.bandwidth_cap import BandwidthCap
from kvgrpc.datapath.base import DataPath, DataPathFailed, Memory, WrittenByPeers
from kvgrpc.datapath.copy.checksums import ReadChecksums
from kvgrpc.datapath.flight import Flight, flight_with_repack
from kvgrpc.datapath.host.memory import memory_bytes, use_device
from kvgrpc.datapath.inbox import Inbox
from kvgrpc.datapath.links import END_S, PeerLinks
from kvgrpc.datapath.mirror.mirror import Mirror, OnwardCopy
from kvgrpc.datapath.mirror.ranges import filled_by
from kvgrpc.datapath.path_attempts import ConnectAttempt
from kvgrpc.datapath.rank_sends import RankSends
from kvgrpc.datapath.reports import Report
from kvgrpc.datapath.settings import DEFAULTS, MoverSettings
from kvgrpc.datapath.staging_arena import StagingArena

_log = logging.getLogger(__name__)

_AT_EXIT_S = 2.0
_STUCK_S = 5.0
"""Time that `close` waits beyond its deadline for a library that does not return, in seconds."""
_LOOK_AGAIN_S = 0.5
"""Maximum interval between looks at postings in flight, in seconds, even if no data path calls `wake`."""
_IDLE_TURN_S = 0.02
"""Interval between turns of paths that need polling while none is known to be needed, in seconds: 0.3 % of a core."""


class Mover:
    """Moves bytes into `memory` of rank `rank`.

    The mover closes `paths`, this rank's data paths, and the `mirror` if the memory is one. `report` is called from the
    mover's thread and must not block: see `kvgrpc.datapath.reports`.
    """

    def __init__(
        self,
        rank: int,
        memory: Memory,
        paths: Sequence[DataPath],
        report: Callable[[Report], None],
        settings: MoverSettings = DEFAULTS,
        mirror: Mirror | None = None,
    ) -> None:
        limit = settings.bandwidth_limit_bytes_per_s
        self._endpoint = RankEndpoint(rank)
        self._memory_bytes = memory_bytes(memory.segments)
        self._paths = {path.name: path for path in paths}
        self._polled = [path for path in paths if path.needs_polling]
        self._report_to = report
        self._mirror = mirror
        self._cap = None if limit is None else BandwidthCap(limit)
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, args=(memory,), name=f"kvgrpc-mover-{rank}", daemon=True)
        # Only the mover's thread uses these. progress_age_s reads some; _at_once acts while the thread is idle.
        self._links = PeerLinks(rank, self._paths, self._inbox.later, self._report)
        self._sends = RankSends(rank, paths, self._inbox.later, self._report)
        self._flights: dict[str, Flight] = {}
        self._expected: dict[str, Operation] = {}
        self._lost: dict[str, Flight] = {}
        """Postings that ended without proof, by id."""
        self._staging = StagingArena(rank, memory, settings.copy_threads, settings.staging_bytes)
        self._offered = self._at_rest = False
        self._close_at: float | None = None
        self._news_at = 0.0
        self._busy_since: float | None = None
        self._oldest_news_at: float | None = None

    # ---- for everyone

    def start(self) -> None:
        atexit.register(self.close, _AT_EXIT_S)
        self._thread.start()

    def offer(self, key: str, peer: str = "") -> None:
        """Asks for a RankEndpoint for one peer; `EndpointOffered` with this key answers."""
        self._inbox.ask(partial(self._offer, key, peer))

    def connect(self, peer: str, endpoint: RankEndpoint, allowed: Sequence[str], attempt: int = 0) -> None:
        """Tries the allowed paths in order; `PeerMapped` with this `attempt` answers.

        The endpoint names the rank of the peer. A connected rank must be disconnected before it is connected again.
        """
        self._inbox.ask(partial(self._links.connect, ConnectAttempt(peer, endpoint, list(allowed), attempt)))

    def post(self, post: Post, arrival: ReadChecksums | None = None, *, at_once: bool = False) -> PostingEnded | None:
        """Reads from the peer's rank into this one's memory, or writes there; `PostingEnded` always answers.

        Bytes that are read are checksummed for `arrival`. A write fails if the data path to that rank offers none. With
        `at_once`, this call may make a small copy itself, if that rank has no posting in flight and the thread is idle,
        and returns the end that is otherwise reported. Raises AlreadyExists while a posting of that name is in flight.
        """
        at_once = at_once and not (arrival or post.repack or self._cap or self._mirror)
        here = partial(self._at_once, post) if at_once else None
        return self._inbox.post(post.posting_id, partial(self._post, post, arrival), here)

    def send(self, name: str, peer: str, ask: SendAsk) -> None:
        """Sends to a peer's rank what it asked for. `SendPosted` with this name reports that the send is in flight."""
        self._inbox.ask(partial(self._sends.send, name, peer, ask))

    def answer_send(self, peer: str, answer: SendAnswer) -> None:
        self._inbox.ask(partial(self._sends.answered, peer, answer))

    def disconnect(self, peer: str, *, watch: bool = False, gone: bool = False, peer_rank: int | None = None) -> None:
        """Closes the transports to all ranks of the peer, or to one, each when its last posting has ended.
        `Disconnected` answers for each, or once if there is none.

        With `watch`, awaited ends of processes are still awaited. With `gone`, what the peer was offered is void.
        """
        self._inbox.ask(partial(self._links.disconnect, peer, watch, gone, peer_rank))

    def rekey(self) -> None:
        """Ends access by the paths by which peers write, and starts these paths anew; `Rekeyed` answers.

        Postings on them end, their peers are disconnected, and earlier offers are void: a peer needs a new one to come
        back. Accesses that are expected stay expected.
        """
        self._inbox.ask(self._rekey)

    def await_end(self, peer: str) -> None:
        """Begins to await the ends of the processes of the peer's connected ranks; `ProcessEnded` reports each. A
        disconnect may end that. An end that cannot be seen is never reported.
        """
        self._inbox.ask(partial(self._links.await_end, peer))

    def expect(self, access: str, operation: Operation = Operation.READ) -> None:
        """Records that peers may read this rank's memory, or write it, under `access`. Idempotent."""
        self._inbox.ask(partial(self._expected.__setitem__, access, operation))

    def unexpect(self, access: str) -> None:
        """Records that this rank's memory is not accessed under `access` any more. Idempotent."""
        self._inbox.ask(partial(self._unexpect, access))

    def progress_age_s(self) -> float:
        """Returns the time in seconds for which the oldest posting in flight, or the thread itself, has made no
        progress; 0 if there is nothing to do. Any thread may call it.
        """
        now = time.monotonic()
        since = [t for t in (self._busy_since, self._oldest_news_at) if t is not None]
        return max(now - min(since), 0.0) if since else 0.0

    def close(self, deadline_s: float) -> bool:
        """Waits `deadline_s` for postings to end, then closes links and paths under the remaining ones.

        Returns True if the memory is at rest, and False if a library does not return or did not close, or if a peer may
        still write (an access for that is expected, and its path cannot speak for the peer). The memory must then stay.
        If the thread returned, every posting was reported. Idempotent; must not be called from `report`.
        """
        self._inbox.close(partial(self._begin_close, time.monotonic() + deadline_s))
        atexit.unregister(self.close)
        if self._thread.ident is None:  # never started: there is nothing but the paths
            self._thread.start()
        self._thread.join(deadline_s + _STUCK_S)
        return self._at_rest and not self._thread.is_alive()

    def _at_once(self, post: Post) -> PostingEnded | None:
        """Performs a posting in the caller's thread while the mover's is idle. Returns None if it must be queued."""
        link = self._links.get(post.peer, post.peer_rank)
        if link is None or link.flights or post.operation is not Operation.READ or not link.ends_at_once(post.runs):
            return None
        try:
            item = Flight(post, None, link, self._memory_bytes, None)
        except DataPathFailed:
            return None  # the queued posting is refused like any other
        ended = item.turn(time.monotonic())
        assert ended is not None, "the data path said so"
        self._note_lost(item, ended)
        return ended

    # ---- the thread

    def _run(self, memory: Memory) -> None:
        use_device(memory.segments)
        while self._close_at is None or (self._flights and time.monotonic() < self._close_at):
            command = self._inbox.next(self._wait_s(time.monotonic()))
            self._busy_since = time.monotonic()
            if command is None:
                self._turn_all()
            else:
                self._perform(command)
            self._links.look_for_ends(time.monotonic())
            self._busy_since = None
        self._busy_since = time.monotonic()
        self._tear_down()
        self._busy_since = None

    def _perform(self, command: Callable[[], None]) -> None:
        self._news_at = time.monotonic()
        try:
            command()
        except Exception:  # noqa: BLE001 - logged, and the thread goes on
            _log.exception("the mover could not perform %s", command)
        if self._is_polling():
            self._turn_all()

    def _turn_all(self) -> None:
        """Gives a turn to every path that needs it, and polls every posting."""
        for path in self._polled:
            guarded_calls.progress(path)
        for item in list(self._flights.values()):
            self._turn(item)

    def _turn(self, item: Flight) -> None:
        """Polls one posting, unless it has ended since the request."""
        if self._flights.get(item.posting) is not item:
            return
        ended = item.turn(time.monotonic())
        if ended is not None:
            self._end(item, ended)
        self._note_oldest()

    def _end(self, item: Flight, ended: PostingEnded) -> None:
        self._news_at = time.monotonic()
        del self._flights[item.posting]
        self._note_lost(item, ended)
        self._report_end(ended)
        self._links.ended(item.link)

    def _note_lost(self, item: Flight, ended: PostingEnded) -> None:
        if not ended.quiesced and not ended.own_at_rest:
            self._lost[item.posting] = item
        item.release(ended.quiesced)

    def _is_polling(self) -> bool:
        return bool(self._polled) and (bool(self._expected) or self._polls_flights())

    def _polls_flights(self) -> bool:
        return any(item.link.path.needs_polling for item in self._flights.values())

    def _wait_s(self, now: float) -> float | None:
        """Returns the time to wait for a command, or None to wait until one comes."""
        waits = [item.start_at - now for item in self._flights.values() if item.start_at]
        if self._polled and self._offered:
            waits.append(_IDLE_TURN_S)
        if self._is_polling():
            needed = self._polls_flights() or any(path.peers_need_turns for path in self._polled)
            waits.append(back_off_s(now - self._news_at, needed=needed))
        if self._flights:
            waits.append(_LOOK_AGAIN_S)
        if self._links.awaits_end:
            waits.append(END_S)
        if self._close_at is not None:
            waits.append(self._close_at - now)
        return max(min(waits), 0.0) if waits else None

    def _note_oldest(self) -> None:
        news = [item.news_at for item in self._flights.values() if item.news_at is not None]
        self._oldest_news_at = min(news, default=None)

    # ---- commands, performed by the thread

    def _offer(self, key: str, peer: str) -> None:
        self._offered = True
        endpoint = self._endpoint
        for path in self._paths.values():
            outcome = guarded_calls.offer(path, endpoint, peer)
            if isinstance(outcome, str):
                _log.info("%s is not offered to %s: %s", path.name, key, outcome)
            else:
                endpoint = outcome
        self._report(EndpointOffered(endpoint.rank, key, endpoint))

    def _post(self, post: Post, arrival: ReadChecksums | None) -> None:
        link = self._links.get(post.peer, post.peer_rank)
        if link is None:
            self._refuse(post.posting_id, f"rank {post.peer_rank} of the peer {post.peer} is not connected")
            return
        try:
            onward = self._onward(post)
            if post.repack is None:
                item = Flight(post, arrival, link, self._memory_bytes, self._cap, onward)
            else:
                item = flight_with_repack(post, link, self._staging, self._cap, onward)
        except DataPathFailed as error:
            self._refuse(post.posting_id, error.message)
            return
        item.wake = partial(self._inbox.later, partial(self._turn, item))
        link.flights += 1
        self._flights[item.posting] = item
        self._turn(item)

    def _onward(self, post: Post) -> OnwardCopy | None:
        """Returns the copy that follows a read into a mirror. Raises DataPathFailed for runs outside this memory."""
        if self._mirror is None or post.operation is not Operation.READ:
            return None
        if post.repack is not None:
            self._staging.check(post)
        return OnwardCopy(self._mirror, filled_by(post, self._memory_bytes))

    def _refuse(self, posting: str, why: str) -> None:
        self._report_end(PostingEnded(posting, done=False, message=why, own_at_rest=True))

    def _unexpect(self, access: str) -> None:
        self._expected.pop(access, None)

    def _rekey(self) -> None:
        errors = [self._rekey_path(path) for path in self._paths.values()]
        for item in list(self._flights.values()):
            self._turn(item)  # re-packs of other paths that ended with those of a re-keyed path
        self._note_oldest()
        self._report(Rekeyed(self._endpoint.rank, "; ".join(filter(None, errors))))

    def _rekey_path(self, path: DataPath) -> str:
        """Re-keys one path. Returns why an earlier access may still follow, or an empty text."""
        if not isinstance(path, WrittenByPeers):
            return ""
        late = path.late_writes
        flights = [item for item in self._flights.values() if item.link.path is path and not item.lands]
        if any(item.repacks for item in flights):
            self._staging.stop()  # a copy out of the staging buffer is a part of its posting, and ends with it
        broken = guarded_calls.rekey(path.name, path)
        for item in flights:
            self._end(item, item.abandon("this rank's memory was re-keyed", quiesced=not broken))
        for link in self._links.drop(path):
            self._report(link.disconnected(link.close()))
        if not broken:
            self._find_lost(path)
        return broken or late

    def _find_lost(self, path: DataPath) -> None:
        """Ends the lost postings of a re-keyed path. Bytes that they wrote may still land at the peer."""
        for posting, item in list(self._lost.items()):
            if item.link.path is path and not item.lands:
                del self._lost[posting]
                quiesced, why = item.operation is Operation.READ, "its data path began anew"
                item.release(quiesced)
                self._report_end(PostingEnded(posting, False, 0, 0.0, why, quiesced, own_at_rest=True))

    def _begin_close(self, close_at: float) -> None:
        self._close_at = close_at
        self._links.begin_close()

    # ---- the end

    def _tear_down(self) -> None:
        """Closes links first, then paths: a library's agent must outlive what was made with it."""
        while (command := self._inbox.next(0)) is not None:  # connects that ended just before they were cancelled
            self._perform(command)
        self._links.let_go()
        busy = {id(item.link) for item in self._flights.values()}
        for link in self._links:
            if id(link) not in busy:
                link.close()
        late = guarded_calls.late_writes(self._paths.values() if Operation.WRITE in self._expected.values() else ())
        errors = {path.name: guarded_calls.close(path) for path in self._paths.values()}
        self._staging.stop()
        still = self._mirror is None or self._mirror.close(_STUCK_S / 2)
        self._at_rest = still and not any(errors.values()) and not late
        cut = {id(item.link): item.link for item in self._flights.values()}
        for item in self._flights.values():
            quiesced = not errors[item.link.path.name]
            ended = item.abandon("the mover was closed before the posting ended", quiesced)
            item.release(ended.quiesced)
            self._report_end(ended)
        for item in self._lost.values():
            item.release(not errors[item.link.path.name])
        self._lost.clear()
        self._staging.close()
        for link in cut.values():  # closed with their paths
            if link.closing:
                self._report(link.disconnected(errors[link.path.name]))
        self._flights.clear()
        self._note_oldest()

    def _report_end(self, ended: PostingEnded) -> None:
        self._inbox.ended(ended.posting_id)  # before the report, so that its receiver may use the name again
        self._report(ended)

    def _report(self, report: Report) -> None:
        try:
            self._report_to(report)
        except Exception:  # noqa: BLE001 - logged, and the thread goes on
            _log.exception("the owner of the mover could not take %s", report)
