"""The inputs and outputs of a scheduler's policy; see `policy`."""

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

from kvgrpc.core.tables.transfers import Side
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.layout import Group
from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import NextStep, Reason

Table: TypeAlias = Sequence[Sequence[int]]
"""The blocks of a request, for each group in token order from its first token on; of a state, the running one last."""
DROPPED = -1
"""Marks a block in a table that its engine let go, since its tokens left the group's window: it is never given or
taken.
"""
Lists: TypeAlias = tuple[tuple[int, ...], ...]
"""Blocks of each group, for one transfer."""


class ModeChoice(Enum):
    """The side that begins a transfer."""

    PULL = "pull"
    PUSH = "push"
    AUTO = "auto"
    """For given KV: it is pushed once a destination has registered for it, else handed over to readers at its end."""


class OnLoss(Enum):
    """The fate of a request whose KV does not come."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class Outcome(Enum):
    """The way in which a request left the scheduler."""

    COMPLETE = "complete"
    """It stopped by itself or reached its length: its KV is whole."""
    ABORTED = "aborted"
    """Any other end: its KV is not handed over."""


class RequestSide(Enum):
    """One of a request's two transfers."""

    TAKE = "take"
    GIVE = "give"


@dataclass(frozen=True)
class Rules:
    """The settings of one engine's policy."""

    groups: tuple[Group, ...]
    on_loss: OnLoss = OnLoss.FAIL
    recompute_threshold_tokens: int = 64
    """Minimum number of tokens missing here for which a prefill engine takes history from its decode engine."""
    backoff_tokens: int = 0
    """Tokens at the prompt's end that the decode engine always computes: 1 if a group keeps states. The decode engine
    alone computes a prompt that has no more tokens.
    """
    layer_ranges: tuple[LayerRange, ...] = ()
    """Layer ranges in which pushes hand over each part, one after the other; empty: all layers at once."""
    staged: bool = False
    """Transfers move copies of blocks in host memory: computed blocks are saved there, received blocks are loaded."""
    requests_max: int = 65_536


@dataclass(frozen=True)
class Take:
    """KV that a request can have from elsewhere."""

    mode: ModeChoice
    offer_tokens: int
    """Tokens that a pull's grant offers, or that a push's source will compute."""
    keep: bool = False
    """The source of a push is not let go if this engine gives up: another engine may come for the push."""


@dataclass(frozen=True)
class Give:
    """Another engine, or the request's next turn, will want the request's KV."""

    mode: ModeChoice
    prefill: bool = True
    """True: this engine only prefills the request. False: it decodes, and offers its KV for the next turn."""


@dataclass(frozen=True)
class Arrival:
    """A request as it arrived."""

    request_id: str
    prompt_tokens: int
    """0 if the prompt has no token ids: its KV has no name, and neither comes nor goes."""
    take: Take | None = None
    give: Give | None = None
    needs_all_outputs: bool = False
    """Every prompt token must go through this engine, for example for prompt log-probabilities: nothing is taken."""
    whole_units: bool = False
    """The prompt is known by digests of whole units of tokens, and can be named only at these lengths or its own."""
    wanted: object = None
    """The names and content of its transfers: tokens, adapter, salt, keys, grants, intent. It is only compared, by
    value, and must not change.
    """


@dataclass(frozen=True)
class Loss:
    """The reason why KV did not come, or did not go."""

    reason: Reason
    message: str
    next: NextStep
    phase: str = ""
    """Phase of the transfer's failure; empty if there was no transfer, or it did not fail."""
    side: Side | None = None
    """The engine at which it failed."""
    rank: int | None = None


# ---- for the shell that has the transfers


@dataclass(frozen=True)
class Begin:
    """Pulls what the request's grant offers: it is held and renewed from now on."""

    request_id: str
    use_tokens: int


@dataclass(frozen=True)
class Start:
    """Gives a pull its blocks. No blocks: everything was found here, and the source is let go."""

    request_id: str
    blocks: Lists
    have_tokens: int
    after_step: int


