"""Refusals of a peer that has answered: it is another engine, no data path reaches it, or its ranks did not come."""

from kvgrpc.core.tables.peers import Peer
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason, Unavailable

RETRY_DELAY_S = 1.0
"""Delay before a handshake is worth a retry after a passing failure, in seconds."""


def check_engine(expected: str, peer: Peer) -> None:
    """Raises PreconditionFailed (WRONG_ENGINE) for an engine that was not expected; an empty `expected` allows any."""
    found = peer.description.engine_id
    if expected and found != expected:
        wrong = f"engine {found} answers there, {expected} was expected"
        raise PreconditionFailed(Reason.WRONG_ENGINE, wrong, metadata={"engine": found})


def no_data_path(peer: Peer) -> KVGrpcError:
    """Returns the error for a peer that is not reachable. Ranks that only failed to meet may do so at the next try."""
    ways = [way for way in peer.paths.values() if not way.data_path]
    path = next((way for way in ways if (way.rank, way.peer_rank) not in peer.meets), ways[0])
    reasons = "; ".join(f"{name}: {why}" for name, why in path.rejected) or "none is enabled on both sides"
    engine_id = peer.description.engine_id
    metadata = {"engine": engine_id}
    if (path.rank, path.peer_rank) in peer.meets:
        missed = f"rank {path.rank} did not meet rank {path.peer_rank} of engine {engine_id} ({reasons}): try again"
        return Unavailable(Reason.PEER_UNREACHABLE, missed, retry_delay_s=RETRY_DELAY_S, metadata=metadata)
    what = f"no data path reaches rank {path.peer_rank} of engine {engine_id} ({reasons})"
    return PreconditionFailed(Reason.NO_DATA_PATH, what, metadata=metadata)
