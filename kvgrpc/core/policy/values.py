"""What goes into a scheduler's policy, and what comes out of it; see `policy`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kvgrpc.core.tables.transfers import Side as End
from kvgrpc.core.values.calls import LayerRange
from kvgrpc.core.values.layout import Group
from kvgrpc.errors import NextStep, Reason

Table: TypeAlias = Sequence[Sequence[int]]
"""The blocks of a request, for each group in token order from its first token on; of a state, the running one last."""
DROPPED = -1
"""In a table, a block that its engine has let go, since its tokens have left the group's window: never given or taken.
"""
Lists: TypeAlias = tuple[tuple[int, ...], ...]
"""Blocks of each group, for one transfer."""


class Mode(Enum):
    """Which side begins a transfer."""

    PULL = "pull"
    PUSH = "push"
    AUTO = "auto"
    """Of what is given: whichever side comes first. It is pushed from when a destination has registered for it, and
    handed over to readers at its end where none has.
    """


class OnLoss(Enum):
    """What becomes of a request whose KV does not come."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


class Outcome(Enum):
    """How a request left the scheduler."""

    COMPLETE = "complete"
    """It stopped by itself or reached its length: its KV is whole."""
    ABORTED = "aborted"
    """Any other end: its KV is not handed over."""


class Side(Enum):
    """Which of a request's two transfers."""

    TAKE = "take"
    GIVE = "give"


@dataclass(frozen=True)
class Rules:
    """What one engine's policy goes by."""

    groups: tuple[Group, ...]
    on_loss: OnLoss = OnLoss.FAIL
    recompute_threshold_tokens: int = 64
    """A prefill engine takes history from its decode engine if at least so many tokens of it are missing here."""
    backoff_tokens: int = 0
    """Tokens at the prompt's end that the decode engine computes in any case: 1 where a group keeps states. A prompt of
    no more is computed by the decode engine alone.
    """
    layer_ranges: tuple[LayerRange, ...] = ()
    """Pushes hand over each part in these ranges of layers, one after the other; empty: in all layers at once."""
    staged: bool = False
    """Transfers move copies of the blocks in host memory: what was computed is saved there, what comes is loaded."""
    requests_max: int = 65_536


@dataclass(frozen=True)
class Take:
    """KV that a request can have from elsewhere."""

    mode: Mode
    offer_tokens: int
    """For a pull what its grant offers, for a push what the source will compute."""
    keep: bool = False
    """If this engine gives up, another one may come for a push: its source is not let go."""


@dataclass(frozen=True)
class Give:
    """Another engine, or the request's next turn, will want its KV."""

    mode: Mode
    prefill: bool = True
    """All that this engine does for the request is its prefill. Else it decodes, and offers what it has for the next
    turn.
    """


@dataclass(frozen=True)
class Arrival:
    """A request, as it came in."""

    request_id: str
    prompt_tokens: int
    """0 where the prompt has no token ids: its KV has no name, and neither comes nor goes."""
    take: Take | None = None
    give: Give | None = None
    needs_all_outputs: bool = False
    """Every prompt token has to go through this engine, for prompt log-probabilities say: nothing is taken."""
    whole_units: bool = False
    """It is known by digests of whole units of tokens, and cannot be named at any other length but its own."""
    wanted: object = None
    """All that its transfers are called and made of: tokens, adapter, salt, keys, grants, intent. Only compared, and by
    value: it must not change any more.
    """


@dataclass(frozen=True)
class Loss:
    """Why KV did not come, or did not go."""

    reason: Reason
    message: str
    next: NextStep
    phase: str = ""
    """The transfer's failure; empty where there was no transfer, or it did not fail."""
    side: End | None = None
    """At which of the two engines."""
    rank: int | None = None


# ---- for the shell that has the transfers


@dataclass(frozen=True)
class Begin:
    """Pulls what the request's grant offers: it is held and renewed from now on."""

    request_id: str
    use_tokens: int


@dataclass(frozen=True)
class Start:
    """Gives a pull its blocks. None: everything was found here, and the source is let go."""

    request_id: str
    blocks: Lists
    have_tokens: int
    after_step: int


@dataclass(frozen=True)
class Reserve:
    """Reserves blocks for a push, and registers it at its source. No blocks: as with `Start`."""

    request_id: str
    blocks: Lists
    have_tokens: int
    use_tokens: int
    after_step: int


@dataclass(frozen=True)
class HandOver:
    """Hands finished blocks over to readers; they belong to the transfer until it returned them."""

    request_id: str
    blocks: Lists
    tokens: int
    after_step: int


@dataclass(frozen=True)
class Part:
    """Hands over a part of a push; the blocks belong to the transfer until it returned them."""

    request_id: str
    blocks: Lists
    layers: LayerRange | None
    last: bool
    after_step: int


@dataclass(frozen=True)
class StartOver:
    """The parts of a push count no more: a prefill was preempted."""

    request_id: str


@dataclass(frozen=True)
class GiveUp:
    """This side cannot deliver its push."""

    request_id: str
    message: str


@dataclass(frozen=True)
class Cancel:
    """Ends a transfer."""

    request_id: str
    side: Side
    message: str


Task = Begin | Start | Reserve | HandOver | Part | StartOver | GiveUp | Cancel


# ---- for the scheduler


@dataclass(frozen=True)
class Save:
    """Staged engines copy these blocks to host memory, in the step that computed them."""

    request_id: str
    blocks: Lists


@dataclass(frozen=True)
class Load:
    """Staged engines copy these blocks from host memory, then call `Policy.loaded`."""

    request_id: str
    blocks: Lists


@dataclass(frozen=True)
class LoadEnded:
    """What was to come is there, or will not be: told once for every allocation with tokens to come. The blocks are the
    scheduler's again in either case.
    """

    request_id: str
    tokens: int
    """Tokens of the prompt, from its start on, whose KV is there; after a loss, those that were there before. Without
    one, too, they may be fewer than were to come: the source had other tokens from there on.
    """
    loss: Loss | None
    blocks: Lists
    """After a loss, the blocks that hold nothing of use."""
    on_loss: OnLoss


@dataclass(frozen=True)
class SendEnded:
    """Blocks that were kept are the scheduler's again: told once for every request whose blocks were to be kept."""

    request_id: str
    loss: Loss | None


@dataclass(frozen=True)
class TakeLost:
    """KV will not come, and blocks for it were not allocated yet. By OnLoss.FAIL the request is to be ended."""

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
    """These layers of a push are there. It replaces the last one: with fewer layers, or of a later epoch, it says that
    the prefill started over, and that what was computed from the others is to be discarded.
    """

    request_id: str
    layers_done: tuple[LayerRange, ...]
    part_epoch: int


News = Told | ReservedAt | Provisional


@dataclass(frozen=True)
class Admitted:
    """How a request is to be computed here."""

    prompt_tokens: int
    """Tokens of its prompt: all, or all but those that the decode engine computes."""
    one_token: bool
    """Only its prefill is of interest: one token is enough."""


@dataclass(frozen=True)
class Match:
    """What can be had from elsewhere beyond what is computed here."""

    tokens: int
    """More of the prompt's tokens. They come beside the engine's steps, never within one."""


@dataclass(frozen=True)
class Finished:
    """What becomes of the blocks of a request that left."""

    keep: bool
    """They are not to be freed before SendEnded, or LoadEnded where they were still being filled."""
    handed_over: bool
    """There is a grant, or a push, for the engine that comes next."""
