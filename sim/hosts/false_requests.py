"""False requests of a lead: a liar alters those that its node sends, and invents others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from kvgrpc.core.events import (
    AccessClosing,
    AccessSettling,
    Call,
    ChecksumBlocks,
    CloseAccess,
    CloseOutcome,
    Event,
    HandshakeReceived,
    OpenAccess,
    PartsReady,
    PostSend,
    RegisterPush,
    ReleaseLease,
    RenewLeases,
    SettleAccess,
)
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.core.values.ids import ACCESS_ID_BYTES
from sim.hosts.known import UINT64, Known

T = TypeVar("T")
_OfAccess = OpenAccess | SettleAccess | CloseAccess | ChecksumBlocks | PostSend
PeerRequest = HandshakeReceived | PartsReady | RegisterPush | RenewLeases | ReleaseLease | _OfAccess
"""Requests of one lead to another."""
CALL = Call(0, "")
SENDS = 3
"""Weight of PostSend among requests about accesses, in a world where ranks send: few of them guess the next number."""
OWN_CALLER = 0.8
"""Share of the false requests that still name the life that asks."""


class FalseRequests:
    """The false requests of one liar."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._rng = known.rng
        self._bends: dict[type[Event], Callable[[Any], Event]] = {
            OpenAccess: self._open,
            SettleAccess: self._settle,
            CloseAccess: self._close,
            PartsReady: self._parts,
            ChecksumBlocks: self._checksums,
            PostSend: self._send,
            HandshakeReceived: self._handshake,
            RegisterPush: lambda event: replace(event, token=known.token()),
            RenewLeases: self._renew,
            ReleaseLease: lambda event: replace(event, lease=known.lease()),
        }
        rng = self._rng
        self._about_accesses: tuple[Callable[[HandshakeReceived], PeerRequest], ...] = (
            lambda me: SettleAccess(CALL, *self._someone(me), self._some(self._new_settling)),
            lambda me: CloseAccess(CALL, *self._someone(me), self._some(self._new_closing)),
            lambda me: PartsReady(CALL, *self._someone(me), known.access_id(), known.parts(())),
            lambda me: ChecksumBlocks(
                CALL, *self._someone(me), known.access_id(), self._some(lambda: (known.lists(()), known.layers()))
            ),
            lambda me: OpenAccess(CALL, *self._someone(me), self._some(self._new_opening)),
            *((self._new_send,) * SENDS if known.sends else ()),
        )
        self._inventions: tuple[Callable[[HandshakeReceived], PeerRequest], ...] = (
            *self._about_accesses,
            self._handshake,
            lambda _: RegisterPush(CALL, known.token(), known.text(), b"", b""),
            lambda _: RenewLeases(CALL, self._some(known.lease), rng.choice((None, known.seconds()))),
            lambda _: ReleaseLease(CALL, known.lease()),
            lambda me: OpenAccess(CALL, *self._someone(me), self._some(self._new_opening)),
        )

    def bend(self, event: Event) -> Event:
        """Returns the request with something altered."""
        bend = self._bends.get(type(event))
        return event if bend is None else bend(event)

    def invent(self, me: HandshakeReceived) -> PeerRequest:
        """Returns an invented request. `me` is how the liar's life introduces itself."""
        return self._rng.choice(self._inventions)(me)

    def meddle(self, me: HandshakeReceived, access_id: bytes) -> PeerRequest:
        """Returns a request about an access of another peer."""
        self._known.about = access_id
        made = self._rng.choice(self._about_accesses)(me)
        self._known.about = b""
        return made

    def anew(self, event: OpenAccess, address: str) -> OpenAccess:
        """Returns the request under other access ids, for parts of any epoch, as another life."""
        rng = self._rng
        rows = tuple(
            replace(
                row,
                access_id=rng.randbytes(ACCESS_ID_BYTES),
                reverse_access_id=row.reverse_access_id and rng.randbytes(ACCESS_ID_BYTES),
                part_epoch=rng.choice((row.part_epoch, 0, max(row.part_epoch - 1, 0), row.part_epoch + 1)),
            )
            for row in event.openings
        )
        engine_id, incarnation = rng.choice((*self._known.met.get(address, ()), (event.engine_id, event.incarnation)))
        return replace(event, engine_id=engine_id, incarnation=incarnation, openings=rows)

    def _someone(self, me: HandshakeReceived) -> tuple[str, int]:
        """Returns a life to speak for, mostly the liar's own."""
        return (me.peer.engine_id, me.peer.incarnation) if self._rng.randrange(3) else self._known.life()

    def _some(self, make: Callable[[], T]) -> tuple[T, ...]:
        return tuple(make() for _ in range(self._rng.choice((0, 1, 1, 1, 1, 3))))

    # -- altered requests, by kind

    def _open(self, event: OpenAccess) -> OpenAccess:
        rng = self._rng
        rows = [self._opening(row) for row in event.openings]
        kind = rng.randrange(12)
        if kind == 0:
            rows += rows
        elif kind == 1:
            rows += [self._opening(row) for row in rows]
        elif kind == 2:
            rows = []
        elif kind == 3:
            rows.append(self._new_opening())
        return self._says(replace(event, openings=tuple(rows)))

    def _opening(self, row: AccessOpening) -> AccessOpening:
        rng, known = self._rng, self._known
        changes: dict[str, Callable[[], object]] = {
            "access_id": known.access_id,
            "token": known.token,
            "claim": lambda: self._claim(row.claim),
            "transfer_id": known.name,
            "data_paths": lambda: rng.choice(((), ("x",), ("loopback",) * 64)),
            "reverse_access_id": lambda: rng.choice((b"", row.access_id, known.access_id())),
            "push_content": lambda: known.content(row.push_content),
            "part_epoch": lambda: known.number(row.part_epoch),
            "parts": lambda: known.parts(row.parts),
            "waits_for_blocks": lambda: not row.waits_for_blocks,
            "request_time_us": lambda: rng.choice((0, 1, row.request_time_us + 1, 2**64 - 1)),
        }
        return self._changed(row, changes, "parts" if row.parts and rng.randrange(2) else "")

    def _new_opening(self) -> AccessOpening:
        rng, known = self._rng, self._known
        fresh = known.about or rng.randbytes(ACCESS_ID_BYTES)
        if known.openings and rng.randrange(3):
            again = rng.choice(known.openings)
            return replace(again, access_id=rng.choice((again.access_id, fresh, fresh)))
        reverse = rng.choice((b"", rng.randbytes(ACCESS_ID_BYTES)))
        named = known.token(), self._claim(None), known.text(), known.text()
        content, tokens, parts = known.content(None), known.number(0), known.parts(())
        return AccessOpening(fresh, *named, (), reverse, content, tokens, parts)

    def _claim(self, claim: ContentClaim | None) -> ContentClaim | None:
        rng, known = self._rng, self._known
        kind = rng.randrange(4)
        if claim is None or kind == 0:
            return rng.choice((None, ContentClaim(known.number(16), rng.randbytes(32)), ContentClaim(16, b"", b"lie")))
        if kind == 1:
            return replace(claim, tokens=known.number(claim.tokens))
        return replace(claim, digest=rng.choice((b"", rng.randbytes(32))))

    def _settle(self, event: SettleAccess) -> SettleAccess:
        rows = [self._settling(row) for row in event.settlings]
        kind = self._rng.randrange(6)
        if kind == 0:
            rows += rows
        elif kind == 1:
            rows.append(self._new_settling())
        return self._says(replace(event, settlings=tuple(rows)))

    def _settling(self, row: AccessSettling) -> AccessSettling:
        known = self._known
        changes: dict[str, Callable[[], object]] = {
            "access_id": known.access_id,
            "last": lambda: not row.last,
            "nbytes": lambda: self._rng.choice((0, 1, UINT64)),
            "part": lambda: known.number(row.part),
            "layers_done": self._layers_done,
        }
        return self._changed(row, changes)

    def _new_settling(self) -> AccessSettling:
        rng, known = self._rng, self._known
        last, nbytes = rng.random() < 0.7, rng.choice((0, UINT64))
        return AccessSettling(known.access_id(), last, nbytes, known.number(0), self._layers_done())

    def _layers_done(self) -> tuple[tuple[int, int], ...]:
        return tuple(filter(None, (self._known.layers() for _ in range(self._rng.randrange(4)))))

    def _close(self, event: CloseAccess) -> CloseAccess:
        rows = [self._closing(row) for row in event.closings]
        kind = self._rng.randrange(6)
        if kind == 0:
            rows += rows
        elif kind == 1:
            rows.append(self._new_closing())
        return self._says(replace(event, closings=tuple(rows)))

    def _closing(self, row: AccessClosing) -> AccessClosing:
        changes: dict[str, Callable[[], object]] = {
            "access_id": self._known.access_id,
            "outcome": lambda: self._rng.choice(list(CloseOutcome)),
            "quiesced": lambda: not row.quiesced,
            "token": self._known.token,
            "message": lambda: "a lie" * 100,
        }
        return self._changed(row, changes)

    def _new_closing(self) -> AccessClosing:
        rng, known = self._rng, self._known
        return AccessClosing(
            known.access_id(), rng.choice(list(CloseOutcome)), rng.random() < 0.5, known.token(), "a lie"
        )

    def _parts(self, event: PartsReady) -> PartsReady:
        if self._rng.randrange(4):
            return self._says(replace(event, parts=self._known.parts(event.parts)))
        return self._says(replace(event, access_id=self._known.access_id()))

    def _checksums(self, event: ChecksumBlocks) -> ChecksumBlocks:
        known, kind = self._known, self._rng.randrange(4)
        if kind == 0:
            return self._says(replace(event, access_id=known.access_id()))
        if kind == 1:
            return self._says(replace(event, blocks=event.blocks * 2))
        blocks = tuple((known.lists(lists), known.layers()) for lists, _ in event.blocks)
        return self._says(replace(event, blocks=blocks))

    def _send(self, event: PostSend) -> PostSend:
        if not self._rng.randrange(3):
            return self._says(replace(event, access_id=self._known.access_id()))
        return self._says(replace(event, ask=self._known.ask(event.ask)))

    def _new_send(self, me: HandshakeReceived) -> PostSend:
        """Returns a send that mostly has the next number, as if that could be guessed."""
        return PostSend(CALL, *self._someone(me), self._known.access_id(), self._known.ask(None))

    def _renew(self, event: RenewLeases) -> RenewLeases:
        rng, known = self._rng, self._known
        if rng.randrange(2):
            return replace(event, ttl_s=known.seconds())
        return replace(event, leases=tuple(known.lease() for _ in event.leases))

    def _handshake(self, event: HandshakeReceived) -> HandshakeReceived:
        rng, known = self._rng, self._known
        kind = rng.randrange(8)
        if kind == 0:
            return replace(event, endpoints=known.endpoints(event.endpoints))
        if kind == 1:
            return replace(event, expected_engine_id=known.text())
        return replace(event, peer=known.description(event.peer))

    def _changed(self, row: T, changes: dict[str, Callable[[], object]], name: str = "") -> T:
        """Returns the row with one field changed: `name`, or any."""
        name = name or self._rng.choice(tuple(changes))
        made: T = replace(row, **{name: changes[name]()})  # type: ignore[type-var]
        return made

    def _says(self, event: T) -> T:
        """Returns the request, now and then in the name of another life."""
        if self._rng.random() < OWN_CALLER:
            return event
        engine_id, incarnation = self._known.life()
        made: T = replace(event, engine_id=engine_id, incarnation=incarnation)  # type: ignore[type-var]
        return made
