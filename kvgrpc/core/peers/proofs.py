"""Proofs: a caller speaks for a peer's life if it shows what that life was told in its handshake.

An engine's id and incarnation are no secrets. A life meets this lead by showing its proof or by answering at its
address. From then on, until it is declared dead, a handshake in its name must show its proof. A life whose name was
taken while it was declared dead gets the name back by showing its earlier proof.
"""

from collections.abc import Iterable

from kvgrpc.core.events import HandshakeReceived, PeerAnswered
from kvgrpc.core.tables.peers import Peer, PeerState, is_one_of
from kvgrpc.core.values.ids import PROOFS_MAX
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import PreconditionFailed, Reason, Unavailable

NEXT_LIFE_DELAY_S = 0.25
"""Delay before the handshake of an engine's next life is retried, in seconds: the last life's stream may have ended."""


@dataclass(frozen=True)
class Told:
    """Proofs that two lives have told each other, as in `Peer`."""

    asks: tuple[bytes, ...]
    shows: tuple[bytes, ...]
    elder: tuple[bytes, ...] = ()
    anew: bool = False
    """True if another caller spoke for this life until now."""


def introduced(known: Peer | None, event: HandshakeReceived) -> Told:
    """Returns the proofs for a life that introduces itself. Raises PreconditionFailed (NOT_PROVED) if a life that met
    this lead, and is not dead, shows no proof.
    """
    if known is None:
        return Told((event.asks,), (event.shows,))
    elder = any(is_one_of(proof, known.elder) for proof in event.proofs)
    if is_one_of(event.shows, known.shows) or any(known.proves(proof) for proof in event.proofs):
        shows = _join((event.shows,), known.shows)
        # A caller that shows both lives' proofs is both: the life readmitted without a proof was this one.
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
    """Returns the proofs for a life that answered at a dialled address. Raises PreconditionFailed (PEER_FAILED) for a
    life that lives at another address.
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
    # The peer answers at this life's address. An earlier caller of that name may have been a stranger, so its proof is
    # dropped.
    return Told((event.asks,), _join((event.shows,), known.shows), known.elder)


def also_told(known: Peer, shows: bytes, asks: bytes = b"") -> Told:
    """Returns the proofs for a life that answered where it lives, in a handshake that does not admit it. It may have
    been told these proofs, and nothing else: if one side forgot them, both could refuse each other's proofs for ever.
    """
    return Told(_join(known.asks, (asks,) if asks else ()), _join(known.shows, (shows,)), known.elder)


def living_at(peers: Iterable[Peer], address: str, engine_id: str) -> str:
    """Returns the life that met this lead and was last at this address, of the expected engine if any; empty: none. It
    is shown our proof even if it declared us dead: it would admit us without one, but believe nothing about before.
    """
    met = [peer for peer in peers if peer.met and peer.lives_at(address)]
    here = [peer.key for peer in met if engine_id in ("", peer.description.engine_id)]
    return here[-1] if here else ""


def check_next_life(others: list[Peer], at: str) -> None:
    """Checks a life that introduces itself while other lives of its engine are connected. Raises Unavailable
    (NOT_PROVED) unless it answered where they live.
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
    """Joins proofs, each once, up to the number that a handshake may show."""
    return tuple(dict.fromkeys(first + more))[:PROOFS_MAX]
