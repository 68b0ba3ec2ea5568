"""Everything happens at once, by several callers, in a small store with few names. Each call ends typed, each tensor
that is given is right, and in the end every page is free.
"""

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvgrpc.v1 import pool_pb2, tensor_pb2, transfer_pb2
from tests.service.api import read_refusal
from tests.service.contract import errors_of
from tests.service.engines import wait_until
from tests.service.tensors.conftest import Begin
from tests.service.tensors.stores import PAGE, TENSORS, Store, data_of
from tests.service.values import dur, new_key

CALLS = 60
CALLERS = 6
SHORT = "[limits]\nregistration_timeout_s = 2.0\nlease_ttl_s = 3.0\nwait_s = 2.0\n"


class Caller:
    """A caller that makes random calls for the tensors of a few requests."""

    def __init__(self, stores: list[Store], keys: list[bytes], seed: int) -> None:
        self.stores, self.keys, self.random = stores, keys, random.Random(seed)
        self.ended: dict[str, int] = {}
        self.compared = 0
        """Number of tensors that were held while their bytes were read."""

    def run(self) -> None:
        for _ in range(CALLS):
            act = self.random.choice([self.put, self.burst, self.keep, self.get, self.get, self.fetch, self.free])
            here, there = self.random.sample(self.stores, 2)
            key, name = self.random.choice(self.keys), self.random.choice("abcdef")
            try:
                act(here, there, key, name)
            except grpc.RpcError as error:
                refusal = read_refusal("", error)
                self.ended[refusal.reason] = self.ended.get(refusal.reason, 0) + 1
                known = errors_of("/PutTensor") | errors_of("/GetTensor") | errors_of("/AllocateBlocks")
                assert (refusal.code, refusal.reason) in known, refusal

    def put(self, here: Store, there: Store, key: bytes, name: str) -> None:
        self._put(here, key, name, [there], timeout=dur(1.0), ttl=dur(2.0))

    def burst(self, here: Store, there: Store, key: bytes, name: str) -> None:
        """Puts several tensors at once, which move together."""
        for each in self.random.sample("abcdef", 4):
            self._put(here, key, each, [there], timeout=dur(1.0), ttl=dur(2.0), asynchronous=True)
        self.put(here, there, key, name)

    def keep(self, here: Store, _: Store, key: bytes, name: str) -> None:
        self._put(here, key, name, [], ttl=dur(1.0))

    def _put(self, here: Store, key: bytes, name: str, to: list[Store], **fields: Any) -> None:
        """Puts a tensor. If the put is refused, frees the allocation, unless it was handed over before."""
        request = here.request(key, content(key, name), to, name, **fields)
        try:
            here.api.tensors.PutTensor(request)
        except grpc.RpcError:
            free = pool_pb2.FreeBlocksRequest(allocation_id=request.allocation_id)
            with contextlib.suppress(grpc.RpcError):
                here.api.pool.FreeBlocks(free)
            raise

    def get(self, here: Store, _: Store, key: bytes, name: str) -> None:
        self._get(here, here.wanted(key, name, timeout=dur(0.5)), content(key, name))

    def fetch(self, here: Store, there: Store, key: bytes, name: str) -> None:
        self._get(here, here.wanted(key, name, there, timeout=dur(0.5)), content(key, name))

    def _get(self, here: Store, wanted: tensor_pb2.GetTensorRequest, right: bytes) -> None:
        """Gets a tensor twice. If the allocation has not changed, it was held meanwhile, so its bytes must be right."""
        before = here.api.tensors.GetTensor(wanted)
        assert before.tensor.description.nbytes == len(right)
        found = here.bytes_of(before)
        after = here.api.tensors.GetTensor(wanted)
        if after.pages.allocation_id == before.pages.allocation_id:
            assert found == right
            self.compared += 1

    def free(self, here: Store, _: Store, key: bytes, name: str) -> None:
        if self.random.random() < 0.05:
            here.api.transfers.CancelTransfer(transfer_pb2.CancelTransferRequest(transfer_key=key))
        else:
            here.release_tensors(key, name)


def content(key: bytes, name: str) -> bytes:
    return data_of((1 + ord(name) % 9) * PAGE, seed=key[0] * 256 + ord(name))


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_callers_do_every_call_ends_and_every_page_comes_back(begin: Begin, seed: int) -> None:
    made = begin(*[SHORT + TENSORS + f"spill_bytes = {16 * PAGE}\n"] * 3)
    keys = [new_key() for _ in range(4)]
    before = threading.active_count()
    callers = [Caller(made, keys, seed * 100 + i) for i in range(CALLERS)]
    with ThreadPoolExecutor(CALLERS) as threads:
        for running in [threads.submit(caller.run) for caller in callers]:
            running.result()
    assert threading.active_count() < before + 50
    for store in made:
        store.process.check_log()
        for key in keys:
            store.release_tensors(key)
    for store in made:
        wait_until(lambda store=store: store.used() == 0, 20.0, lambda store=store: (store.status(), store.pins()))  # type: ignore[misc]
        status = store.status()
        assert (status.tensor_count, status.used_spill_page_count, status.waiting_count) == (0, 0, 0)
    assert sum(sum(caller.ended.values()) for caller in callers) < CALLERS * CALLS
    assert sum(caller.compared for caller in callers) >= CALLERS
