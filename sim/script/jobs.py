"""Records of what a scripted engine is asked for."""

from dataclasses import dataclass

from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.grants import OnAbort
from sim.world.memory import Prompt


@dataclass(eq=False)
class ScriptJob:
    """A hand-over, pull or reservation, as its engine sees it."""

    name: str
    prompt: Prompt
    blocks: Blocks | None = None
    """All blocks of the request."""
    targets: Blocks | None = None
    """Blocks that a transfer fills."""
    use_tokens: int = 0
    have_tokens: int = 0
    transfer_id: str = ""
    lease_id: str = ""
    taken_back: bool = False
    part_epoch: int = 0


@dataclass(frozen=True)
class HandOverTerms:
    """Terms of a hand-over, apart from its blocks."""

    ttl_s: float | None = None
    consumers: int = 1
    on_abort: OnAbort = OnAbort.RELEASE
    step: int = 0
    label: str = ""
    """Request id; empty means the request's name."""
    retry_key: str = ""
    """Idempotency key."""
    firm_ttl_s: float | None = None


@dataclass(frozen=True)
class ScriptPart:
    """One part of a push: the blocks of tokens [first, end)."""

    first: int
    end: int
    layers: LayerRange | None
    last: bool
    part_epoch: int
    terms: HandOverTerms


NOW, LATER, LOCAL = "now", "later", "local"
"""When a pull gets blocks. LOCAL means that it needs none: everything was found locally."""


@dataclass(frozen=True)
class ReceiveTerms:
    """Terms of a pull or a reservation, apart from its content."""

    use_tokens: int = 0
    have_tokens: int = 0
    step: int = 0
    blocks: str = NOW
    """NOW, LATER, LOCAL, or block ids, which are used regardless of the engine's block manager."""
    key: bytes = b""
    queue_s: float | None = None
    bytes_s: float | None = None
    label: str = ""
    retry_key: str = ""
    no_content: bool = False


def key_fields(method: str, key: str) -> dict[str, str]:
    """Returns the fields of a call that has an idempotency key."""
    return {"key": key, "method": method} if key else {}
