"""What a scripted engine is asked for, and what it keeps of it."""

from dataclasses import dataclass

from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.descriptors import Blocks
from kvgrpc.core.values.grants import OnAbort
from kvgrpc.sim.world.memory import Prompt


@dataclass(eq=False)
class Job:
    """A hand-over, pull or reservation, as its engine sees it."""

    name: str
    prompt: Prompt
    blocks: Blocks | None = None
    """All of the request's."""
    targets: Blocks | None = None
    """Those that a transfer fills."""
    use_tokens: int = 0
    have_tokens: int = 0
    transfer_id: str = ""
    lease_id: str = ""
    taken_back: bool = False
    part_epoch: int = 0


@dataclass(frozen=True)
class Terms:
    """What a hand-over states beside its blocks."""

    ttl_s: float | None = None
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    step: int = 0
    label: str = ""
    """The request id; empty: the request's name."""
    retry_key: str = ""
    """Idempotency key."""
    firm_ttl_s: float | None = None


@dataclass(frozen=True)
class Part:
    """One part of a push: the blocks of the tokens from `first` to `end`."""

    first: int
    end: int
    layers: LayerRange | None
    last: bool
    part_epoch: int
    terms: Terms


NOW, LATER, LOCAL = "now", "later", "local"
"""When a pull gets blocks; LOCAL: it needs none, all is found here."""


@dataclass(frozen=True)
class Wanted:
    """What a pull or a reservation states beside its content."""

    use_tokens: int = 0
    have_tokens: int = 0
    step: int = 0
    blocks: str = NOW
    """NOW, LATER, LOCAL, or ids that are listed whatever the engine's block manager says."""
    key: bytes = b""
    queue_s: float | None = None
    bytes_s: float | None = None
    label: str = ""
    retry_key: str = ""
    no_content: bool = False


def key_fields(method: str, key: str) -> dict[str, str]:
    """The fields of a call that has an idempotency key."""
    return {"key": key, "method": method} if key else {}
