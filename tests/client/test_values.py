"""Python values become messages without loss."""

import pytest
from hypothesis import given, strategies as st

from kvgrpc.client import (
    block_ids,
    block_runs,
    content,
    in_seconds,
    is_over,
    is_returned,
    name_of,
    opaque_content,
    some_of,
)
from kvgrpc.client.values import as_blocks, as_content, duration, fields, lease_ref
from kvgrpc.v1.common_pb2 import DATA_PATH_SHM, Blocks, DataPath, Grant, GroupBlocks, MultimodalItem
from kvgrpc.v1.lease_pb2 import Lease
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse
from kvgrpc.v1.transfer_pb2 import (
    MEMORY_DISPOSITION_QUARANTINED,
    MEMORY_DISPOSITION_RETURNED,
    TRANSFER_STATE_ACTIVE,
    TRANSFER_STATE_CANCELLED,
    TRANSFER_STATE_FAILED,
    TRANSFER_STATE_SUCCEEDED,
    Transfer,
)

BLOCK = st.integers(0, 2**32 - 1)


@given(st.lists(BLOCK, max_size=50) | st.lists(st.integers(0, 6), max_size=50))
def test_runs_give_the_same_ids_in_the_same_order(ids: list[int]) -> None:
    assert block_ids(block_runs(ids)) == ids


@given(st.lists(st.integers(0, 6), max_size=50))
def test_runs_are_maximal(ids: list[int]) -> None:
    runs = block_runs(ids)
    ends = [start + count for start, count in zip(runs.starts, runs.counts, strict=True)]
    assert all(end != start for end, start in zip(ends, runs.starts[1:], strict=False))


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_an_id_that_is_none_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=str(wrong)):
        block_runs([wrong])


def test_blocks_are_ids_or_groups_or_rows_of_a_reply() -> None:
    rows = [GroupBlocks(group=0, runs=block_runs([3, 4])), GroupBlocks(group=2, runs=block_runs([9]))]
    named = Blocks(incarnation=7, groups=rows)
    assert as_blocks({0: [3, 4], 2: [9]}, 7) == named
    assert as_blocks(rows, 7) == named
    assert as_blocks([3, 4], 7) == Blocks(incarnation=7, groups=rows[:1])
    assert as_blocks([], 7) == Blocks(incarnation=7)
    assert as_blocks(named, 8) is named
    with pytest.raises(TypeError, match="not both"):
        as_blocks([1, rows[0]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"blocks are ids, .* not None"):
        as_blocks(None)  # type: ignore[arg-type]


def test_the_ids_of_blocks_are_those_of_one_group() -> None:
    named = as_blocks({0: [3, 4, 9], 2: [7]})
    assert (block_ids(named), block_ids(named, 2), block_ids(named, 1)) == ([3, 4, 9], [7], [])
    assert block_ids(AllocateBlocksResponse(blocks=named), 2) == [7]


def test_some_blocks_of_an_allocation_are_of_it() -> None:
    taken = Blocks(incarnation=7, allocation_id="a", groups=[GroupBlocks(runs=block_runs([3, 4, 5]))])
    for given_by in (taken, AllocateBlocksResponse(blocks=taken)):
        part = some_of(given_by, [4])
        assert (part.incarnation, part.allocation_id, block_ids(part)) == (7, "a", [4])


def test_a_value_is_shown_by_its_name_without_prefix() -> None:
    assert name_of(DataPath, DATA_PATH_SHM) == "shm"
    assert name_of(DataPath, DataPath.Value("DATA_PATH_UNSPECIFIED")) == ""
    assert name_of(DataPath, 99) == "99"  # type: ignore[misc]


def test_content_states_all_that_kv_depends_on() -> None:
    item = MultimodalItem(digest=b"d", offset=1, length=2)
    made = content([1, 2], adapter="a", cache_salt="s", weights_revision="w", multimodal_items=[item])
    tokens = made.tokens
    assert (list(tokens.token_ids), tokens.adapter, tokens.cache_salt, tokens.weights_revision) == (
        [1, 2],
        "a",
        "s",
        "w",
    )
    assert list(tokens.multimodal_items) == [item]
    assert as_content([1, 2]) == content([1, 2])
    assert as_content(made) is made
    opaque = opaque_content(b"id", 7)
    assert (opaque.opaque_id, opaque.opaque_tokens, opaque.WhichOneof("form")) == (b"id", 7, "opaque_id")


def test_a_lease_is_named_by_id_message_or_grant() -> None:
    grant = Grant(token=b"t", lease_id="l")
    assert lease_ref("l").lease_id == "l"
    assert lease_ref(Lease(lease_id="l")).lease_id == "l"
    assert lease_ref(grant).grant == grant


@given(st.floats(-1e6, 1e6))
def test_durations_keep_their_nanoseconds(seconds: float) -> None:
    assert in_seconds(duration(seconds)) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_duration_is_a_finite_number(wrong: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        duration(wrong)


def test_options_become_fields() -> None:
    given_options = {"ttl_s": 1.5, "layers": (2, 3), "request_id": "r", "timeout_s": 3.0, "idempotency_key": "k"}
    made = fields({**given_options, "consumers": 2})
    assert set(made) == {"ttl", "layers", "request_id", "consumer_count"}
    assert made["ttl"] == duration(1.5)
    assert (made["layers"].first, made["layers"].count) == (2, 3)


def test_what_is_unknown_is_neither_over_nor_returned() -> None:
    assert not is_over(Transfer(state=TRANSFER_STATE_ACTIVE))
    assert not is_over(Transfer(state=99))  # type: ignore[arg-type]
    for state in (TRANSFER_STATE_SUCCEEDED, TRANSFER_STATE_FAILED, TRANSFER_STATE_CANCELLED):
        assert is_over(Transfer(state=state))
        assert is_returned(Transfer(state=state, memory=MEMORY_DISPOSITION_RETURNED))
        assert not is_returned(Transfer(state=state, memory=MEMORY_DISPOSITION_QUARANTINED))
        assert not is_returned(Transfer(state=state, memory=99))  # type: ignore[arg-type]
    assert not is_returned(Transfer(state=TRANSFER_STATE_ACTIVE, memory=MEMORY_DISPOSITION_RETURNED))
