"""A store and callers by RPC that know the key of a request, as its source and its router do."""

import os

import grpc
import numpy as np
import pytest

from kvgrpc.errors import Exhausted, PreconditionFailed
from kvgrpc.v1 import tensor_pb2, tensor_pb2_grpc
from tests.engine.tensors.conftest import PAGE, PAGES, Pair


def test_what_the_engine_reads_is_freed_by_no_other_caller_that_knows_its_key(pair: Pair, key: bytes) -> None:
    p, d = pair
    p.put(key, "a", np.arange(PAGE), to=[d.address])
    got = d.get(key, "a")
    with grpc.insecure_channel(d.address) as channel:
        release = tensor_pb2_grpc.TensorServiceStub(channel).ReleaseTensors
        assert release(tensor_pb2.ReleaseTensorsRequest(transfer_key=key)).released_count == 0
    other = os.urandom(16)
    with pytest.raises(Exhausted):  # all that is free is another request's now
        fill(pair, other)
    assert (got.numpy() == np.arange(PAGE)).all()
    with pytest.raises(PreconditionFailed):
        d.get(key, "a")
    assert d.release(key) == 1
    d.release(other)


def fill(pair: Pair, key: bytes) -> None:
    """Puts tensors of a page until one finds no room."""
    p, d = pair
    for number in range(PAGES):
        p.put(key, number, np.full(PAGE, 255, np.uint8), to=[d.address], timeout_s=1.0)
