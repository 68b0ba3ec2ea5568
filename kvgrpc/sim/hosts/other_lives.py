"""What a liar says in the name of other lives than the one that was given an access: that what this one writes is at
rest, or that the push which it began is theirs.
"""

from collections import deque
from dataclasses import dataclass, replace

from kvgrpc.core.events import CloseAccess, CloseOutcome, Closing, HandshakeReceived, OpenAccess, SettleAccess, Settling
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from kvgrpc.sim.hosts.false_requests import CALL, PeerRequest
from kvgrpc.sim.hosts.known import NO_ENGINE, Known

KEPT = 16
"""Accesses that it may speak of long after."""
FORMER = 0.3
"""Of the lives in whose name it speaks are some that it has had, or has made up before."""


@dataclass(frozen=True)
class Granted:
    """An access under which a push of the liar's lead may be delivered, and where."""

    address: str
    asked: OpenAccess
    """By one row."""


class OtherLives:
    """Of one liar."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._granted: deque[Granted] = deque(maxlen=KEPT)

    def granted(self, address: str, asked: OpenAccess) -> list[Granted]:
        """The rows of a call under which pushes may be delivered."""
        rows = [row for row in asked.openings if row.push_content is not None]
        made = [Granted(address, replace(asked, openings=(row,))) for row in rows]
        self._granted.extend(made)
        return made

    def remembered(self) -> Granted | None:
        """One of long ago, maybe of a life that is over."""
        return self._known.rng.choice(self._granted) if self._granted else None

    def gives_up(self, of: Granted) -> CloseAccess:
        """Its own life delivers no more, and does not say that it is at rest."""
        asked, row = of.asked, of.asked.openings[0]
        closing = Closing(row.access_id, CloseOutcome.DROPPED, False, row.token)
        return CloseAccess(CALL, asked.engine_id, asked.incarnation, (closing,))

    def at_rest(self, of: Granted) -> PeerRequest:
        """Another life of the same engine says that nothing is written under that access."""
        asked, row, rng = of.asked, of.asked.openings[0], self._known.rng
        life = self._other(asked.engine_id, asked.incarnation)
        if rng.randrange(2):
            return SettleAccess(CALL, *life, (Settling(row.access_id, last=True),))
        token = rng.choice((row.token, b""))
        return CloseAccess(
            CALL, *life, (Closing(row.access_id, rng.choice(list(CloseOutcome)), quiesced=True, token=token),)
        )

    def stranger(self, me: HandshakeReceived) -> HandshakeReceived:
        """A life of another engine introduces itself: one of its own would end the push."""
        engine_id, incarnation = self._known.make_up(NO_ENGINE)
        return replace(me, peer=replace(me.peer, engine_id=engine_id, incarnation=incarnation))

    def takes_over(self, of: Granted, life: tuple[str, int]) -> OpenAccess:
        """That life goes on with the push, as if it were its own that starts over."""
        row, rng = of.asked.openings[0], self._known.rng
        again = replace(row, access_id=rng.randbytes(ACCESS_ID_BYTES), part_epoch=row.part_epoch + 1)
        return OpenAccess(CALL, *life, (again,))

    def _other(self, engine_id: str, incarnation: int) -> tuple[str, int]:
        own = (engine_id, incarnation)
        former = [life for life in self._known.lives if life[0] == engine_id and life != own]
        if former and self._known.often(FORMER):
            return self._known.rng.choice(former)
        return self._known.make_up(engine_id)
