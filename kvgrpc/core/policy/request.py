"""One request as a scheduler's policy knows it, and the arithmetic of its tokens and blocks."""

from dataclasses import dataclass, field
from enum import Enum

from kvgrpc.core.policy.values import DROPPED, Arrival, Lists, Loss, ModeChoice, Rules, Table
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.content import UNIT_TOKENS, largest_use
from kvgrpc.core.values.layout import GroupKind
from kvgrpc.errors import InvalidRequest, Reason


class RequestStage(Enum):
    """The stage of one of a request's two transfers: taking or giving."""

    NONE = "none"
    OPEN = "open"
    """The transfer uses none of this engine's memory."""
    BUSY = "busy"
    """Blocks belong to the transfer."""
    LOADING = "loading"
    """A staged engine copies the received blocks."""
    OVER = "over"


@dataclass(eq=False)
class Request:
    """A request, from its arrival until it has left and nothing of it is kept."""

    arrival: Arrival
    take: RequestStage = RequestStage.NONE
    use_tokens: int = 0
    have_tokens: int = 0
    filled: Lists = ()
    """Blocks that are being filled."""
    take_loss: Loss | None = None
    taken_back: bool = False
    """The source took its blocks back before this engine had blocks to read into. This is no failed load: the request
    is computed here, whatever `Rules.on_loss` says.
    """
    give: RequestStage = RequestStage.NONE
    give_loss: Loss | None = None
    awaited: bool = False
    """A destination may wait for the KV: it has registered, or the mode says that one will."""
    pushes: bool = False
    """The KV goes by parts of a push."""
    sent: list[int] = field(default_factory=list)
    """Number of blocks that parts of a push have handed over, for each group."""
    saved_tokens: int = 0
    over: bool = False
    """True once the request left the scheduler."""

    @property
    def busy(self) -> bool:
        return self.take in (RequestStage.BUSY, RequestStage.LOADING) or self.give is RequestStage.BUSY

    @property
    def awaits_push(self) -> bool:
        """True if a push to this request may still come, or go on."""
        take, wanted = self.arrival.take, self.take_loss is None and not self.over
        return (
            wanted
            and take is not None
            and take.mode is ModeChoice.PUSH
            and self.take in (RequestStage.OPEN, RequestStage.BUSY)
        )

    @property
    def gives(self) -> bool:
        """True if the KV is wanted, and nothing has gone wrong with giving it."""
        return self.give in (RequestStage.OPEN, RequestStage.BUSY) and self.give_loss is None

    @property
    def prefills(self) -> bool:
        return prefills(self.arrival)

    def given_tokens(self, rules: Rules, computed_tokens: int) -> int:
        """Returns how many tokens of KV are handed over, for a prefill at most the prompt. 0 if a state is of more
        tokens.
        """
        if not self.gives:
            return 0
        tokens = computed_tokens
        if self.prefills:
            tokens = min(computed_tokens, without_backoff(rules, self.arrival.prompt_tokens))
        states = any(group.kind is GroupKind.STATE for group in rules.groups)
        return 0 if states and tokens != computed_tokens else tokens

    def named_tokens(self, rules: Rules, tokens: int) -> int:
        """Returns how many tokens the name of the given KV covers, when `tokens` of them are given at last. The parts
        of a push are named before all of them are there.
        """
        by_parts = self.pushes and self.prefills
        return without_backoff(rules, self.arrival.prompt_tokens) if by_parts else tokens


def prefills(arrival: Arrival) -> bool:
    """Returns whether this engine only prefills the request."""
    return arrival.give is not None and arrival.give.prefill


def without_backoff(rules: Rules, prompt_tokens: int) -> int:
    """Returns how many prompt tokens are computed, or taken, before the decode engine's own part of the prompt."""
    return prompt_tokens - rules.backoff_tokens if prompt_tokens > rules.backoff_tokens else prompt_tokens


def usable(rules: Rules, arrival: Arrival) -> int:
    """Returns how many offered tokens can be used: whole units, or all; 0 if their blocks do not serve so few. This
    engine computes its last tokens itself, and only once: a state cannot go back.
    """
    if arrival.take is None or arrival.needs_all_outputs or not arrival.prompt_tokens:
        return 0
    computed = without_backoff(rules, arrival.prompt_tokens) if prefills(arrival) else arrival.prompt_tokens
    if computed <= rules.backoff_tokens:
        return 0
    use = largest_use(without_backoff(rules, computed), arrival.take.offer_tokens)
    if arrival.whole_units and use != arrival.prompt_tokens:
        use -= use % UNIT_TOKENS
    offered = arrival.take.offer_tokens
    return use if all(group.stands_for(offered, use) for group in rules.groups) else 0


def cut(rules: Rules, table: Table, have_tokens: int, end_tokens: int, of_tokens: int = 0) -> Lists:
    """Returns blocks out of those that stand for `of_tokens` tokens (0: `end_tokens`): from the first block that is not
    whole at `have_tokens` to the block of the last token before `end_tokens`. A state has one block.

    Raises InvalidRequest (GROUP_MISMATCH, BLOCK_COUNT_MISMATCH) for a table that does not hold them.
    """
    if len(table) != len(rules.groups):
        text = f"{len(table)} lists of blocks; the pool has {len(rules.groups)} groups"
        raise InvalidRequest(Reason.GROUP_MISMATCH, text)
    found = []
    for group, ids in zip(rules.groups, table, strict=True):
        needed = group.first_of(end_tokens) + group.blocks_of(end_tokens)
        if len(ids) < needed:
            text = f"group {group.name}: {end_tokens} tokens take {needed} blocks; {len(ids)} are listed"
            raise InvalidRequest(Reason.BLOCK_COUNT_MISMATCH, text)
        of = of_tokens or end_tokens
        first = group.first_of(of) + group.held_of(of, have_tokens)
        wanted = tuple(ids[-1:] if group.kind is GroupKind.STATE else ids[first:needed])
        if DROPPED in wanted:
            text = f"group {group.name}: a block that {end_tokens} tokens take is not there any more"
            raise InvalidRequest(Reason.BLOCK_COUNT_MISMATCH, text)
        found.append(wanted)
    return tuple(found)


def whole(rules: Rules, tokens: int, of_tokens: int) -> list[int]:
    """Returns, for each group, how many of the blocks for `of_tokens` tokens `tokens` tokens fill. A state is whole at
    the end.
    """
    return [group.held_of(of_tokens, tokens) for group in rules.groups]


def with_layers(rules: Rules, blocks: Lists, layers: LayerRange | None) -> Lists:
    """Returns the blocks of the groups that have some of these layers; None: all layers."""
    if layers is None:
        return blocks
    return tuple(ids if layers[0] < group.layers else () for group, ids in zip(rules.groups, blocks, strict=True))
