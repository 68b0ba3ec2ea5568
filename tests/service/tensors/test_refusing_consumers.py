"""The caller of a put hears the error with which its consumer refuses the tensor. A consumer that wants a retry at once
is not called again at once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvgrpc.core.tensors.descriptions import LeadAddress, Put
from kvgrpc.core.tensors.waits import RETRY_DELAY_S
from kvgrpc.core.values.owners import STORE
from kvgrpc.errors import (
    Aborted,
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    FieldViolation,
    InternalError,
    KVGrpcError,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
)
from kvgrpc.service import grpc_status
from kvgrpc.service.tensors.staging_store import StagingStore
from kvgrpc.v1 import common_pb2
from tests.service.tensors.leads import life_of, named, of_pages
from tests.service.tensors.servicers import serving

REFUSALS = [
    PreconditionFailed(
        Reason.CONTENT_MISMATCH, "another one", violations=(FieldViolation("expected.dtype", "is int8"),)
    ),
    PreconditionFailed(Reason.TRANSFER_ENDED, "its request was released"),
    OutOfRange(Reason.LIMIT_EXCEEDED, "too large", metadata={"limit": "64"}),
    PermissionDenied(Reason.DIAL_REFUSED, "not on the list"),
    Aborted(Reason.INCARNATION_CHANGED, "another life"),
    DeadlineExceeded(Reason.TRANSFER_TIMEOUT, "too slow", metadata={"phase": "posting"}),
    InternalError(Reason.DATA_PATH_FAILED, "a library said so"),
    DataLoss(Reason.CHECKSUM_MISMATCH, "byte 7"),
    Exhausted(Reason.POOL_EXHAUSTED, "full", retry_delay_s=30.0),
]


class Refusing:
    """A consumer that refuses every call."""

    def __init__(self, error: KVGrpcError) -> None:
        self.error = error
        self.calls = 0

    async def PutTensor(self, _: Any, context: Any) -> None:  # noqa: N802
        self.calls += 1
        await grpc_status.abort(context, self.error, common_pb2.ResponseHeader(engine_id="refusing"))

    GetTensor = ReleaseTensors = ListTensors = GetStagingStatus = PutTensor


@asynccontextmanager
async def refusing(error: KVGrpcError) -> AsyncIterator[tuple[Refusing, LeadAddress]]:
    service = Refusing(error)
    async with serving(service) as address:
        yield service, address


async def refused(staging: StagingStore, to: tuple[LeadAddress, ...], timeout_s: float, name: str = "a") -> KVGrpcError:
    """Makes a put that must fail, and returns its error."""
    allocation_id, _ = life_of(staging).transfers.allocate(1, "")
    put = Put(named(name), of_pages(), allocation_id, consumers=to, consumer_count=len(to), timeout_s=timeout_s)
    with pytest.raises(KVGrpcError) as raised:
        await asyncio.wait_for(staging.put(put, "", STORE), 20.0)
    return raised.value


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.reason.value)
async def test_the_sources_caller_hears_what_the_consumer_says(staging: StagingStore, error: KVGrpcError) -> None:
    async with refusing(error) as (consumer, address):
        heard = await refused(staging, (address,), 5.0)
    assert (type(heard), heard.reason, heard.violations) == (type(error), error.reason, error.violations)
    assert error.metadata.items() <= heard.metadata.items()
    assert error.message in heard.message
    assert consumer.calls == 1
    assert life_of(staging).table.offers == {}


async def test_of_several_consumers_the_first_that_refuses_is_heard(staging: StagingStore) -> None:
    one = PreconditionFailed(Reason.WEIGHTS_MISMATCH, "other weights")
    async with refusing(one) as (_, first), refusing(REFUSALS[0]) as (_, second):
        assert (await refused(staging, (first, second), 5.0)).reason is Reason.WEIGHTS_MISMATCH


@pytest.mark.parametrize("limit", ["", "0", "-1", "x", "9" * 9, "9" * 5_000, "\u0663"])
async def test_what_a_consumer_says_of_bundles_hinders_no_put(staging: StagingStore, limit: str) -> None:
    error = OutOfRange(Reason.LIMIT_EXCEEDED, "too large", metadata={"limit": limit})
    async with refusing(error) as (consumer, address):
        heard = await asyncio.gather(*(refused(staging, (address,), 5.0, name) for name in "abcd"))
    assert {error.reason for error in heard} == {Reason.LIMIT_EXCEEDED}
    assert consumer.calls == 1 + 1 + 3, "the first, a bundle of the others, and each of them"


@pytest.mark.parametrize("delay_s", [None, 0.0, 1e-9])
async def test_a_consumer_that_asks_to_be_called_again_at_once_is_called_as_seldom_as_others(
    staging: StagingStore, delay_s: float | None
) -> None:
    async with refusing(Exhausted(Reason.POOL_EXHAUSTED, "full", retry_delay_s=delay_s)) as (consumer, address):
        assert (await refused(staging, (address,), 6 * RETRY_DELAY_S)).reason is Reason.POOL_EXHAUSTED
    assert 2 <= consumer.calls <= 6
