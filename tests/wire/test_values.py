"""Durations, block runs and reasons are converted exactly, and every value has a counterpart."""

import itertools
import math

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, strategies as st

from kvgrpc.core.tables.transfers import Failure, Side
from kvgrpc.core.values.block_ids import Ids, to_runs
from kvgrpc.errors import InvalidRequest, KVGrpcError, NextStep, OutOfRange, Reason
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2
from kvgrpc.wire import values
from kvgrpc.wire.bounds import blocks_named
from kvgrpc.wire.values import FEW, put_runs
from tests.wire.messages import outcome

LIMIT = 65_536
BLOCK_IDS = st.lists(st.integers(0, 2**32 - 1), unique=True, max_size=200)


MANY_IDS = st.builds(
    lambda seed, top, count, step: np.random.default_rng(seed).integers(0, top, count) // step,
    st.integers(0, 2**32),
    st.sampled_from([1, 2**7, 2**14, 2**20, 2**28, 2**32]),
    st.integers(FEW, 3 * FEW),
    st.sampled_from([1, 50]),
)


@given(MANY_IDS)
def test_many_blocks_are_the_runs_that_a_list_of_them_is(ids: Ids) -> None:
    runs = common_pb2.BlockRuns()
    put_runs(ids, runs)
    starts, counts = to_runs(ids.tolist())
    assert runs == common_pb2.BlockRuns(starts=starts, counts=counts)
    assert blocks_named(runs.counts) == len(ids)
    (_, back), *_ = values.block_lists([common_pb2.GroupBlocks(runs=runs)], LIMIT)
    assert back.tolist() == ids.tolist()


@given(st.integers(0, 10**18))
def test_a_duration_of_whole_nanoseconds_survives_the_way_there_and_back(nanos: int) -> None:
    made = values.duration(nanos / 1e9)
    assert 0 <= made.nanos < 1_000_000_000
    request = lease_pb2.GrantLeaseRequest(ttl=made)
    assert values.seconds(request, "ttl") == pytest.approx(nanos / 1e9, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("seconds", [-1e-9, -1.0, -1e9])
def test_what_has_passed_already_is_a_duration_of_zero(seconds: float) -> None:
    assert values.duration(seconds) == Duration()


def test_a_duration_that_is_not_given_is_none_and_zero_is_zero() -> None:
    assert values.seconds(lease_pb2.GrantLeaseRequest(), "ttl") is None
    assert values.seconds(lease_pb2.GrantLeaseRequest(ttl=Duration()), "ttl") == 0.0
    assert values.seconds(lease_pb2.GrantLeaseRequest(ttl=Duration(seconds=-3, nanos=-5)), "ttl") == -3.000000005


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1))
def test_any_timeout_is_positive_or_refused(seconds: int, nanos: int) -> None:
    request = handoff_pb2.PullBlocksRequest(queue_timeout=Duration(seconds=seconds, nanos=nanos))
    found = outcome(lambda: values.timeout_s(request, "queue_timeout"))
    assert found is not None
    if isinstance(found, KVGrpcError):
        assert found.reason is Reason.INVALID_FIELD
        assert seconds + nanos / 1e9 <= 0
    else:
        assert 0 < found < math.inf


@given(BLOCK_IDS)
def test_block_ids_survive_the_way_there_and_back_in_order(ids: list[int]) -> None:
    made = values.named_blocks(((0, np.array(ids, dtype=np.int64)),), 7, "b-1")
    assert (made.incarnation, made.allocation_id) == (7, "b-1")
    found = values.lists_of("blocks", made, LIMIT)
    assert [row.tolist() for _, row in found] == ([ids] if ids else [])


@given(st.integers(0, 2**31), st.integers(1, 60_000))
def test_consecutive_blocks_are_one_run(start: int, count: int) -> None:
    (row,) = values.named_blocks(((3, np.arange(start, start + count)),), 7).groups
    assert (row.group, list(row.runs.starts), list(row.runs.counts)) == (3, [start], [count])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=20))
