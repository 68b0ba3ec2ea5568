"""Conversion of a scheduler's statements on its requests to the policy's values, and of news to messages."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field

import numpy as np

from kvgrpc.core.policy.spec import Offer, RequestSpec, Source, began_at, claims_of
from kvgrpc.core.policy.values import (
    DROPPED,
    Give,
    Lists,
    Load,
    LoadEnded,
    Loss,
    ModeChoice,
    News,
    OnLoss,
    Outcome,
    Provisional,
    ReservedAt,
    Save,
    SendEnded,
    TakeLost,
)
from kvgrpc.core.receive.pull_course import check_key
from kvgrpc.core.tables.transfers import Failure
from kvgrpc.core.values import content as contents, grants
from kvgrpc.core.values.block_ids import BlockLists, Blocks
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.records import dataclass
from kvgrpc.core.values.request_times import RequestTime
from kvgrpc.errors import InvalidRequest, Reason, invalid, too_many
from kvgrpc.v1 import common_pb2, scheduler_pb2
from kvgrpc.wire.bounds import text
from kvgrpc.wire.enums import numbers
from kvgrpc.wire.requests import consumers, push_source
from kvgrpc.wire.values import content, failure, grant, layer_ranges, named_blocks, on_abort, seconds

NEWS_PER_REPLY = 1_024
NEWS_BYTES_MAX = 1 << 20
"""Bytes of one reply after which no more news are added. The others wait for the next reply."""
_Reply = scheduler_pb2.PollSchedulerNewsResponse | scheduler_pb2.ScheduleResponse
_MODES = {common_pb2.TRANSFER_MODE_PULL: ModeChoice.PULL, common_pb2.TRANSFER_MODE_PUSH: ModeChoice.PUSH}
_ON_LOSS = numbers(scheduler_pb2.OnLoss, OnLoss)


@dataclass(frozen=True)
class PromptName:
    """The name of a prompt's content, and of any beginning of it for which the caller gave enough."""

    whole: contents.ContentId
    tokens: common_pb2.Content | None = field(default=None, compare=False, repr=False)
    """The content as the caller stated it, if by tokens: a beginning of any length can then be named."""
    weights: str = field(default="", compare=False)

    def with_digest(self, tokens: int) -> contents.ContentId:
        """Returns the whole content, with a digest at `tokens` if it can have one."""
        if self.tokens is None or self.whole.has_digest(tokens):
            return self.whole
        made = content(self.tokens, self.weights, also_at=tokens)
        assert made is not None
        return made

    def beginning(self, tokens: int) -> contents.ContentId:
        """Returns the first `tokens` tokens, or the whole if they cannot be named; the hook then refuses the whole."""
        made = self.with_digest(tokens)
        return made if made.opaque or not made.has_digest(tokens) else made.first(tokens)

    def first(self, tokens: int) -> contents.ContentId:
        """Returns the content of the first `tokens` tokens. Raises OutOfRange (CONTENT_RANGE) if it cannot be named."""
        return self.with_digest(tokens).first(tokens)


@dataclass(frozen=True)
class NamedRequest(RequestSpec[contents.ContentId]):
    """A request whose prompt is known by its name."""

    prompt: PromptName | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.whole.tokens if self.prompt else 0

    @property
    def whole_units(self) -> bool:
        return self.prompt is not None and self.prompt.tokens is None

    def first(self, tokens: int) -> contents.ContentId:
        return self.named.first(tokens)

    @property
    def named(self) -> PromptName:
        assert self.prompt is not None, "a request without tokens takes and gives nothing"
        return self.prompt

    @property
    def addresses(self) -> Iterator[str]:
        """Addresses of the peers of its transfers."""
        match self.take:
            case Offer(token):
                yield grants.read_claims(token).address
            case Source(address) if address:
                yield address
        if self.target:
            yield grants.read_claims(self.target).address


# ---- statements of a scheduler


