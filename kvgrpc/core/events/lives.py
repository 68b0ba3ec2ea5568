"""What happens to this engine itself: its lives, its memory, and time."""

from dataclasses import dataclass

from kvgrpc.core.values.compatibility import EngineDescription


@dataclass(frozen=True)
class LeasesVoided:
    """The engine took the blocks of these leases back (their void flags are set)."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True)
class LifeBegan:
    """A new incarnation: the lead started, or an engine attached or was lost."""

    incarnation: int
    secret: bytes
    description: EngineDescription | None
    """None while there is no pool."""
    engine_attached: bool = False
    sets_aside: bool = True
    """The engine keeps blocks out of use while they are in quarantine."""
    mirrored: bool = False
    """No data path reaches its memory: its ranks have mirrors of it in host memory, which peers read."""
    expects_pushes: bool = False
    """It is told of what destinations register for, and says what of it is to come."""


@dataclass(frozen=True)
class MemoryGone:
    """The memory of all lives before this one is proved to be at rest, and gone."""


@dataclass(frozen=True)
class Tick:
    """Nothing but the passing of time."""
