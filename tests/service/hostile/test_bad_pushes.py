"""Invalid parts, reservations and registrations: each causes a typed error and changes nothing.

Every refusal says what is wrong with the request; the schema lists its code and reason. Afterwards the push that the
bad call was about is completed, and brings its bytes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvgrpc.v1 import common_pb2
from tests.service.api import Api, read_refusal
from tests.service.contract import errors_of
from tests.service.engines import SUCCEEDED, Engine, unchanged
from tests.service.pushes import cancel_key, finish, register, reserve
from tests.service.values import content, dur, group, new_key, prompt

TOKENS = prompt(40)
KEY_MAX = 64
MINUS_ONE = 4_294_967_295
"""The uint32 that a negative number turns into."""
LAST_STEP = 2**53 - 1
BAD, NOT_NOW, PAST = "INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE"
Case = Callable[[list[int]], dict[str, Any]]
"""Makes the wrong fields of a call, for blocks that are good."""
Row = tuple[Case, str, str, str]
"""The case, code, reason, and a text that the message or the wrong field's name contains."""


@contextmanager
def refuses(api: Api, code: str, reason: str, says: str) -> Iterator[None]:
    """Checks that the call in the body is refused with this code, reason and text, and that the schema lists it."""
    try:
        yield
    except grpc.RpcError as error:
        found = read_refusal(api.last_method, error)
    else:
        raise AssertionError(f"{api.last_method} was not refused with {code} {reason}")
    assert (found.code, found.reason) == (code, reason), found
    assert says in " ".join([found.message, *found.fields]), found
    assert (code, reason) in errors_of(found.method), f"proto does not list {code} {reason} for {found.method}"


def layers(first: int, count: int) -> common_pb2.LayerRange:
    return common_pb2.LayerRange(first=first, count=count)


def case(code: str, reason: str, says: str, *blocks: int, **fields: Any) -> Row:
    """Returns a row with wrong fields. `blocks` are positions within the good blocks."""

    def make(good: list[int]) -> dict[str, Any]:
        return {"blocks": [group([good[i] for i in blocks])], **fields} if blocks else fields

    return make, code, reason, says


def rows(code: str, reason: str, says: str, *wanted: tuple[list[int], int]) -> Row:
    """Returns a row with wrong rows of blocks, as (positions, group)."""
    return lambda good: {"blocks": [group([good[i] for i in ids], g) for ids, g in wanted]}, code, reason, says


def raw(code: str, reason: str, says: str, *ids: int) -> Row:
    """Returns a row with wrong block ids."""
    return lambda _: {"blocks": [group(ids)]}, code, reason, says


