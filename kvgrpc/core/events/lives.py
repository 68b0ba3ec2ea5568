"""Events of this engine itself: its lives, its memory, and time."""

from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.records import dataclass


@dataclass(frozen=True)
class LeasesVoided:
    """The engine took the blocks of these leases back: it set their void flags."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True)
class LifeBegan:
    """A new incarnation began: the lead started, or an engine attached or was lost."""

    incarnation: int
    secret: bytes
    description: EngineDescription | None
    """None while there is no pool."""
    engine_attached: bool = False
    sets_aside: bool = True
    """True if the engine keeps blocks in quarantine out of use."""
    mirrored: bool = False
    """True if no data path reaches the engine's memory: peers read mirrors of it in host memory."""
    expects_pushes: bool = False
    """True if the engine is told of registrations, and says which pushes it will compute."""


@dataclass(frozen=True)
class MemoryGone:
    """The memory of all earlier lives is proved to be at rest, and gone."""


@dataclass(frozen=True)
class Tick:
    """Time has passed, and nothing else happened."""