def named(value: common_pb2.Content, weights: str) -> PromptName | None:
    """Converts a Content, or returns None if it is unset."""
    whole = content(value, weights)
    if whole is None or value.WhichOneof("form") != "tokens":
        return PromptName(whole) if whole else None
    kept = common_pb2.Content()  # a part of a message keeps the whole message alive
    kept.CopyFrom(value)
    return PromptName(whole, kept, weights)


def arrived(
    request: scheduler_pb2.RequestArrivedRequest, weights: str, trace: str, arrived_us: int = 0
) -> NamedRequest:
    """Converts RequestArrived, which came at `arrived_us`. Raises KVGrpcError."""
    intent = request.intent
    give, take, key = _give(request), _take(request), intent.transfer_key
    if give is not None or isinstance(take, Source):
        check_transfer_key(key, "intent.transfer_key")
    elif isinstance(take, Offer):
        check_key(key, grants.read_claims(take.grant).transfer_key, "this grant")
    request_id = required_id(request.request_id)
    return NamedRequest(
        request_id=request_id,
        prompt=named(request.prompt, weights),
        take=take,
        give=give,
        target=_target(request, give),
        transfer_key=key,
        label=intent.request_id or request_id,
        consumers=consumers(intent.consumer_count),
        ttl_s=seconds(intent, "ttl"),
        firm_ttl_s=seconds(intent, "firm_ttl"),
        request_time_us=began_at(take, give, intent.request_time_us, arrived_us),
        priority=intent.priority,
        on_abort=on_abort(intent.on_abort),
        needs_all_outputs=request.needs_all_outputs,
        traceparent=text("traceparent", request.traceparent) or trace,
    )


def needed_by(request: scheduler_pb2.BlocksNeededRequest) -> RequestTime | None:
    """Returns the request for which blocks are needed. The owning engine's scheduler is believed."""
    request_id = request.request_id
    return RequestTime(request.request_time_us, request_id) if request.request_time_us else None


def required_id(request_id: str) -> str:
    """Returns the id. Raises InvalidRequest if it is missing or long."""
    if not request_id:
        raise invalid("request_id", "is required")
    return request_id


def with_dropped(blocks: Blocks, dropped: Sequence[int], limit: int) -> Blocks:
    """Returns a request's blocks, each at its tokens' position. Raises InvalidRequest, or OutOfRange for too many."""
    if not dropped:
        return blocks
    if len(dropped) > len(blocks):
        text = f"dropped_block_counts: {len(dropped)} groups are counted; the pool has {len(blocks)}"
        raise InvalidRequest(Reason.GROUP_MISMATCH, text)
    if sum(dropped) > limit:
        raise too_many(f"dropped_block_counts: {sum(dropped)} blocks in one request; the limit is {limit}", limit)
    counts = [*dropped, *[0] * (len(blocks) - len(dropped))]
    return tuple(np.concatenate((np.full(count, DROPPED), ids)) for ids, count in zip(blocks, counts, strict=True))


def outcome(value: int) -> Outcome:
    """Converts an outcome. Raises InvalidRequest if it is unset."""
    if value == scheduler_pb2.REQUEST_OUTCOME_UNSPECIFIED:
        raise invalid("outcome", "is required")
    return Outcome.COMPLETE if value == scheduler_pb2.REQUEST_OUTCOME_COMPLETE else Outcome.ABORTED


def _give(request: scheduler_pb2.RequestArrivedRequest) -> Give | None:
    if not request.HasField("give"):
        return None
    mode = request.give.mode or request.intent.mode
    return Give(_MODES.get(mode, ModeChoice.PULL), not request.give.decodes)