def test_runs_are_maximal(runs: list[tuple[int, int]]) -> None:
    ids = [start + i for start, count in runs for i in range(count)]
    for row in values.named_blocks(((0, np.array(ids, dtype=np.int64)),), 7).groups:
        ends = [start + count for start, count in zip(row.runs.starts, row.runs.counts, strict=True)]
        assert all(end != start for end, start in zip(ends, row.runs.starts[1:], strict=False))


def test_blocks_are_of_a_life_that_is_stated() -> None:
    ids = ((0, np.array([4, 5])),)
    with pytest.raises(InvalidRequest) as caught:
        values.lists_of("destination.blocks", values.named_blocks(ids, 0), LIMIT)
    assert [violation.field for violation in caught.value.violations] == ["destination.blocks.incarnation"]
    assert values.lists_of("blocks", common_pb2.Blocks(), LIMIT) == ()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_any_runs_are_ids_or_a_typed_refusal(starts: list[int], counts: list[int]) -> None:
    row = common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=starts, counts=counts))
    try:
        ((_, ids),) = values.block_lists([row], LIMIT)
    except (InvalidRequest, OutOfRange):
        assert len(starts) != len(counts) or 0 in counts or sum(counts) > LIMIT
    else:
        expected = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        assert ids.tolist() == expected


def test_the_limit_counts_the_blocks_of_all_rows() -> None:
    half = common_pb2.GroupBlocks(runs=common_pb2.BlockRuns(starts=[0], counts=[60]))
    assert len(values.block_lists([half], 100)) == 1
    with pytest.raises(OutOfRange) as caught:
        values.block_lists([half, half], 100)
    assert caught.value.reason is Reason.LIMIT_EXCEEDED


def test_every_reason_has_its_number_on_the_wire() -> None:
    names = {reason: common_pb2.FailureReason.Name(values.reason(reason)) for reason in Reason}
    assert [reason for reason, name in names.items() if name != f"FAILURE_REASON_{reason.value}"] == []
    assert [reason for reason in Reason if values.core_reason(values.reason(reason)) is not reason] == []


def test_every_number_on_the_wire_has_its_reason() -> None:
    known = {number for name, number in common_pb2.FailureReason.items() if name != "FAILURE_REASON_UNSPECIFIED"}
    assert {values.reason(reason) for reason in Reason} == known
    assert values.reason(None) == common_pb2.FAILURE_REASON_UNSPECIFIED


@given(st.integers(-(2**31), 2**31 - 1))
def test_any_number_reads_as_a_reason_and_an_unknown_one_as_internal(number: int) -> None:
    found = values.core_reason(number)
    if number not in common_pb2.FailureReason.values() or not number:
        assert found is Reason.INTERNAL


def test_a_failure_says_what_it_knows_and_nothing_else(subtests: pytest.Subtests) -> None:
    for side, next_, rank in itertools.product([*Side, None], [*NextStep, None], [0, 3, None]):
        message = values.failure(Failure(Reason.PEER_LOST, "gone", "wire", side, rank, next_))
        with subtests.test(side=side, next=next_, rank=rank):
            assert (message.reason, message.message) == (common_pb2.FAILURE_REASON_PEER_LOST, "gone")
            assert message.phase == common_pb2.TRANSFER_PHASE_WIRE
            assert message.HasField("rank") is (rank is not None)
            assert message.rank == (rank or 0)
            assert common_pb2.Side.Name(message.side) == f"SIDE_{side.name if side else 'UNSPECIFIED'}"
            assert common_pb2.NextStep.Name(message.next) == f"NEXT_STEP_{next_.name if next_ else 'UNSPECIFIED'}"


@given(st.binary(max_size=400))
def test_any_bytes_are_a_grant_or_a_typed_refusal(token: bytes) -> None:
    found = outcome(lambda: values.claims_of(common_pb2.Grant(token=token)))
    assert not isinstance(found, KVGrpcError) or found.reason is Reason.GRANT_INVALID
