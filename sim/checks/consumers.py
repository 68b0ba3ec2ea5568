"""Tracks which engines are done with what a lead offers: by what they were told, what they said, and their deaths.

A consumer is done when it was told that all it moved is valid, or was cancelled. Under a grant with RELEASE it is also
done when it gave up for good, or died. How often it came or failed does not count.
"""

from collections import defaultdict
from collections.abc import Mapping

from kvgrpc.core.events import CloseOutcome
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.timers import Timer, Timers
from kvgrpc.core.tables.transfers import Direction, Transfer
from kvgrpc.core.values.grants import OnAbort
from sim.rules import Rule, broken


class Consumers:
    """The consumers of one lead, by transfer key. `peers` are the lives of other engines that it knows."""

    def __init__(self, peers: Mapping[str, Peer]) -> None:
        self._peers = peers
        self._came: defaultdict[bytes, set[str]] = defaultdict(set)
        """Lives that used a key."""
        self._received: defaultdict[bytes, set[str]] = defaultdict(set)
        self._gave_up: defaultdict[bytes, set[str]] = defaultdict(set)
        self._cancelled: defaultdict[bytes, set[str]] = defaultdict(set)
        self._keys: defaultdict[str, set[bytes]] = defaultdict(set)
        """The keys of `_came`, by engine."""
        self._died: defaultdict[bytes, set[str]] = defaultdict(set)
        """Engines that used a key when one of their lives was declared dead. Any life may have answered for the
        engine.
        """
        self._dead: set[str] = set()
        """Lives that were declared dead."""
        self._kept: set[bytes] = set()
        """Keys under which a destination that gives up is not done (KEEP)."""

    def handed_over(self, key: bytes, on_abort: OnAbort) -> None:
        """Takes note that blocks are handed over under that key."""
        if on_abort is OnAbort.KEEP:
            self._kept.add(key)

    def came(self, key: bytes, life: str) -> None:
        """Takes note that a life asks for the blocks of a key, or is named as their destination."""
        self._came[key].add(life)
        self._keys[_engine(life)].add(key)

    def received(self, key: bytes, engine_id: str) -> None:
        """Takes note that an engine has valid KV, and all of it."""
        self._received[key].add(engine_id)

    def closes(self, key: bytes, engine_id: str, outcome: CloseOutcome) -> None:
        """Takes note that an engine has ended its use of a key."""
        if outcome is CloseOutcome.DROPPED:
            self._gave_up[key].add(engine_id)
        elif outcome is CloseOutcome.CANCELLED:
            self._cancelled[key].add(engine_id)

    def hung_up(self, life: str) -> None:
        """Takes note that the lead has given up that life."""
        self._dead.add(life)
        for key in self._keys[_engine(life)]:
            self._died[key].add(_engine(life))

    def time_passes(self, timers: Timers, now: float) -> None:
        """Takes note of deaths that are due by now. They precede the event of this moment, which may readmit the
        life.
        """
        due = timers.next_deadline()
        if due is not None and due <= now:
            graces = ((life, timers.when(Timer.PEER_GRACE, life)) for life in self._peers)
            self._dead.update(life for life, over in graces if over is not None and over <= now)

    def check(self, transfer: Transfer) -> None:
        """Checks that no more consumers are counted as done than are done."""
        if transfer.direction is not Direction.SEND or not transfer.consumers_done:
            return
        done = self.done(transfer.key)
        if transfer.consumers_done > len(done):
            message = (
                f"{transfer.consumers_done} consumers of {transfer.id} are counted as done, of {len(done)} that are"
            )
            broken(Rule.R4, message, transfer.id, *sorted(done))

    def done(self, key: bytes) -> set[str]:
        """Returns the engines that are done with a key."""
        done = self._received[key] | self._cancelled[key]
        if key in self._kept:
            return done
        died = {_engine(life) for life in self._came[key] if life in self._dead or self._is_dead(life)}
        return done | self._gave_up[key] | self._died[key] | died

    def _is_dead(self, life: str) -> bool:
        peer = self._peers.get(life)
        return peer is not None and peer.state is PeerState.DEAD


def _engine(life: str) -> str:
    return life.rpartition("@")[0]
