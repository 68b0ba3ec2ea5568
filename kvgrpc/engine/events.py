"""What `Engine.poll` tells. `transfer` is the Pull or HandOver that the event is about."""

from dataclasses import dataclass

from kvgrpc.core.transfers import Next
from kvgrpc.engine.handles import HandOver, Pull
from kvgrpc.errors import Reason


@dataclass(frozen=True)
class PullOpened:
    """The source said yes: `use_tokens` tokens of KV will come."""

    transfer: Pull
    use_tokens: int


@dataclass(frozen=True)
class Received:
    """The KV of the first `use_tokens` tokens is in the blocks, and the blocks are the engine's again."""

    transfer: Pull
    use_tokens: int


@dataclass(frozen=True)
class Failed:
    """It is over without success. Returns nothing: BlocksReturned follows."""

    transfer: Pull | HandOver
    reason: Reason
    message: str
    next: Next
    cancelled: bool = False


@dataclass(frozen=True)
class BlocksReturned:
    """The transfer's blocks are the engine's again."""

    transfer: Pull | HandOver


Event = PullOpened | Received | Failed | BlocksReturned
