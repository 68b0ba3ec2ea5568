"""A liar's messages in the name of another engine's life that has met the receiving lead: without its proof, and with
the maximum of every number that only grows. All of them must be refused.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from kvgrpc.core.events import (
    AccessClosing,
    AccessSettling,
    Call,
    ChecksumBlocks,
    CloseAccess,
    CloseOutcome,
    HandshakeReceived,
    OpenAccess,
    PartsReady,
    PeerAlive,
    PostSend,
    ReadyPart,
    SettleAccess,
)
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.values.content import ContentClaim
from kvgrpc.core.values.sends import MEET, SendAsk
from kvgrpc.errors import KVGrpcError
from sim.hosts.false_requests import CALL, PeerRequest
from sim.hosts.known import UINT32, UINT64, Known
from sim.rules import Rule, broken
from sim.world.network import NetworkLead, Result


class StolenNames:
    """The stolen names of one liar."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._rng: Random = known.rng
        self._kinds: tuple[Callable[[Call, str, int], PeerRequest], ...] = (
            lambda call, id_, life: OpenAccess(call, id_, life, (self._opening(),)),
            lambda call, id_, life: SettleAccess(
                call, id_, life, (AccessSettling(known.access_id(), last=True, part=UINT32),)
            ),
            lambda call, id_, life: CloseAccess(call, id_, life, (self._closing(),)),
            lambda call, id_, life: PartsReady(
                call, id_, life, known.access_id(), (ReadyPart(UINT32, (), (), None, last=True),)
            ),
            lambda call, id_, life: ChecksumBlocks(call, id_, life, known.access_id(), ((known.lists(()), None),)),
            lambda call, id_, life: PostSend(call, id_, life, b"", SendAsk(0, 0, UINT32, MEET)),
            lambda call, id_, life: PostSend(call, id_, life, known.access_id(), SendAsk(0, 0, UINT32, UINT64)),
        )

    def victim(self, lead: NetworkLead) -> Peer | None:
        """Returns a life that has met a lead, as everybody can learn there."""
        met = [peer for peer in lead.peers if protected(peer) and self._known.is_honest(peer)]
        return self._rng.choice(met) if met else None

    def request(self, victim: Peer, me: HandshakeReceived) -> PeerRequest:
        """Returns a request of any kind."""
        life, proof = victim.description, self._proof()
        if self._rng.randrange(4):
            return self._rng.choice(self._kinds)(replace(CALL, proof=proof), life.engine_id, life.incarnation)
        told = replace(life, memory_generation=UINT32, address=me.peer.address)
        return replace(me, peer=told, shows=self._rng.randbytes(32), proofs=(proof,) if proof else ())

    def beat(self, victim: Peer, lead: NetworkLead) -> None:
        """Sends a beat on a liveness stream of the liar's own."""
        heard, state = victim.heard, victim.state
        lead.handle(PeerAlive(victim.key, self._proof()))
        if (victim.heard, victim.state) != (heard, state):
            broken(Rule.R2, f"a stranger has kept {victim.key} alive")

    def _opening(self) -> AccessOpening:
        known = self._known
        return AccessOpening(known.access_id(), known.token(), ContentClaim(16, b""), part_epoch=UINT32)

    def _closing(self) -> AccessClosing:
        return AccessClosing(self._known.access_id(), self._rng.choice(list(CloseOutcome)), quiesced=True)

    def _proof(self) -> bytes:
        return self._rng.choice((b"", b"\0", self._rng.randbytes(32)))


def protected(peer: Peer | None) -> bool:
    """Returns True if a life owns its name, so that nobody else may speak for it."""
    return peer is not None and peer.met and peer.state is not PeerState.DEAD


def check_refused(said: PeerRequest, victim: Peer, result: Result) -> None:
    """Checks that a request in the victim's name was refused."""
    if not isinstance(result, KVGrpcError):
        broken(Rule.R2, f"a stranger has said {type(said).__name__} in the name of {victim.key}, and was heard")
