"""Errors name fields by their paths from the root of the request, as the schema has them."""

import pytest

from kvgrpc.errors import FieldViolation, InvalidRequest, PreconditionFailed, Reason, invalid
from kvgrpc.v1 import common_pb2, handoff_pb2, handshake_pb2, pool_pb2, tensor_pb2
from kvgrpc.wire.paths import in_schema, is_field, placed

CHAIN = common_pb2.Content(chain=common_pb2.ContentChain(token_count=1))
GROUPS = [common_pb2.GroupBlocks(), common_pb2.GroupBlocks(group=1)]


@pytest.mark.parametrize(
    ("request_", "path", "expected"),
    [
        (handoff_pb2.FinishedBlocksRequest(for_readers=handoff_pb2.HandOver(content=CHAIN)), "content.chain.digests",
         "for_readers.content.chain.digests"),
        (handoff_pb2.FinishedBlocksRequest(), "job", "job"),
        (handoff_pb2.PullBlocksRequest(content=CHAIN), "content.chain.digests", "content.chain.digests"),
        (pool_pb2.FreeBlocksRequest(blocks=common_pb2.Blocks(groups=GROUPS)), "runs.counts",
         "blocks.groups[0].runs.counts"),
        (tensor_pb2.PutTensorRequest(tensor=tensor_pb2.TensorName(name="k")), "transfer_key", "tensor.transfer_key"),
        (pool_pb2.FreeBlocksRequest(), "nothing.like.it", "nothing.like.it"),
    ],
)  # fmt: skip
def test_a_path_begins_at_the_root_of_the_request(request_: object, path: str, expected: str) -> None:
    (violation,) = placed(invalid(path, "is wrong"), request_).violations
    assert violation.field == expected


def test_in_what_engines_do_not_fit_is_a_path_of_their_descriptions_in_whatever_request() -> None:
    wrong = FieldViolation("pool.groups[0].head_dim", "32 at P, 16 at D")
    error = PreconditionFailed(Reason.INCOMPATIBLE_POOLS, "no", violations=(wrong,))
    request = handshake_pb2.HandshakeRequest(engine=handshake_pb2.EngineDescription(engine_id="D"))
    assert placed(error, request).violations == (wrong,)


def test_what_is_no_message_places_nothing() -> None:
    error = invalid("transfer_key", "is wrong")
    assert placed(error, b"bytes that were not parsed") is error
    assert error.violations[0].field == "transfer_key"


def test_fields_of_a_layout_have_the_schemas_names() -> None:
    rows = tuple(FieldViolation(path, "is wrong") for path in ("groups[0].layers", "regions[1].offset", "total_bytes"))
    expected = ["engine.pool.groups[0].layer_count", "engine.pool.regions[1].offset", "engine.pool.total_bytes"]
    assert [row.field for row in in_schema(rows, "engine.pool")] == expected


def test_a_path_is_one_of_the_schema() -> None:
    pull = handoff_pb2.PullBlocksRequest.DESCRIPTOR
    for path in ("destination.blocks.groups[0]", "grant.token", "wait", "pull"):  # the last path is a oneof
        assert is_field(path, pull), path
    for path in ("target", "grant.token.more", "pull.token", "grant[x]", "", "destination."):
        assert not is_field(path, pull), path


def test_what_the_message_says_is_not_said_again() -> None:
    what = "block 9 does not exist"
    error = InvalidRequest(Reason.BLOCK_DUPLICATE, what, violations=(FieldViolation("blocks", what),))
    assert str(error) == f"BLOCK_DUPLICATE: blocks: {what}"
    assert error.sentence == f"blocks: {what}"
