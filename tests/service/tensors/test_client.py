"""The client of TensorService: its requests about tensors, and the replies."""

import pytest

from kvgrpc.client import connect, connect_sync
from kvgrpc.errors import DeadlineExceeded, PreconditionFailed
from kvgrpc.v1 import tensor_pb2
from tests.service.tensors.stores import HELD, PAGE, STORED, Store, data_of, described
from tests.service.values import new_key

DATA = data_of(PAGE)


async def test_a_tensor_is_put_got_listed_and_released(stores: tuple[Store, Store]) -> None:
    p, d = stores
    key = new_key()
    async with connect(p.address) as source, connect(d.address) as consumer:
        here, there = source.tensors(), consumer.tensors()
        allocation = p.place(DATA)
        await here.put(key, "a", described(PAGE), allocation_id=allocation, to=[d.address], request_id="r")
        assert [row.state for row in (await there.list(key)).tensors] == [STORED]
        found = await there.get(key, "a", expected=tensor_pb2.ExpectedTensor(dtype="uint8"))
        assert d.bytes_of(found) == DATA
        assert [row.name for row in (await there.list(states=[HELD], limit=1)).tensors] == ["a"]
        assert (await there.status()).tensor_count == 1
        assert (await there.release(key, ["a"])).released_count == 1
        with pytest.raises(PreconditionFailed):
            await there.get(key, "a")
        await here.release(key)


def test_what_is_kept_is_fetched_by_a_synchronous_client(stores: tuple[Store, Store]) -> None:
    p, d = stores
    key = new_key()
    with connect_sync(p.address) as source, connect_sync(d.address) as consumer:
        here, there = source.tensors(), consumer.tensors()
        here.put(key, "a", described(PAGE), allocation_id=p.place(DATA), ttl_s=30.0, part=1)
        offer = here.get(key, "a", part=1, as_offer=True)
        there.put(key, "a", offer.tensor.description, grant=offer.grant, part=1)
        assert d.bytes_of(there.get(key, "a", part=1)) == DATA
        with pytest.raises(DeadlineExceeded):
            there.get(key, "b", source=p.address, within_s=0.1)
        assert there.release(key).released_count == 1
