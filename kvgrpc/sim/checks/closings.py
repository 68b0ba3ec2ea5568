"""Whether a lead tells its peers of what is over: each access ends with a last settle, or with a CloseAccess.

A peer that is dead cannot be told, and need not be as long as it is; one that this lead has forgotten never is. A lead
that is reaching its peer anew tells it then, or when it has given that up.
"""

from collections.abc import Mapping

from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.values.limits import Limits
from kvgrpc.sim.rules import Rule, broken


class CloseAudit:
    """The accesses of one lead at its peers, and those under which its peers deliver here."""

    def __init__(self, limits: Limits, peers: Mapping[str, Peer]) -> None:
        self._peers = peers
        self._patience_s = limits.connect_timeout_s + limits.settle_timeout_s
        """So long a connection takes that is under way, for who opens; an issuer was reached by its opener."""
        self._open: dict[bytes, tuple[str, str, float]] = {}
        """The transfer and the peer of every access that is open, or may be at its issuer, and its patience."""
        self._of_transfer: dict[str, dict[bytes, None]] = {}
        self._due: dict[bytes, tuple[str, str, float, float]] = {}
        """Those whose transfer is over: the same, and since when the peer could have been told."""
        self._granted: set[bytes] = set()
        """Accesses of sources: one that is asked for again, after its source was told of its end, is nothing new."""
        self._by_token: dict[bytes, bytes] = {}
        """The access that was asked for last with a WRITE grant: it replaces the one before."""

    def asked(self, access_id: bytes, transfer_id: str, peer: str, push_token: bytes = b"") -> None:
        """The lead asks for an access; `push_token`: of a WRITE grant."""
        if push_token:
            before = self._by_token.get(push_token, access_id)
            if before != access_id:
                self.over(before)
            self._by_token[push_token] = access_id
        self._add(access_id, transfer_id, peer, self._patience_s)

    def granted(self, access_id: bytes, transfer_id: str, peer: str) -> None:
        """A source may deliver: it wants to know when this side has ended. It replaces what it opened before."""
        if access_id in self._granted:
            return
        self._granted.add(access_id)
        for before in list(self._of_transfer.get(transfer_id, ())):
            self.over(before)
        self._add(access_id, transfer_id, peer, 0.0)

    def over(self, access_id: bytes) -> None:
        """Both sides know that an access is over, or are told now."""
        self._due.pop(access_id, None)
        transfer_id, _, _ = self._open.pop(access_id, ("", "", 0.0))
        if transfer_id:
            accesses = self._of_transfer[transfer_id]
            del accesses[access_id]
            if not accesses:
                del self._of_transfer[transfer_id]

    def ended(self, transfer_id: str, now: float) -> None:
        """A transfer is over: so must be its accesses."""
        for access_id in self._of_transfer.get(transfer_id, ()):
            self._due[access_id] = (*self._open[access_id], now)

    def check(self, now: float) -> None:
        """Every peer that lives was told of what is over."""
        for access_id, (transfer_id, life, patience_s, since) in list(self._due.items()):
            peer = self._peers.get(life)
            if peer is None:
                self.over(access_id)
            elif peer.state is PeerState.DEAD:
                self._due[access_id] = transfer_id, life, patience_s, now
            elif now > since + patience_s:
                message = f"{life} is not told that access a-{access_id.hex()} of {transfer_id} is over"
                broken(Rule.R5, message, transfer_id, f"a-{access_id.hex()}")

    def life_began(self) -> None:
        """What the last life left open its peers find out by themselves."""
        for table in (self._open, self._of_transfer, self._due, self._granted, self._by_token):
            table.clear()

    def _add(self, access_id: bytes, transfer_id: str, peer: str, patience_s: float) -> None:
        self.over(access_id)
        self._open[access_id] = transfer_id, peer, patience_s
        self._of_transfer.setdefault(transfer_id, {})[access_id] = None