@dataclass(frozen=True)
class Reserve:
    """Reserves blocks for a push, and registers it at its source. No blocks: see `Start`."""

    request_id: str
    blocks: Lists
    have_tokens: int
    use_tokens: int
    after_step: int


@dataclass(frozen=True)
class HandOverBlocks:
    """Hands finished blocks over to readers; they belong to the transfer until it returned them."""

    request_id: str
    blocks: Lists
    tokens: int
    after_step: int


@dataclass(frozen=True)
class HandOverPart:
    """Hands over a part of a push; the blocks belong to the transfer until it returned them."""

    request_id: str
    blocks: Lists
    layers: LayerRange | None
    last: bool
    after_step: int


@dataclass(frozen=True)
class StartOver:
    """Discards the parts of a push so far: a prefill was preempted."""

    request_id: str


@dataclass(frozen=True)
class GiveUp:
    """Tells the destination that this side cannot deliver its push."""

    request_id: str
    message: str


@dataclass(frozen=True)
class Cancel:
    """Ends a transfer."""

    request_id: str
    side: RequestSide
    message: str


Task = Begin | Start | Reserve | HandOverBlocks | HandOverPart | StartOver | GiveUp | Cancel


# ---- for the scheduler


@dataclass(frozen=True)
class Save:
    """A staged engine copies these blocks to host memory, in the step that computed them."""

    request_id: str
    blocks: Lists


@dataclass(frozen=True)
class Load:
    """A staged engine copies these blocks from host memory, then calls `Policy.loaded`."""

    request_id: str
    blocks: Lists


@dataclass(frozen=True)
class LoadEnded:
    """The awaited KV has come, or never will: told once for every allocation with tokens to come. Either way the blocks
    are the scheduler's again.
    """

    request_id: str
    tokens: int
    """Tokens from the prompt's start that have KV; after a loss, the tokens that had it before. Even without a loss
    there may be fewer than awaited, if the source's tokens differ from there on.
    """
    loss: Loss | None
    blocks: Lists
    """After a loss, the blocks that hold nothing of use."""
    on_loss: OnLoss


@dataclass(frozen=True)
class SendEnded:
    """Kept blocks are the scheduler's again: told once for every request whose blocks were to be kept."""

    request_id: str
    loss: Loss | None


@dataclass(frozen=True)
class TakeLost:
    """KV will not come, and no blocks were allocated for it yet. By OnLoss.FAIL the scheduler must end the request."""

    request_id: str
    loss: Loss
    on_loss: OnLoss


Told = Save | Load | LoadEnded | SendEnded | TakeLost


# ---- for the scheduler, by the shell that has the transfers


@dataclass(frozen=True)
class ReservedAt:
    """Blocks for a push are reserved; `grant` is for its source, if that is not known here."""

    request_id: str
    grant: bytes


@dataclass(frozen=True)
class Provisional:
    """These layers of a push are there. Each Provisional replaces the last one. Fewer layers, or a later epoch, mean
    that the prefill started over: results computed from the others must be discarded.
    """

    request_id: str
    layers_done: tuple[LayerRange, ...]
    part_epoch: int


News = Told | ReservedAt | Provisional


@dataclass(frozen=True)
class Admitted:
    """The way in which a request is computed here."""

    prompt_tokens: int
    """Prompt tokens to compute: all, or all but those that the decode engine computes."""
    one_token: bool
    """Only the prefill is wanted: one token is enough."""


@dataclass(frozen=True)
class Match:
    """KV that can come from elsewhere beyond what is computed here."""

    tokens: int
    """Number of further prompt tokens. They come beside the engine's steps, never within one."""


@dataclass(frozen=True)
class Finished:
    """The fate of the blocks of a request that left."""

    keep: bool
    """The blocks must not be freed before SendEnded, or before LoadEnded if they are still being filled."""
    handed_over: bool
    """A grant, or a push, exists for the engine that comes next."""
