"""A liar: it stands between one lead and the network, and alters, makes up and repeats that lead's messages.

The lead behind it is a real one, and believes what it hears. So its requests and answers have every valid form, and
most are true. Every false message passes the edge of a real lead (see `known`). A liar that falsely says that a write
is over writes nothing afterwards (see `Mover`): a peer with a mapping can write anything (docs/security.md), and no
message of the protocol can prevent that.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Protocol

from kvgrpc.core.actions import Closings, Introduced, Openings, Renewed
from kvgrpc.core.events import (
    Call,
    ChecksumBlocks,
    Event,
    HandshakeReceived,
    OpenAccess,
    Opened,
    PeerRequest as PeerCall,
    RegisterPush,
)
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.core.values.ids import peer_key
from kvgrpc.errors import InternalError, Reason
from sim.hosts.false_answers import FalseAnswers
from sim.hosts.false_requests import CALL, FalseRequests, PeerRequest
from sim.hosts.known import Known
from sim.hosts.other_lives import Granted, OtherLives
from sim.hosts.stolen_names import StolenNames, check_refused, protected
from sim.world.faults import Range
from sim.world.memory import MemoryDoor
from sim.world.network import Ask, Give, NetworkLead, Result
from sim.world.surroundings import Surroundings

KEPT = 64
"""Number of requests that a liar may repeat."""
UNHEARD = 0.2
"""Share of the false answers that a liar gives without asking its lead."""
UNANSWERED = 0.2
"""Share of the calls for checksums with a false answer that get no answer at all."""
AGAIN = 0.3
"""Share of the unasked messages that repeat an earlier one."""
TIMES, SOON_S = 4, (0.001, 2.0)
"""Number and range of delays, in seconds, of a liar's messages about an access that a peer has asked for."""
LONG_AGO = 0.1
"""Share of the unasked messages that are about an earlier access of the liar's pushes, if it speaks of all of them."""
TAKEN_OVER = 0.3
"""Probability that another life goes on with the push that the liar's own life has begun."""
GIVES_UP = 0.7
"""Probability, for other pushes, that its own life ends the push before another life says that it is at rest: then only
the rest is missing.
"""
MIDST_S = (0.0005, 0.05)
"""Range of delays in seconds after which bytes are likely to move."""
STOLEN, BEATS = 0.2, 0.2
"""Share of the unasked messages in the name of another engine's life, and the share of liveness beats among them."""
STREAMS = 0.5
"""Probability that a made-up life opens its liveness stream."""


class LyingLead(NetworkLead, Protocol):
    """The lead behind the liar."""

    @property
    def description(self) -> EngineDescription: ...

    @property
    def ready(self) -> bool: ...

    @property
    def stopped(self) -> bool: ...

    @property
    def peers(self) -> list[Peer]: ...

    def door(self, rank: int) -> MemoryDoor: ...


