"""Calls into data paths that return errors as text, so that none ends the mover's thread."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvgrpc.core.values.endpoints import RankEndpoint
from kvgrpc.datapath.base import DataPath, DataPathFailed, NotMet, ReachAttempt, Remote, SentByPeers, WrittenByPeers
from kvgrpc.datapath.questions import Answer, Question
from kvgrpc.errors import KVGrpcError

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")


def ask_before(path: DataPath, endpoint: RankEndpoint) -> Question | str | None:
    """Returns the question to ask the peer's process first, or None. A text says why the path cannot be used."""
    return _made_or_why(f"{path.name} broke while connecting", path.question, endpoint)


def connect(path: DataPath, endpoint: RankEndpoint, answer: Answer | str = "") -> Remote | str:
    """Returns the connected peer, or why it cannot be reached this way."""
    return _made_or_why(f"{path.name} broke while connecting", path.connect, endpoint, answer)


def reach(
    path: SentByPeers, rank: int, peer: str, endpoint: RankEndpoint, reached: Callable[[Remote | NotMet], None]
) -> ReachAttempt | DataPathFailed | str:
    """Returns the attempt to reach the peer's rank, or why it cannot be reached this way. DataPathFailed may pass."""

    def reach_or_why() -> ReachAttempt | DataPathFailed:
        try:
            return path.reach(rank, peer, endpoint, reached)
        except DataPathFailed as error:
            return error

    return _made_or_why(f"a data path broke while reaching rank {endpoint.rank} of {peer}", reach_or_why)


def offer(path: DataPath, endpoint: RankEndpoint, peer: str) -> RankEndpoint | str:
    """Returns `endpoint` with this path's part, or why there is none."""
    return _made_or_why(f"{path.name} broke while offering this rank's memory", path.offer, endpoint, peer)


def _made_or_why(broke: str, make: Callable[..., _Made], *arguments: Any) -> _Made | str:
    """Returns what a call makes, or why it makes nothing. `broke` is logged for a defect of the path."""
    try:
        return make(*arguments)
    except KVGrpcError as error:
        return error.message
    except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
        _log.exception("%s", broke)
        return text(error)


def progress(path: DataPath) -> None:
    """Gives the path a turn."""
    try:
        path.progress()
    except Exception:  # noqa: BLE001 - logged, and the thread goes on
        _log.exception("%s made no progress", path.name)


def rekey(name: str, path: WrittenByPeers) -> str:
    """Re-keys a path. Returns why it could not, or an empty text."""
    try:
        path.rekey()
    except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
        _log.exception("%s could not be re-keyed", name)
        return f"{name} could not be re-keyed: {error}"
    return ""


def close(path: DataPath) -> str:
    """Closes a path. Returns why it may still access memory, or an empty text."""
    try:
        path.close()
    except Exception as error:  # noqa: BLE001 - logged, and the thread goes on
        _log.exception("closing %s failed", path.name)
        return f"{path.name} could not be closed: {error}"
    return ""


def late_writes(paths: Iterable[DataPath]) -> list[str]:
    """Returns why writes of peers may still land, for each path to which that applies."""
    found = [why for path in paths if isinstance(path, WrittenByPeers) and (why := path.late_writes)]
    for why in found:
        _log.error("a peer's write has not ended, and %s", why)
    return found


def text(error: Exception) -> str:
    """Returns a foreign error as text."""
    return f"{type(error).__name__}: {error}"
