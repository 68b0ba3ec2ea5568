"""A source that answers with other tensors than asked for moves nothing, and each call then asks by itself."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvgrpc.core.tensors.descriptions import LeadAddress
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.service import grpc_status
from kvgrpc.v1 import common_pb2, tensor_pb2
from kvgrpc.wire.tensors import description_to_proto
from tests.service.tensors.leads import life_of, of_pages
from tests.service.tensors.pairs import Pair, reason_of, relayed
from tests.service.tensors.servicers import serving

Reply = tensor_pb2.GetTensorResponse
HEADER = common_pb2.ResponseHeader(engine_id="lying")


class Lying:
    """A source that gives several tensors with a test's change, and refuses to give a single one."""

    def __init__(self, change: Callable[[Reply], object], token: bytes) -> None:
        self.change, self.token = change, token
        self.together = self.alone = 0

    async def GetTensor(self, request: tensor_pb2.GetTensorRequest, context: Any) -> Reply | None:  # noqa: N802
        if not request.bundled_tensors:
            self.alone += 1
            await grpc_status.abort(context, PreconditionFailed(Reason.TRANSFER_ENDED, "none by itself"), HEADER)
        self.together += 1
        made = Reply(header=HEADER, grant=common_pb2.Grant(token=self.token))
        names = [request.tensor.name, *(row.tensor.name for row in request.bundled_tensors)]
        rows = [tensor_pb2.Tensor(name=name, description=description_to_proto(of_pages())) for name in names]
        made.tensor.CopyFrom(rows[0])
        made.bundled_tensors.extend(rows[1:])
        self.change(made)
        return made

    PutTensor = ReleaseTensors = ListTensors = GetStagingStatus = GetTensor


@asynccontextmanager
async def lying(change: Callable[[Reply], object], token: bytes) -> AsyncIterator[tuple[Lying, LeadAddress]]:
    service = Lying(change, token)
    async with serving(service) as address:
        yield service, address


LIES: dict[str, Callable[[Reply], object]] = {
    "a tensor that nobody asked for": lambda reply: setattr(reply.bundled_tensors[0], "name", "x"),
    "another part": lambda reply: setattr(reply.tensor, "part", 7),
    "one of them twice": lambda reply: setattr(reply.bundled_tensors[0], "name", "d"),
    "no tensor": lambda reply: reply.ClearField("tensor"),
    "no grant": lambda reply: reply.ClearField("grant"),
    "a forged grant": lambda reply: setattr(reply.grant, "token", b"forged"),
    "an absurd shape": lambda reply: reply.tensor.description.shape_sizes.extend([2**32 - 1] * 16),
    "more than may be": lambda reply: reply.bundled_tensors.extend([reply.tensor] * 1000),
    "one that is larger than the store": lambda reply: reply.tensor.description.CopyFrom(
        description_to_proto(of_pages(1000))
    ),
    "fewer than there are pages": lambda reply: reply.bundled_tensors.pop(),
    "another shape than it has": lambda reply: reply.tensor.description.shape_sizes.insert(0, 1),
}


@pytest.mark.parametrize("lie", LIES)
async def test_each_call_asks_by_itself_after_an_answer_that_is_none(pair: Pair, lie: str) -> None:
    token = relayed(pair, "bcd").token
    async with lying(LIES[lie], token) as (source, address):
        calls = [pair.get(name, source=address) for name in "abcd"]
        reasons = {await reason_of(call) for call in calls}
    assert reasons == {Reason.TRANSFER_ENDED}
    assert (source.together, source.alone) == (1, 4)
    assert life_of(pair.d).table.tensors == {}
    await pair.check_empty()