def _take(request: scheduler_pb2.RequestArrivedRequest) -> Offer | Source | None:
    match request.WhichOneof("take"):
        case "offer":
            claims_of(request.offer.token, grants.AccessKind.READ)
            return Offer(request.offer.token)
        case "push":
            push = request.push
            stated = push.HasField("source")
            said = push.source if stated else request.intent.peer
            if stated and not said.address:
                raise invalid("push.source.address", "is required where a source is named")
            if not said.address:
                return Source(keep=push.keep)
            source = push_source(said)
            return Source(source.address, source.engine_id, push.keep)
    return None


def _target(request: scheduler_pb2.RequestArrivedRequest, give: Give | None) -> bytes:
    if not request.HasField("target"):
        return b""
    if give is None or give.mode is not ModeChoice.PUSH:
        raise invalid("target", "is for a push from here: say so in give")
    claims = claims_of(request.target.token, grants.AccessKind.WRITE)
    check_key(request.intent.transfer_key, claims.transfer_key, "this target")
    return request.target.token


def prompt_bytes(spec: NamedRequest) -> int:
    """Returns the bytes that a request's prompt and grants take, here and in what the request gives."""
    nbytes = len(spec.target) + (len(spec.take.grant) if isinstance(spec.take, Offer) else 0)
    if spec.prompt is None:
        return nbytes
    said = spec.prompt.tokens
    tokens = 0 if said is None else said.ByteSize() + 4 * len(said.tokens.token_ids)
    return nbytes + 2 * len(spec.prompt.whole.digests) + tokens


# ---- news for a scheduler


def block_ids(lists: Lists) -> BlockLists:
    """Returns the blocks of each group in the form of events. Groups without blocks are left out."""
    return tuple((group, np.array(ids, dtype=np.int64)) for group, ids in enumerate(lists) if ids)


def kv_transfer_params(token: bytes) -> str:
    """Returns a grant as the JSON object that today's routers relay; empty for no grant."""
    return json.dumps(grants.to_json(token)) if token else ""


def put_news(rows: Iterable[tuple[int, News]], into: _Reply, incarnation: int) -> None:
    """Writes the news that fit into one reply, and sets `more` if some are left."""
    nbytes = 0
    for seq, value in rows:
        if nbytes >= NEWS_BYTES_MAX or len(into.news) == NEWS_PER_REPLY:
            into.more = True
            return
        made = into.news.add(seq=seq, request_id=value.request_id)
        _put(value, made, incarnation)
        nbytes += made.ByteSize()


def _put(value: News, into: scheduler_pb2.SchedulerNews, incarnation: int) -> None:
    match value:
        case LoadEnded():
            into.load_ended.computed_tokens = value.tokens
            if value.loss is not None:
                into.load_ended.failure.CopyFrom(_failure(value.loss))
                into.load_ended.invalid_blocks.CopyFrom(_blocks(value.blocks, incarnation))
                into.load_ended.on_loss = _ON_LOSS[value.on_loss]
        case SendEnded():
            into.send_ended.SetInParent()
            if value.loss is not None:
                into.send_ended.failure.CopyFrom(_failure(value.loss))
        case TakeLost():
            into.take_lost.failure.CopyFrom(_failure(value.loss))
            into.take_lost.on_loss = _ON_LOSS[value.on_loss]
        case Save():
            into.save.blocks.CopyFrom(_blocks(value.blocks, incarnation))
        case Load():
            into.load.blocks.CopyFrom(_blocks(value.blocks, incarnation))
        case ReservedAt():
            into.reserved_at.grant.CopyFrom(grant(value.grant))
            into.reserved_at.kv_transfer_params = kv_transfer_params(value.grant)
        case Provisional():
            into.provisional.SetInParent()
            into.provisional.layers_done.extend(layer_ranges(value.layers_done))
            into.provisional.part_epoch = value.part_epoch


def _failure(loss: Loss) -> common_pb2.Failure:
    return failure(Failure(loss.reason, loss.message, loss.phase, loss.side, loss.rank, loss.next))


def _blocks(lists: Lists, incarnation: int) -> common_pb2.Blocks:
    return named_blocks(block_ids(lists), incarnation)
