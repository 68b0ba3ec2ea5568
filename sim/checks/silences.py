"""Checks that a silent peer is declared dead in time."""

from kvgrpc.core.state import NodeState
from kvgrpc.core.tables.peers import PeerState
from sim.rules import SLACK_S, Rule, broken


class Silences:
    """The peers of one lead."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._since: dict[str, float] = {}
        """Begin time of the silence, by life."""

    def begins(self, life: str, now: float) -> None:
        """Takes note that a peer is silent, before the lead knows."""
        peer = self._state.peers.lives.get(life)
        if peer is not None and peer.state is not PeerState.SUSPECT:
            self._since[life] = now

    def check(self) -> None:
        """Checks that no silence lasts longer than the grace."""
        state = self._state
        for life, since in list(self._since.items()):
            peer = state.peers.lives.get(life)
            if peer is None or peer.state is not PeerState.SUSPECT:
                del self._since[life]
            elif state.now > since + state.limits.peer_grace_s + SLACK_S:
                broken(Rule.R5, f"{life} is silent for {state.now - since:.3f} s and not declared dead", life)