def either(table: dict[str, Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", table.values(), ids=table.keys())


# ---- parts: the first of three blocks was handed over, in epoch 1

PARTS: dict[str, Row] = {
    "blocks that overlap the part before": case(BAD, "BLOCK_DUPLICATE", "overlaps", 0, 1),
    "an earlier block at a later position": case(BAD, "BLOCK_DUPLICATE", "overlaps", 1, 0),
    "a negative group": rows(BAD, "GROUP_MISMATCH", f"group {MINUS_ONE}", ([1], MINUS_ONE)),
    "a negative block": raw(PAST, "BLOCK_OUT_OF_RANGE", str(MINUS_ONE), MINUS_ONE),
    "a block that nobody allocated": raw(NOT_NOW, "BLOCK_NOT_ALLOCATED", "519", 519),
    "4 billion layers": case(BAD, "INVALID_FIELD", "layers", 1, layers=layers(MINUS_ONE, MINUS_ONE)),
    "a last part without what is missing": case(NOT_NOW, "CONTENT_RANGE", "1 of 3 blocks", blocks=[], last=True),
    "nothing": case(NOT_NOW, "EMPTY_FINISH", "no blocks", blocks=[]),
    "content of another prompt": case(NOT_NOW, "CONTENT_MISMATCH", "one content", 1, content=content(prompt(40, 1))),
    "content of the chunk": case(NOT_NOW, "CONTENT_MISMATCH", "whole prompt", 1, content=content(TOKENS[:32])),
    "a lower epoch": case(NOT_NOW, "PREEMPTED", "part_epoch", 1, part_epoch=0),
    "another lease": case(BAD, "INVALID_FIELD", "lease", 1, lease_id="l-of-another"),
    "another life": case("ABORTED", "INCARNATION_CHANGED", "allocate again", 1, incarnation=7),
    "4 million consumers": case(BAD, "INVALID_FIELD", "consumer_count", 1, consumer_count=4_000_000),
}


@either(PARTS)
def test_a_part_that_cannot_be_is_refused_and_the_push_goes_on(source: Engine, destination: Engine, row: Row) -> None:
    make, code, reason, says = row
    key, blocks, target = new_key(), source.allocate(4), destination.allocate(3)
    written = source.write(blocks[:3], seed=1)
    finish(source, key, TOKENS, blocks[:1], last=False, part_epoch=1)
    wrong = {"blocks": [group([blocks[1]])], "last": False, "part_epoch": 1, **make(blocks)}
    with unchanged(source), refuses(source.api, code, reason, says):
        finish(source, key, TOKENS, [], **wrong)
    reserved = reserve(destination, key, TOKENS, target)
    register(source, reserved.grant)
    sent = finish(source, key, TOKENS, blocks[1:3], part_epoch=1)
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED
    assert source.wait(sent.transfer.transfer_id).state == SUCCEEDED
    assert destination.read(target) == written


FIRST: dict[str, Row] = {
    "no content": case(BAD, "CONTENT_REQUIRED", "whole prompt", 0, content=None),
    "an empty content": case(BAD, "CONTENT_REQUIRED", "content", 0, content=common_pb2.Content()),
    "a content of no tokens": case(BAD, "CONTENT_REQUIRED", "token", 0, content=content([])),
    "a last part without blocks": case(NOT_NOW, "EMPTY_FINISH", "no blocks", blocks=[], last=True),
    "a group without blocks": rows(NOT_NOW, "EMPTY_FINISH", "no blocks", ([], 0)),
    "other weights": case(BAD, "WEIGHTS_MISMATCH", "weights", 0, content=content(TOKENS, weights_revision="other")),
}


@either(FIRST)
def test_an_impossible_first_part_leaves_a_registration_waiting(source: Engine, destination: Engine, row: Row) -> None:
    make, code, reason, says = row
    key, blocks = new_key(), source.allocate(3)
    reserved = reserve(destination, key, TOKENS, destination.allocate(3))
    register(source, reserved.grant)
    with unchanged(destination), refuses(source.api, code, reason, says):
        finish(source, key, TOKENS, [], **{"last": False, **make(blocks)})
    finish(source, key, TOKENS, blocks)
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED


@pytest.mark.parametrize("ttl", [dur(0), dur(-1), Duration(seconds=-(2**62))], ids=["zero", "negative", "hugely so"])
def test_a_part_with_a_ttl_that_is_none_is_refused(source: Engine, ttl: Duration) -> None:
    key, blocks = new_key(), source.allocate(3)
    with unchanged(source), refuses(source.api, BAD, "TTL_INVALID", "positive"):
        finish(source, key, TOKENS, blocks, ttl=ttl)


def test_a_layer_is_handed_over_once_and_without_gaps(source: Engine, destination: Engine) -> None:
    key, blocks, target = new_key(), source.allocate(3), destination.allocate(3)
    written = source.write(blocks, seed=2)
    first, second = layers(0, 1), layers(1, 1)
    finish(source, key, TOKENS, blocks[:2], layers=first, last=False)
    wrong: list[tuple[list[int], dict[str, Any]]] = [
        (blocks[:2], {"layers": first}),  # repeats the layer
        (blocks[1:2], {"layers": second}),  # the other layer, without its first block
        (blocks[2:], {}),  # a chunk of all layers, although one lacks its predecessor
        (blocks[::-1], {"layers": second}),  # the blocks of the first layer, in another order
    ]
    for ids, fields in wrong:
        with unchanged(source), refuses(source.api, BAD, "BLOCK_DUPLICATE", "must follow those of the same layers"):
            finish(source, key, TOKENS, ids, last=False, **fields)
    finish(source, key, TOKENS, blocks, layers=second, last=False)
    reserved = reserve(destination, key, TOKENS, target)
    register(source, reserved.grant)
    finish(source, key, TOKENS, blocks[2:], layers=first)
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED
    assert destination.read(target) == written


def test_nothing_comes_after_the_last_part(source: Engine, destination: Engine) -> None:
    key, blocks = new_key(), source.allocate(4)
    sent = finish(source, key, TOKENS, blocks[:3])
    with unchanged(source):
        with refuses(source.api, NOT_NOW, "TRANSFER_ENDED", "last part"):
            finish(source, key, TOKENS, blocks[3:])
        with refuses(source.api, NOT_NOW, "TRANSFER_ENDED", "last part"):
            finish(source, key, TOKENS, [], content=None)
    reserved = reserve(destination, key, TOKENS, destination.allocate(3))
    register(source, reserved.grant)
    assert source.wait(sent.transfer.transfer_id).state == SUCCEEDED
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED
    with unchanged(source):
        refusal = source.api.refusal(lambda: finish(source, key, TOKENS, blocks[3:]))
    assert (refusal.code, refusal.reason in {"TRANSFER_ENDED", "CANCELLED"}) == (NOT_NOW, True), refusal


# ---- reservations: three blocks for 40 tokens

RESERVATIONS: dict[str, Row] = {
    "a block too few": case(BAD, "BLOCK_COUNT_MISMATCH", "take 3 blocks", 0, 1),
    "a block too many, validated only": case(
        BAD, "BLOCK_COUNT_MISMATCH", "take 3 blocks", 0, 1, 2, 3, validate_only=True
    ),
    "blocks for what is held": case(BAD, "BLOCK_COUNT_MISMATCH", "16 of them held", 0, 1, 2, have_tokens=16),
    "blocks for what is not wanted": case(BAD, "BLOCK_COUNT_MISMATCH", "16 tokens", 0, 1, 2, use_tokens=16),
    "a block twice": case(BAD, "BLOCK_DUPLICATE", "twice", 0, 1, 0),
    "a group twice": rows(BAD, "GROUP_MISMATCH", "twice", ([0, 1], 0), ([2], 0)),
    "a negative block": raw(PAST, "BLOCK_OUT_OF_RANGE", str(MINUS_ONE), 0, 1, MINUS_ONE),
    "blocks that nobody allocated": raw(NOT_NOW, "BLOCK_NOT_ALLOCATED", "allocated", 517, 518, 519),
    "no content": case(BAD, "CONTENT_REQUIRED", "content", content=None),
    "other weights": case(BAD, "WEIGHTS_MISMATCH", "weights", content=content(TOKENS, weights_revision="other")),
    "a K within a unit": case(PAST, "CONTENT_RANGE", "multiple of 16", use_tokens=17),
    "a K of 4 billion": case(PAST, "CONTENT_RANGE", "at most the own prompt", use_tokens=MINUS_ONE),
    "no time": case(BAD, "INVALID_FIELD", "registration_timeout", registration_timeout=dur(0)),
    "hugely negative time": case(
        BAD, "INVALID_FIELD", "registration_timeout", registration_timeout=Duration(seconds=-(2**63))
    ),
    "no key": case(BAD, "INVALID_FIELD", "16", transfer_key=b""),
    "a key that is too long": case(BAD, "INVALID_FIELD", str(KEY_MAX), transfer_key=b"x" * (KEY_MAX + 1)),
    "a label like a novel": case(BAD, "INVALID_FIELD", "request_id", request_id="r" * 257),
    "a source off the dial list": case(
        "PERMISSION_DENIED", "DIAL_REFUSED", "dial_allow", source={"address": "169.254.169.254:80"}
    ),
    "another life": case("ABORTED", "INCARNATION_CHANGED", "allocate again", incarnation=7),
}


@either(RESERVATIONS)
def test_a_reservation_that_cannot_be_is_refused(destination: Engine, row: Row) -> None:
    make, code, reason, says = row
    blocks = destination.allocate(4)
    with unchanged(destination), refuses(destination.api, code, reason, says):
        reserve(destination, new_key(), TOKENS, blocks[:3], **make(blocks))


def test_a_source_without_an_address_is_a_wrong_field(destination: Engine) -> None:
    blocks = destination.allocate(3)
    with unchanged(destination), refuses(destination.api, BAD, "INVALID_FIELD", "source.address"):
        reserve(destination, new_key(), TOKENS, blocks, source={"engine_id": "p"})


@pytest.mark.parametrize("have_tokens", [0, 16])
def test_a_reservation_without_blocks_holds_all_that_it_wants(destination: Engine, have_tokens: int) -> None:
    with unchanged(destination), refuses(destination.api, BAD, "BLOCK_COUNT_MISMATCH", "take"):
        reserve(destination, new_key(), TOKENS, [], blocks=[], have_tokens=have_tokens)


def test_reserved_blocks_have_no_other_pin(source: Engine, destination: Engine) -> None:
    leased, waiting, taken, key = (*(destination.allocate(3) for _ in range(3)), new_key())
    destination.hand_over(TOKENS, leased)
    destination.pull(source.hand_over(TOKENS).grant, TOKENS, waiting, after_step=LAST_STEP)
    reserved = reserve(destination, key, TOKENS, taken)
    with unchanged(destination):
        for blocks in (leased, waiting, taken, [*leased[:2], taken[0]]):
            with refuses(destination.api, NOT_NOW, "BLOCK_PINNED", "pinned"):
                reserve(destination, new_key(), TOKENS, blocks)
        with refuses(destination.api, NOT_NOW, "BLOCK_PINNED", "pinned"):
            destination.hand_over(TOKENS, taken)
        with refuses(destination.api, NOT_NOW, "BLOCK_PINNED", "pinned"):
            finish(destination, new_key(), TOKENS, taken)
    register(source, reserved.grant)
    finish(source, key, TOKENS, source.allocate(3))
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED


def test_blocks_are_received_under_a_key_once_at_a_time(source: Engine, destination: Engine) -> None:
    key, first, second = new_key(), destination.allocate(3), destination.allocate(3)
    reserved = reserve(destination, key, TOKENS, first)
    for blocks in (first, second):
        with unchanged(destination):
            refusal = destination.api.refusal(lambda blocks=blocks: reserve(destination, key, TOKENS, blocks))  # type: ignore[misc]
        assert refusal.reason in {"TRANSFER_EXISTS", "BLOCK_PINNED"}, refusal
    register(source, reserved.grant)
    finish(source, key, TOKENS, source.allocate(3))
    assert destination.wait(reserved.transfer.transfer_id).state == SUCCEEDED


@pytest.mark.parametrize("time", [dur(1e9), Duration(seconds=2**62)], ids=["30 years", "past all bounds"])
def test_a_huge_registration_timeout_is_cut_to_the_cap(destination: Engine, time: Duration) -> None:
    reserved = reserve(destination, new_key(), TOKENS, destination.allocate(3), registration_timeout=time)
    assert reserved.grant.ttl == dur(3600)


def test_validating_a_reservation_or_a_part_changes_nothing(source: Engine, destination: Engine) -> None:
    with unchanged(source, destination):
        mine, target = source.allocate(3), destination.allocate(3)
        reserved = reserve(destination, new_key(), TOKENS, target, validate_only=True)
        assert not reserved.HasField("grant")
        assert not reserved.HasField("transfer")
        assert not finish(source, new_key(), TOKENS, mine, validate_only=True).HasField("transfer")
        source.free(mine)
        destination.free(target)


def test_what_was_cancelled_before_it_came_is_refused_on_both_sides(source: Engine, destination: Engine) -> None:
    key, other = new_key(), new_key()
    reserved = reserve(destination, key, TOKENS, destination.allocate(3))
    cancel_key(source, key, "the client went away")
    cancel_key(destination, other, "the client went away")
    blocks, target = source.allocate(3), destination.allocate(3)
    with unchanged(source, destination):
        with refuses(source.api, NOT_NOW, "CANCELLED", "the client went away"):
            register(source, reserved.grant)
        with refuses(source.api, NOT_NOW, "CANCELLED", "the client went away"):
            finish(source, key, TOKENS, blocks)
        with refuses(destination.api, NOT_NOW, "CANCELLED", "the client went away"):
            reserve(destination, other, TOKENS, target)
