"""A liar's messages in the name of other lives than the one that was given an access: that this life's writes are at
rest, or that its push is theirs.
"""

from collections import deque
from dataclasses import dataclass, replace

from kvgrpc.core.events import (
    AccessClosing,
    AccessSettling,
    CloseAccess,
    CloseOutcome,
    HandshakeReceived,
    OpenAccess,
    SettleAccess,
)
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from sim.hosts.false_requests import CALL, PeerRequest
from sim.hosts.known import NO_ENGINE, Known

KEPT = 16
"""Number of accesses that a liar may speak of much later."""
FORMER = 0.3
"""Probability that the life in whose name a liar speaks is a former or an earlier made-up one."""


@dataclass(frozen=True)
class Granted:
    """An access under which a push of the liar's lead may be delivered, and its address."""

    address: str
    asked: OpenAccess
    """The call with one row."""


class OtherLives:
    """The other lives of one liar."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._granted: deque[Granted] = deque(maxlen=KEPT)

    def granted(self, address: str, asked: OpenAccess) -> list[Granted]:
        """Returns the rows of a call under which pushes may be delivered."""
        rows = [row for row in asked.openings if row.push_content is not None]
        made = [Granted(address, replace(asked, openings=(row,))) for row in rows]
        self._granted.extend(made)
        return made

    def remembered(self) -> Granted | None:
        """Returns an earlier access, maybe of a life that is over."""
        return self._known.rng.choice(self._granted) if self._granted else None

    def gives_up(self, of: Granted) -> CloseAccess:
        """Returns a close of the liar's own life, which delivers no more and does not say that its writes are at
        rest.
        """
        asked, row = of.asked, of.asked.openings[0]
        closing = AccessClosing(row.access_id, CloseOutcome.DROPPED, False, row.token)
        return CloseAccess(CALL, asked.engine_id, asked.incarnation, (closing,))

    def at_rest(self, of: Granted) -> PeerRequest:
        """Returns a message of another life of the same engine that nothing is written under that access."""
        asked, row, rng = of.asked, of.asked.openings[0], self._known.rng
        life = self._other(asked.engine_id, asked.incarnation)
        if rng.randrange(2):
            return SettleAccess(CALL, *life, (AccessSettling(row.access_id, last=True),))
        token = rng.choice((row.token, b""))
        return CloseAccess(
            CALL, *life, (AccessClosing(row.access_id, rng.choice(list(CloseOutcome)), quiesced=True, token=token),)
        )

    def stranger(self, me: HandshakeReceived) -> HandshakeReceived:
        """Returns the introduction of another engine's life: one of the liar's own engine would end the push."""
        engine_id, incarnation = self._known.make_up(NO_ENGINE)
        return replace(me, peer=replace(me.peer, engine_id=engine_id, incarnation=incarnation))

    def takes_over(self, of: Granted, life: tuple[str, int]) -> OpenAccess:
        """Returns an opening by which that life goes on with the push, as if its own push started over."""
        row, rng = of.asked.openings[0], self._known.rng
        again = replace(row, access_id=rng.randbytes(ACCESS_ID_BYTES), part_epoch=row.part_epoch + 1)
        return OpenAccess(CALL, *life, (again,))

    def _other(self, engine_id: str, incarnation: int) -> tuple[str, int]:
        own = (engine_id, incarnation)
        former = [life for life in self._known.lives if life[0] == engine_id and life != own]
        if former and self._known.often(FORMER):
            return self._known.rng.choice(former)
        return self._known.make_up(engine_id)
