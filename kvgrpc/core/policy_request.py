"""One request as a scheduler's policy knows it, and the arithmetic of its tokens and blocks."""

from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.calls import LayerRange
from kvgrpc.core.content import UNIT_TOKENS, largest_use
from kvgrpc.core.layout import GroupKind
from kvgrpc.core.policy_values import Arrival, Lists, Loss, Rules, Table
from kvgrpc.errors import InvalidRequest, Reason


class Stage(Enum):
    """Of what is taken, or given."""

    NONE = "none"
    OPEN = "open"
    """Nothing of this engine's memory is in use for it."""
    BUSY = "busy"
    """Blocks belong to a transfer."""
    LOADING = "loading"
    """A staged engine copies what came."""
    OVER = "over"


@dataclass(eq=False)
class Request:
    """From its arrival until it has left and nothing of it is kept."""

    arrival: Arrival
    take: Stage = Stage.NONE
    use_tokens: int = 0
    have_tokens: int = 0
    filled: Lists = ()
    """Blocks that are being filled."""
    take_loss: Loss | None = None
    give: Stage = Stage.NONE
    give_loss: Loss | None = None
    sent: list[int] = field(default_factory=list)
    """Blocks of each group that parts of a push have handed over."""
    saved_tokens: int = 0
    over: bool = False
    """It left the scheduler."""

    @property
    def busy(self) -> bool:
        return self.take in (Stage.BUSY, Stage.LOADING) or self.give is Stage.BUSY

    @property
    def prefills(self) -> bool:
        """See `prefills`."""
        return prefills(self.arrival)

    def given_tokens(self, rules: Rules, computed_tokens: int) -> int:
        """Tokens whose KV somebody will want: of a prefill no more than the prompt."""
        if self.give not in (Stage.OPEN, Stage.BUSY) or self.give_loss is not None:
            return 0
        return (
            min(computed_tokens, without_backoff(rules, self.arrival.prompt_tokens))
            if self.prefills
            else computed_tokens
        )


def prefills(arrival: Arrival) -> bool:
    """Whether all that this engine does for a request is its prefill."""
    return arrival.give is not None and arrival.give.prefill


def without_backoff(rules: Rules, prompt_tokens: int) -> int:
    """Tokens of a prompt that are computed, or taken, before the decode engine's own part of it."""
    return prompt_tokens - rules.backoff_tokens if prompt_tokens > rules.backoff_tokens else prompt_tokens


def usable(rules: Rules, arrival: Arrival) -> int:
    """Tokens of what is offered that can be used: whole units, or all; of an offer with states all or nothing."""
    if arrival.take is None or arrival.needs_all_outputs or not arrival.prompt_tokens:
        return 0
    use = largest_use(without_backoff(rules, arrival.prompt_tokens), arrival.take.offer_tokens)
    if arrival.whole_units and use != arrival.prompt_tokens:
        use -= use % UNIT_TOKENS
    states = any(group.kind is GroupKind.STATE for group in rules.groups)
    return 0 if states and use != arrival.take.offer_tokens else use


def cut(rules: Rules, table: Table, first_tokens: int, end_tokens: int) -> Lists:
    """The blocks from the first that is not whole at `first_tokens` to the one of the last token; of a state its one.

    Raises InvalidRequest (GROUP_MISMATCH, BLOCK_COUNT_MISMATCH) for a table that does not hold them.
    """
    if len(table) != len(rules.groups):
        text = f"{len(table)} lists of blocks; the pool has {len(rules.groups)} groups"
        raise InvalidRequest(Reason.GROUP_MISMATCH, text)
    found = []
    for group, ids in zip(rules.groups, table, strict=True):
        needed = group.blocks_of(end_tokens)
        if len(ids) < needed:
            text = f"group {group.name}: {end_tokens} tokens take {needed} blocks; {len(ids)} are listed"
            raise InvalidRequest(Reason.BLOCK_COUNT_MISMATCH, text)
        state = group.kind is GroupKind.STATE
        found.append(tuple(ids[-1:] if state else ids[first_tokens // group.block_tokens : needed]))
    return tuple(found)


def whole(rules: Rules, tokens: int) -> list[int]:
    """Blocks of each group that so many tokens fill. A state is whole at the end only."""
    return [0 if group.kind is GroupKind.STATE else tokens // group.block_tokens for group in rules.groups]


def with_layers(rules: Rules, blocks: Lists, layers: LayerRange | None) -> Lists:
    """The blocks of those groups that have some of these layers; None: all."""
    if layers is None:
        return blocks
    return tuple(ids if layers[0] < group.layers else () for group, ids in zip(rules.groups, blocks, strict=True))
