"""Many hostile calls of each RPC: a server keeps little of them, and no thread and no descriptor is left."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, lease_pb2
from kvgrpc.wire.accesses import CALLS
from tests.fuzz import inside
from tests.fuzz.inside import State
from tests.fuzz.messages import Known, Maker
from tests.fuzz.target import LIMITS
from tests.service.conftest import starting
from tests.service.consumer import Consumer
from tests.service.engines import Engine, wait_until
from tests.service.footprint import footprint, resident_bytes
from tests.service.services import SERVICES
from tests.service.values import new_key

FEW = 100
MANY = 1_000
AT_ONCE = 25
CALL_S = 1.0
"""Time after which waiting calls are given up, in seconds."""
KEPT_BYTES_MAX = 4 << 20
"""Maximum memory kept, in bytes, without what the ledger reports."""
BACK_S = 20.0
METHODS: dict[str, MethodDescriptor | FieldDescriptor] = {
    f"{service.name}/{method.name}": method
    for service in SERVICES
    for method in service.methods
    if not (method.client_streaming or method.server_streaming)
}
METHODS |= {CALLS[field.name]: field for field in peer_pb2.PeerCall.DESCRIPTOR.fields if field.name in CALLS}
"""Unary RPCs by their descriptors, and calls between leads by their fields of PeerCall."""


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, State]]:
    with starting(tmp_path_factory.mktemp("many")) as start:
        (engine,) = start(("--listen", "127.0.0.9:0"), settings=LIMITS, **inside.ENVIRONMENT)
        first_dial(engine)
        with closing(State(engine.process.pid)) as state:
            yield engine, state


def first_dial(engine: Engine) -> None:
    """Makes the server dial. Its first channel takes a thread and sockets, which gRPC keeps until the process ends."""
    nowhere = common_pb2.PeerAddress(address="127.0.0.9:9")
    rows = [lease_pb2.LeaseRef(transfer_key=new_key())]
    engine.api.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=rows, source=nowhere))


def flood(engine: Engine, method: MethodDescriptor | FieldDescriptor, count: int) -> None:
    """Makes that many calls with random requests, which are the same in every run."""
    maker = Maker(Random(method.full_name), Known())
    call = calling(engine, method)
    under_way: list[Callable[[], object]] = []
    for _ in range(count):
        under_way.append(call(maker))
        if len(under_way) == AT_ONCE:
            ended(under_way)
    ended(under_way)


def calling(engine: Engine, method: MethodDescriptor | FieldDescriptor) -> Callable[[Maker], Callable[[], object]]:
    """Returns a function that begins one call, and returns a function that waits for its end."""
    if isinstance(method, FieldDescriptor):
        consumer = Consumer(engine)
        consumer.handshake()

        def converse(maker: Maker) -> Callable[[], object]:
            call = peer_pb2.PeerCall(call_id=1)
            made: Any = getattr(call, method.name)
            made.CopyFrom(maker.any_of(made.DESCRIPTOR))
            message = peer_pb2.ConverseRequest(caller=consumer.caller, calls=[call])
            return partial(list, engine.api.peer.Converse(iter([message]), timeout=CALL_S))

        return converse
    path = f"/{method.containing_service.full_name}/{method.name}"
    stub: Any = engine.api.plain.unary_unary(path, request_serializer=None, response_deserializer=None)

    def call(maker: Maker) -> Callable[[], object]:
        end: Callable[[], object] = stub.future(
            maker.any_of(method.input_type).SerializeToString(), timeout=CALL_S
        ).result
        return end

    return call


def ended(calls: list[Callable[[], object]]) -> None:
    for end in calls:
        try:
            end()
        except grpc.RpcError as error:
            assert error.code() is not grpc.StatusCode.INTERNAL, error.details()  # noqa: PT017 - most calls are refused
    calls.clear()


def weigh(flooded: tuple[Engine, State]) -> int:
    """Returns the memory of the server in bytes, without what its ledger has."""
    engine, state = flooded
    engine.api.admin.CancelDrain(admin_pb2.CancelDrainRequest())
    state.collect()
    state.trim()
    kept = engine.api.admin.GetStatus(admin_pb2.GetStatusRequest()).kept
    return resident_bytes(engine.process.pid) - kept.total_bytes


def check(flooded: tuple[Engine, State], method: MethodDescriptor | FieldDescriptor, count: int) -> None:
    engine = flooded[0]
    pid = engine.process.pid
    flood(engine, method, AT_ONCE)  # so that the resources of the first calls count as before
    before, weight = footprint(pid), weigh(flooded)
    flood(engine, method, count)
    wait_until(lambda: footprint(pid).same(before), BACK_S, lambda: (before, footprint(pid)))
    wait_until(lambda: weigh(flooded) - weight < KEPT_BYTES_MAX, BACK_S, lambda: f"{weigh(flooded) - weight:,} bytes")
    engine.process.check_log()


@pytest.mark.parametrize("name", METHODS)
def test_some_calls_of_each_rpc_leave_little(flooded: tuple[Engine, State], name: str) -> None:
    check(flooded, METHODS[name], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_many_calls_of_each_rpc_leave_little(flooded: tuple[Engine, State], name: str) -> None:
    check(flooded, METHODS[name], int(os.environ.get("FLOOD_CALLS", str(MANY))))
