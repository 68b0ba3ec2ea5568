"""What an operator may say of a mover."""

from dataclasses import dataclass

from kvgrpc.core.values.bridge import STAGING_BYTES


@dataclass(frozen=True)
class MoverSettings:
    """Of one rank."""

    bandwidth_limit_bytes_per_s: float | None = None
    """A cap on what this rank moves; None: no limit."""
    copy_threads: int = 2
    """That re-pack at once."""
    staging_bytes: int = STAGING_BYTES
    """Host memory that re-packs may take, from the first one on."""


DEFAULTS = MoverSettings()
