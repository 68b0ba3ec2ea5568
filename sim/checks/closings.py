"""Checks that a lead tells its peers of what is over: each access ends with a last settle or with a CloseAccess.

A dead peer cannot be told, and need not be while it is dead. A peer that this lead has forgotten never is. A lead that
is connecting to its peer anew tells the peer when it is connected, or when it has given up.
"""

from collections.abc import Mapping

from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.values.limits import Limits
from sim.rules import Rule, broken


class CloseAudit:
    """The accesses of one lead at its peers, and those under which its peers deliver here."""

    def __init__(self, limits: Limits, peers: Mapping[str, Peer]) -> None:
        self._peers = peers
        self._patience_s = limits.connect_timeout_s + limits.settle_timeout_s
        """Time that an opener's connection may take, in seconds. An issuer needs none: its opener has reached it."""
        self._open: dict[bytes, tuple[str, str, float]] = {}
        """Transfer, peer and patience in seconds of every access that is open, or may be at its issuer."""
        self._of_transfer: dict[str, dict[bytes, None]] = {}
        self._due: dict[bytes, tuple[str, str, float, float]] = {}
        """Accesses whose transfer is over: the same, and the time since when the peer could have been told."""
        self._granted: set[bytes] = set()
        """Accesses of sources. One that is asked for again after its source was told of its end is not new."""
        self._by_token: dict[bytes, bytes] = {}
        """Last access that was asked for with a WRITE grant: it replaces the one before."""

    def asked(self, access_id: bytes, transfer_id: str, peer: str, push_token: bytes = b"") -> None:
        """Takes note that the lead asks for an access. `push_token` is a WRITE grant."""
        if push_token:
            before = self._by_token.get(push_token, access_id)
            if before != access_id:
                self.over(before)
            self._by_token[push_token] = access_id
        self._add(access_id, transfer_id, peer, self._patience_s)

    def granted(self, access_id: bytes, transfer_id: str, peer: str) -> None:
        """Takes note that a source may deliver. The source must be told when this side ends. The access replaces its
        last one.
        """
        if access_id in self._granted:
            return
        self._granted.add(access_id)
        for before in list(self._of_transfer.get(transfer_id, ())):
            self.over(before)
        self._add(access_id, transfer_id, peer, 0.0)

    def over(self, access_id: bytes) -> None:
        """Takes note that both sides know that an access is over, or are told now."""
        self._due.pop(access_id, None)
        transfer_id, _, _ = self._open.pop(access_id, ("", "", 0.0))
        if transfer_id:
            accesses = self._of_transfer[transfer_id]
            del accesses[access_id]
            if not accesses:
                del self._of_transfer[transfer_id]

    def ended(self, transfer_id: str, now: float) -> None:
        """Takes note that a transfer is over: its accesses must end, too."""
        for access_id in self._of_transfer.get(transfer_id, ()):
            self._due[access_id] = (*self._open[access_id], now)

    def check(self, now: float) -> None:
        """Checks that every live peer was told of what is over."""
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
        """Forgets the last life, whose open accesses the peers detect by themselves."""
        for table in (self._open, self._of_transfer, self._due, self._granted, self._by_token):
            table.clear()

    def _add(self, access_id: bytes, transfer_id: str, peer: str, patience_s: float) -> None:
        self.over(access_id)
        self._open[access_id] = transfer_id, peer, patience_s
        self._of_transfer.setdefault(transfer_id, {})[access_id] = None