class Liar:
    """The liar of one host. `odds` is the share of its messages that are false, `other_lives` the share of accesses for
    its pushes of which it speaks in the name of other lives, `false_checksums` the share of false answers about
    checksums.
    """

    def __init__(
        self, host: LyingLead, world: Surroundings, rng: Random, odds: float, other_lives: float, false_checksums: float
    ) -> None:
        self._host = host
        self._world = world
        self._rng = rng
        self._odds = odds
        self._other_lives = other_lives
        self._false_checksums = false_checksums
        known = self._known = Known(host.address, world, rng)
        self._requests = FalseRequests(known)
        self._answers = FalseAnswers(known, world)
        self._others = OtherLives(known)
        self._stolen = StolenNames(known)
        self._said: deque[PeerRequest] = deque(maxlen=KEPT)
        world.network.between[host.address] = self
        world.overhear.append(self.overhears)

    def keep_on(self, rate_per_s: float) -> None:
        """Sends unasked messages at that rate while the host lives."""
        agenda, rng = self._world.agenda, self._rng

        def say() -> None:
            if not self._world.closing:
                self._invent()
                self.keep_on(rate_per_s)

        agenda.after(rng.expovariate(rate_per_s), say)

    def asks(self, address: str, ask: Ask, give: Give) -> tuple[Ask, Give]:
        """Alters a request of the liar's lead, and the answer to it."""

        def asked(call: Call) -> Event:
            event = ask(call)
            self._remember(event)
            if isinstance(event, OpenAccess) and self._lies("asked_anew"):
                self._soon(lambda: self._say(self._requests.anew(event, address), address))
            if not self._lies("false_request"):
                return event
            return self._shown(self._requests.bend(event), address)

        def given(result: Result) -> None:
            event = ask(CALL)
            fit = _fit(event, result)
            give(fit)
            if isinstance(event, OpenAccess) and isinstance(fit, Openings) and isinstance(fit.rows[0], Opened):
                for granted in self._others.granted(address, event) if self._often(self._other_lives) else ():
                    self._speak_for_others(granted)

        return asked, given

    def hears(self, ask: Ask, principal: str, give: Give) -> None:
        """Passes a request on to the liar's lead, and alters the answer."""
        if self._rng.random() < self._odds * UNHEARD:
            event = ask(Call(0, principal))
            self._known.sees(event)
            self._world.seen["false_answer"] += 1
            give(self._answers.bend(event, self._known.error()))
            return
        heard: list[Event] = []

        def taken(call: Call) -> Event:
            heard.append(ask(call))
            self._known.sees(heard[0])
            return heard[0]

        def told(result: Result) -> None:
            if isinstance(heard[0], ChecksumBlocks) and self._often(self._false_checksums):
                self._world.seen["false_checksums"] += 1
                if self._rng.random() >= UNANSWERED:
                    give(self._answers.bend(heard[0], result))
                return
            give(self._answers.bend(heard[0], result) if self._lies("false_answer") else result)

        self._host.call(taken, principal, told)

    def _often(self, odds: float) -> bool:
        return odds > 0 and self._rng.random() < odds

    def _lies(self, kind: str) -> bool:
        if self._rng.random() >= self._odds:
            return False
        self._world.seen[kind] += 1
        return True

    def _remember(self, event: Event) -> None:
        self._known.sees(event)
        if isinstance(event, PeerRequest):
            self._said.append(event)
        me = self._host.description
        life = me.engine_id, me.incarnation
        if life not in self._known.lives:
            self._known.lives.append(life)

    def overhears(self, access_id: bytes, address: str) -> None:
        """Takes note that a peer asks for an access at an address: the liar may speak of it while it is open."""
        if self._rng.random() < self._odds and address != self._host.address:
            for _ in range(TIMES):
                self._soon(lambda: self._meddle(access_id, address))

    def _speak_for_others(self, of: Granted) -> None:
        """Speaks in the name of other lives about a push that the liar's lead may deliver."""
        others, rng = self._others, self._rng
        self._world.seen["other_life"] += 1

        def at_rest() -> None:
            self._say(others.at_rest(of), of.address)

        if rng.random() < TAKEN_OVER:
            stranger = others.stranger(self._introduction())
            life = stranger.peer.engine_id, stranger.peer.incarnation
            self._say(stranger, of.address, lambda: self._say(others.takes_over(of, life), of.address))
        elif rng.random() < GIVES_UP:
            self._soon(lambda: self._say(others.gives_up(of), of.address, at_rest), MIDST_S)
        else:
            self._soon(at_rest, MIDST_S)
        self._soon(at_rest)

    def _soon(self, do: Callable[[], None], span: Range = SOON_S) -> None:
        after_s = math.exp(self._rng.uniform(*map(math.log, span)))
        self._world.agenda.after(after_s, lambda: do() if self._can_speak else None)

    def _meddle(self, access_id: bytes, address: str) -> None:
        self._world.seen["meddled"] += 1
        self._say(self._requests.meddle(self._introduction(), access_id), address)

    def _invent(self) -> None:
        """Sends an invented or repeated message to any lead."""
        host, rng = self._host, self._rng
        if not self._can_speak:
            return
        others = [address for address in self._world.network.addresses if address != host.address]
        long_ago = self._others.remembered() if self._often(LONG_AGO * self._other_lives) else None
        if long_ago is not None:
            self._world.seen["other_life"] += 1
            self._say(self._others.at_rest(long_ago), long_ago.address)
            return
        address = rng.choice(others)
        if rng.random() < STOLEN and self._steal(address):
            return
        if self._said and rng.random() < AGAIN:
            said: PeerRequest = rng.choice(self._said)
            self._world.seen["said_again"] += 1
        else:
            said = self._requests.invent(self._introduction())
            self._world.seen["invented"] += 1
        self._say(said, address)

    def _steal(self, address: str) -> bool:
        """Speaks in the name of a life that the lead at an address has met. Returns False if there is none."""
        lead = self._world.network.lead(address)
        victim = self._stolen.victim(lead) if lead.up and not lead.stopped else None
        if victim is None:
            return False
        self._world.seen["stolen_name"] += 1
        if self._rng.random() < BEATS:
            self._stolen.beat(victim, lead)
            return True
        said, key = self._stolen.request(victim, self._introduction()), victim.key
        heard: list[Peer] = []

        def ask(call: Call) -> Event:
            known = next((peer for peer in lead.peers if peer.key == key), None)
            heard[:] = [known] if known is not None and protected(known) else []
            return replace(said, call=replace(call, proof=said.call.proof))

        def give(result: Result) -> None:
            if heard:
                check_refused(said, heard[0], result)

        self._world.network.rpc(self._host, address, ask, give, unaltered=True)
        return True

    @property
    def _can_speak(self) -> bool:
        return self._host.ready and not self._host.stopped and not self._world.closing

    def _introduction(self) -> HandshakeReceived:
        me, nbytes = self._host.description, self._world.pool.total_bytes
        doors = [self._host.door(rank).key for rank in range(me.world_size)]
        endpoints = tuple(RankEndpoint(i, loopback=LoopbackEndpoint(key, nbytes)) for i, key in enumerate(doors))
        return HandshakeReceived(CALL, me, endpoints, shows=self._rng.randbytes(32))

    def _say(self, said: PeerRequest, address: str, then: Callable[[], None] | None = None) -> None:
        """Sends a request. `then` runs after the answer to a handshake or a closing."""
        rng = self._rng
        self._said.append(said)

        def ask(call: Call) -> Event:
            if isinstance(said, RegisterPush):  # the receiver draws the ids
                return replace(said, call=call, access_id=rng.randbytes(16), reverse_access_id=rng.randbytes(16))
            return self._shown(replace(said, call=call), address)

        def give(result: Result) -> None:
            if isinstance(said, HandshakeReceived) and isinstance(result, Introduced):
                self._introduced(said.peer, result, address)
            if then is not None and isinstance(result, Closings | Introduced) and self._can_speak:
                then()

        self._world.network.rpc(self._host, address, ask, give, unaltered=True)

    def _shown(self, said: Event, address: str) -> Event:
        """Adds the proof that the sending life was told to show there, if that life is the liar's own."""
        if not isinstance(said, PeerCall):
            return said
        life = said.engine_id, said.incarnation
        proof = self._known.proofs.get((address, life), b"")
        if peer_key(*life) == self._host.life:
            there = [peer for peer in self._host.peers if peer.address == address]
            proof = there[-1].shows[0] if there else proof
        return replace(said, call=replace(said.call, proof=proof))

    def _introduced(self, life: EngineDescription, answer: Introduced, address: str) -> None:
        """Takes note that a life shook hands at an address."""
        network, there = self._world.network, answer.engine
        self._known.proofs[address, (life.engine_id, life.incarnation)] = answer.proof
        if (own := peer_key(life.engine_id, life.incarnation)) in network.personas:
            self._known.meets(address, (life.engine_id, life.incarnation))
            if self._rng.random() < STREAMS:
                network.stream(self._host, peer_key(there.engine_id, there.incarnation), (answer.proof, b""), own)


def _fit(asked: Event, result: Result) -> Result:
    """Returns the answer if it fits the original request, else the error with which the edge refuses it."""
    rows = getattr(asked, "openings", None) or getattr(asked, "leases", None)
    if isinstance(result, Openings | Renewed) and rows is not None and len(result.rows) != len(rows):
        return InternalError(Reason.PEER_FAILED, "other rows than were asked for")
    return result
