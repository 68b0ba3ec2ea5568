"""Refusals of a peer that has answered: it is another engine, or no data path reaches it."""

from kvgrpc.core.tables.peers import Peer
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason


def check_engine(expected: str, peer: Peer) -> None:
    """Raises PreconditionFailed (WRONG_ENGINE) for an engine that was not expected; an empty `expected` allows any."""
    found = peer.description.engine_id
    if expected and found != expected:
        wrong = f"engine {found} answers there, {expected} was expected"
        raise PreconditionFailed(Reason.WRONG_ENGINE, wrong, metadata={"engine": found})


def no_data_path(peer: Peer) -> KVGrpcError:
    """Returns the error for a peer that is not reachable."""
    path = next(path for path in peer.paths.values() if not path.data_path)
    reasons = "; ".join(f"{name}: {why}" for name, why in path.rejected) or "none is enabled on both sides"
    return PreconditionFailed(
        Reason.NO_DATA_PATH,
        f"no data path reaches rank {path.peer_rank} of engine {peer.description.engine_id} ({reasons})",
        metadata={"engine": peer.description.engine_id},
    )
