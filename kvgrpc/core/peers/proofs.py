"""Who speaks for a life of a peer: who shows what that life was told by its handshake.

An engine's id and its incarnation are known to everybody. A life that has met this lead, by showing its proof or by
answering at its address, has its name until it is declared dead: a handshake in its name shows its proof. One whose
name was taken while it was dead has it back as soon as it shows what it was told before.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvgrpc.core.events import HandshakeReceived, PeerAnswered
from kvgrpc.core.tables.peers import Peer, PeerState, is_one_of
from kvgrpc.core.values.ids import PROOFS_MAX
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable

NEXT_LIFE_DELAY_S = 0.25
"""A handshake of an engine's next life is worth another try after that: the stream of the one before may have ended."""


@dataclass(frozen=True)
class Told:
    """What two lives have told each other, as in `Peer`."""

    asks: tuple[bytes, ...]
    shows: tuple[bytes, ...]
    elder: tuple[bytes, ...] = ()
    anew: bool = False
    """Who spoke for this life until now was another one."""


def introduced(known: Peer | None, event: HandshakeReceived) -> Told:
    """By a life that introduces itself. Raises PreconditionFailed (NOT_PROVED) where it is known, and shows nothing."""
    if known is None:
        return Told((event.asks,), (event.shows,))
    elder = any(is_one_of(proof, known.elder) for proof in event.proofs)
    if is_one_of(event.shows, known.shows) or any(known.proves(proof) for proof in event.proofs):
        shows = _join((event.shows,), known.shows)
        # Who shows what both were told is both: the life that was readmitted without a proof was this one.
        return Told(_join(known.asks, known.elder), shows) if elder else Told(known.asks, shows, known.elder)
    if elder:
        return Told(known.elder, (event.shows,), anew=True)
    if known.met and known.state is not PeerState.DEAD:
        raise PreconditionFailed(
            Reason.NOT_PROVED,
            f"this life of engine {known.description.engine_id} has shaken hands before: shake hands with its proofs",
        )
    return Told((event.asks,), (event.shows,), _elder(known))


def reached(known: Peer | None, event: PeerAnswered, at: str) -> Told:
    """By a life that was dialled at an address and has answered. Raises PreconditionFailed (PEER_FAILED) for one that
    is known at another address.
    """
    if known is None:
        return Told((event.asks,), (event.shows,))
    if known.proves(event.asks):
        return Told(known.asks, _join((event.shows,), known.shows), known.elder)
    if known.state is PeerState.DEAD:
        return Told((event.asks,), (event.shows,), _elder(known))
    if known.met and not known.lives_at(at):
        engine_id = known.description.engine_id
        raise PreconditionFailed(Reason.PEER_FAILED, f"engine {engine_id} is connected, and not at {at}")
    # It answers where this life lives: what was told to who introduced itself as this life may be a stranger's.
    return Told((event.asks,), _join((event.shows,), known.shows), known.elder)


def living_at(peers: Iterable[Peer], address: str, engine_id: str) -> str:
    """The life that met this lead and was there last, of that engine if one is expected; empty: none. A lead that has
    declared us dead takes us without a proof, too, but believes nothing that we say of what was before.
    """
    met = [peer for peer in peers if peer.met and peer.lives_at(address)]
    here = [peer.key for peer in met if engine_id in ("", peer.description.engine_id)]
    return here[-1] if here else ""


def check_next_life(others: list[Peer], at: str) -> None:
    """A life introduces itself while others of its engine are connected. Raises Unavailable (NOT_PROVED), unless it has
    answered where they live.
    """
    for other in others:
        if not (at and other.lives_at(at)):
            raise Unavailable(
                Reason.NOT_PROVED,
                f"another life of engine {other.description.engine_id} is connected: retry once its stream has ended",
                retry_delay_s=NEXT_LIFE_DELAY_S,
            )


def _elder(known: Peer) -> tuple[bytes, ...]:
    return _join(known.elder, known.asks) if known.met else known.elder


def _join(first: tuple[bytes, ...], more: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Each once, and no more than a handshake may show."""
    return tuple(dict.fromkeys(first + more))[:PROOFS_MAX]
