"""A re-pack survives a session unchanged, and no message makes a worker allocate more than its limit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.strips import DIMENSIONS_MAX, Repack, Strip
from kvgrpc.errors import OutOfRange, Reason, Unimplemented
from kvgrpc.session.v1 import rank_pb2
from kvgrpc.wire.bounds import STRIPS_MAX
from kvgrpc.wire.rank_commands import command_of, post_of, put_repack, repack_from_proto
from kvgrpc.wire.values import FEW

U56 = st.integers(0, 2**56 - 1)
READ_AND_REPACK = rank_pb2.POST_OPERATION_READ_AND_REPACK


@st.composite
def strips(draw: Any) -> Strip:
    dimensions = draw(st.integers(0, DIMENSIONS_MAX))
    shape, src_steps, dst_steps = (
        tuple(draw(st.lists(U56, min_size=dimensions, max_size=dimensions))) for _ in range(3)
    )
    src, dst = np.array(draw(st.lists(st.tuples(U56, U56), max_size=5)), dtype=np.int64).reshape(-1, 2).T
    return Strip(src, dst, shape, src_steps, dst_steps, draw(U56))


def plain(repack: Repack) -> list[Any]:
    rows = [(s.src.tolist(), s.dst.tolist(), s.shape, s.src_steps, s.dst_steps, s.run_bytes) for s in repack.strips]
    return [repack.staging_bytes, *rows]


def post(repack: Repack | None, operation: Operation = Operation.READ) -> rank_pb2.PostCommand:
    runs = Runs(*np.array([[1], [2], [3]], dtype=np.int64))
    command = command_of(Post(0, "p", "peer", runs, "t", operation, repack=repack))
    return rank_pb2.RankCommand.FromString(command.SerializeToString()).post


@given(st.lists(strips(), max_size=4), U56)
def test_a_re_pack_comes_back_as_it_went(parts: list[Strip], staging_bytes: int) -> None:
    repack = Repack(tuple(parts), staging_bytes)
    found = post_of(0, post(repack))
    assert found.operation is Operation.READ
    assert found.repack is not None
    assert plain(found.repack) == plain(repack)


@pytest.mark.parametrize("count", [FEW, FEW + 1])
def test_many_places_are_written_as_protobuf_writes_them(count: int) -> None:
    src, dst = np.random.default_rng(1).integers(1 << 56, size=(2, count)) >> np.arange(count) % 57
    made = rank_pb2.RepackCommand()
    put_repack(Repack((Strip(src, dst, (2,), (3,), (4,), 5),), 6), made)
    strip = rank_pb2.Strip(src=src.tolist(), dst=dst.tolist(), shape=[2], src_steps=[3], dst_steps=[4], run_bytes=5)
    assert made == rank_pb2.RepackCommand(strips=[strip], staging_bytes=6)


def test_a_worker_from_before_would_not_take_offsets_in_a_buffer_for_offsets_in_its_memory() -> None:
    assert post(Repack((), 0)).operation == READ_AND_REPACK
    assert post(None).operation == rank_pb2.POST_OPERATION_READ


@pytest.mark.parametrize(
    "command",
    [
        rank_pb2.PostCommand(operation=READ_AND_REPACK),
        rank_pb2.PostCommand(operation=rank_pb2.POST_OPERATION_READ, repack=rank_pb2.RepackCommand()),
        rank_pb2.PostCommand(operation=rank_pb2.POST_OPERATION_WRITE, repack=rank_pb2.RepackCommand()),
    ],
    ids=["no strips", "a read", "a write"],
)
def test_a_re_pack_that_is_said_in_one_place_only_is_refused(command: rank_pb2.PostCommand) -> None:
    with pytest.raises(Unimplemented) as refused:
        post_of(0, command)
    assert refused.value.reason is Reason.FEATURE_UNAVAILABLE


TOO_MUCH = {
    "strips": [rank_pb2.Strip()] * (STRIPS_MAX + 1),
    **{
        name: [rank_pb2.Strip(**{name: [1] * (DIMENSIONS_MAX + 1)})]  # type: ignore[arg-type]
        for name in ("shape", "src_steps", "dst_steps")
    },
}


@pytest.mark.parametrize("field", TOO_MUCH)
def test_more_than_a_re_pack_may_have_is_refused_before_it_is_expanded(field: str) -> None:
    with pytest.raises(OutOfRange, match=field) as refused:
        repack_from_proto(rank_pb2.RepackCommand(strips=TOO_MUCH[field]))
    assert refused.value.reason is Reason.LIMIT_EXCEEDED


def test_numbers_past_the_signed_ones_are_no_places() -> None:
    """Such a place reads as a negative number, which the check of places refuses."""
    strip = rank_pb2.Strip(src=[2**64 - 1], dst=[2**63], run_bytes=1)
    (found,) = repack_from_proto(rank_pb2.RepackCommand(strips=[strip])).strips
    assert found.src[0] < 0
    assert found.dst[0] < 0
