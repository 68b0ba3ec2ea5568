"""Settings of a mover that an operator may change."""

from dataclasses import dataclass

from kvgrpc.core.values.bridge import STAGING_BYTES


@dataclass(frozen=True)
class MoverSettings:
    """Settings of the mover of one rank."""

    bandwidth_limit_bytes_per_s: float | None = None
    """Maximum bytes per second that this rank moves; None: no limit."""
    copy_threads: int = 2
    """Number of threads that re-pack."""
    staging_bytes: int = STAGING_BYTES
    """Bytes of host memory for re-packs, allocated at the first one."""


DEFAULTS = MoverSettings()
