"""A store, and callers by RPC that know the key of a request, like its source and its router do."""

import os

import grpc
import numpy as np
import pytest

from kvgrpc.core.tensors.store_layout import store_layout
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.engine import Engine
from kvgrpc.engine.tensors import TensorStore
from kvgrpc.errors import Exhausted, PreconditionFailed
from kvgrpc.v1 import admin_pb2, lease_pb2, pool_pb2, tensor_pb2, tensor_pb2_grpc
from tests.engine.owners.victims import put
from tests.engine.tensors.conftest import PAGE, PAGES, Pair
from tests.service.api import Api
from tests.service.values import content, group, named_blocks


def test_what_the_engine_reads_is_freed_by_no_other_caller_that_knows_its_key(pair: Pair, key: bytes) -> None:
    p, d = pair
    p.put(key, "a", np.arange(PAGE), to=[d.address])
    got = d.get(key, "a")
    with grpc.insecure_channel(d.address) as channel:
        release = tensor_pb2_grpc.TensorServiceStub(channel).ReleaseTensors
        assert release(tensor_pb2.ReleaseTensorsRequest(transfer_key=key)).released_count == 0
    other = os.urandom(16)
    with pytest.raises(Exhausted):  # another request has all free pages now
        fill(pair, other)
    assert (got.numpy() == np.arange(PAGE)).all()
    with pytest.raises(PreconditionFailed):
        d.get(key, "a")
    assert d.release(key) == 1
    d.release(other)


def test_a_tensor_that_an_engine_holds_is_read_freed_and_overwritten_by_no_caller_that_names_its_pages(
    pair: Pair, key: bytes
) -> None:
    p, d = pair
    p.put(key, "a", np.arange(PAGE), to=[d.address])
    got = d.get(key, "a")
    api = Api(d.address)
    incarnation = api.admin.GetStatus(admin_pb2.GetStatusRequest()).header.incarnation
    for number in range(1, 20):
        guess = f"b-{incarnation:016x}-{number}"
        assert api.refusal(lambda guess=guess: put(api, guess)).reason == "BLOCK_NOT_ALLOCATED"  # type: ignore[misc]
    for page in range(PAGES):
        named = named_blocks(incarnation, group([page]))
        free = pool_pb2.FreeBlocksRequest(blocks=named)
        assert api.refusal(lambda free=free: api.pool.FreeBlocks(free)).reason == "BLOCK_NOT_ALLOCATED"  # type: ignore[misc]
        lend = lease_pb2.GrantLeaseRequest(content=content(range(1)), blocks=named)
        assert api.refusal(lambda lend=lend: api.leases.GrantLease(lend)).reason == "BLOCK_NOT_ALLOCATED"  # type: ignore[misc]
    api.close()
    other = os.urandom(16)
    with pytest.raises(Exhausted):
        fill(pair, other)
    d.release(other)
    assert (got.numpy() == np.arange(PAGE)).all()
    assert d.release(key) == 1


def test_an_allocation_that_was_put_is_its_putters_no_more(key: bytes) -> None:
    layout = store_layout(PAGES * PAGE, PAGE)
    engine = Engine.launch(pool=layout, kind=PoolKind.SERVER_MANAGED, flags=["--drain-s", "0"])
    ticket = (("kvgrpc-ticket", engine.ticket.secret.hex()),)
    api = Api(engine.address)
    with TensorStore(engine) as store:
        counts = [pool_pb2.GroupBlockCount(block_count=1)]
        made = api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(group_block_counts=counts), metadata=ticket)
        allocation_id = made.blocks.allocation_id
        assert api.refusal(lambda: put(api, allocation_id)).reason == "BLOCK_NOT_ALLOCATED"
        put(api, allocation_id, key, metadata=ticket)
        free = pool_pb2.FreeBlocksRequest(allocation_id=allocation_id)
        found = api.refusal(lambda: api.pool.FreeBlocks(free, metadata=ticket))
        assert found.reason == "BLOCK_NOT_ALLOCATED"
        assert store.release(key) == 1
    api.close()


def fill(pair: Pair, key: bytes) -> None:
    """Puts tensors of a page until one finds no room."""
    p, d = pair
    for number in range(PAGES):
        p.put(key, number, np.full(PAGE, 255, np.uint8), to=[d.address], timeout_s=1.0)
