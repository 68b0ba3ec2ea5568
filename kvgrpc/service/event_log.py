"""The log of what an operator acts on: transfers that failed, slow data paths, and peers that come and go.

Each line has what it is about as fields (`extra`), which the JSON form of the log has by name. Lines of one kind are
bounded: some at once, then one for many.
"""

import asyncio
import logging
from collections import OrderedDict

from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.tables.transfers import Direction, State, Transfer
from kvgrpc.errors import note
from kvgrpc.service.runner import Runner
from kvgrpc.wire.answers import trace_id

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval between two looks at the peers, in seconds."""
LINES_OF_KIND = 10
"""Maximum number of lines of one kind in an interval."""
INTERVAL_S = 60.0
KINDS_MAX = 256
"""Maximum number of kinds that are counted; the oldest is forgotten."""
LEVELS = {
    PeerState.CONNECTING: logging.DEBUG,
    PeerState.CONNECTED: logging.INFO,
    PeerState.SUSPECT: logging.INFO,
    PeerState.DEAD: logging.WARNING,
}


def about(transfer: Transfer) -> dict[str, str]:
    """Returns the fields of a line about a transfer."""
    return {
        "transfer_id": transfer.id,
        "request_id": note(transfer.request_id),
        "trace_id": trace_id(transfer.trace),
        "peer": note(transfer.peer_engine_id),
    }


class LineBudget:
    """The lines of each kind in the present interval."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def take(self, kind: str, now: float) -> str | None:
        """Returns text for the end of a line of this kind, which says how many were left out; None: write no line."""
        since, count = self._kinds.get(kind, (now, 0))
        more = 0
        if now - since >= INTERVAL_S:
            more, since, count = max(count - LINES_OF_KIND, 0), now, 0
        self._kinds[kind] = since, count + 1
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)
        if count >= LINES_OF_KIND:
            return None
        return f" ({more} more like it were not logged)" if more else ""


class EventLog:
    """The log of one lead. `data_paths`: those that the operator named, the first choice first."""

    def __init__(self, runner: Runner, data_paths: tuple[str, ...]) -> None:
        self._runner = runner
        self._timer: asyncio.TimerHandle | None = None
        self._first_path = data_paths[0]
        self._budget = LineBudget()
        self._peers: dict[str, PeerState] = {}

    def transfer_ended(self, transfer: Transfer) -> None:
        other = "from" if transfer.direction is Direction.RECEIVE else "to"
        other += f" {note(transfer.peer_engine_id) or 'nobody'}"
        if transfer.failure is not None and transfer.state is State.FAILED:
            reason = transfer.failure.reason
            said = f"failed in {transfer.failure.phase or 'its beginning'}: {reason}: {transfer.failure.message}"
            self._say(logging.WARNING, f"failed {reason}", transfer, f"{other} {said}")
        else:
            self._say(logging.INFO, "cancelled", transfer, f"{other} was cancelled")

    def start(self) -> None:
        """Looks at the peers from now on: no event tells that one is lost."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._again)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        self.look()
        self.start()

    def look(self) -> None:
        """Logs peers whose state is another one than at the last look."""
        state = self._runner.node.state
        now = {key: peer.state for key, peer in state.peers.lives.items()}
        for key, peer in state.peers.lives.items():
            if peer.state is not self._peers.get(key):
                self._peer(LEVELS[peer.state], key, peer.state.value + self._slow_path(peer), state.now)
        for key in self._peers.keys() - now.keys():
            self._peer(logging.INFO, key, "forgotten", state.now)
        self._peers = now

    def _slow_path(self, peer: Peer) -> str:
        """Returns text about the data path to a connected peer, if it is not the first choice."""
        path = next(iter(peer.paths.values()), None)
        if peer.state is not PeerState.CONNECTED or path is None or path.data_path in {"", self._first_path}:
            return ""
        rejected = "; ".join(f"not {name}: {why}" for name, why in path.rejected)
        return f", over {path.data_path}" + (f" ({rejected})" if rejected else "")

    def _peer(self, level: int, key: str, what: str, now: float) -> None:
        # Not by engine id: a stranger may bring ever new ones.
        more = self._budget.take(f"peer {what.partition(',')[0]}", now)
        if more is not None:
            _log.log(level, "peer %s is %s%s", note(key), what, more, extra={"peer": note(key.rpartition("@")[0])})

    def _say(self, level: int, kind: str, transfer: Transfer, said: str) -> None:
        assert transfer.ended is not None
        more = self._budget.take(kind, transfer.ended)
        if more is None:
            return
        _log.log(level, "transfer %s %s%s", transfer.id, said, more, extra=about(transfer))
