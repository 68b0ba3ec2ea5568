"""Every RPC of every service, with messages that nobody meant: random ones, mutated valid ones, and broken bytes."""

from random import Random
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvgrpc.v1 import lease_pb2
from tests.fuzz.conftest import Run
from tests.fuzz.messages import Maker
from tests.fuzz.scene import TOKENS
from tests.fuzz.target import Target, readable
from tests.service.test_replies import SERVICES
from tests.service.test_standard_services import OURS
from tests.service.values import content, dur, group

STOCK: list[ServiceDescriptor] = [
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    channelz_pb2.DESCRIPTOR.services_by_name["Channelz"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
]
ALL = [*SERVICES, *STOCK]
SHARES = {service.name: len(service.methods) / (4 if service in STOCK else 1) for service in ALL}
"""By the number of RPCs; fewer for those that are not ours."""


def bodies_for(maker: Maker, random: Random, target: Target, method: MethodDescriptor) -> list[bytes]:
    """The requests of one call: one, or up to three where the client streams."""
    valid, found = target.first.requests.get(method.name, []), []
    for _ in range(random.choice((1, 2, 3)) if method.client_streaming else 1):
        kind = random.choice(("any", "mutated", "mutated", "mutated", "garbled")) if valid else "any"
        made = maker.any_of(method.input_type) if kind == "any" else random.choice(valid)
        if kind == "mutated":
            made = maker.mutated(made)
        body = target.scene.translated(made, target.first).SerializeToString()
        found.append(maker.garbled(body) if kind == "garbled" else body)
    return found


def test_there_is_a_valid_request_of_every_rpc_of_every_service_that_is_served(target: Target) -> None:
    assert {service.full_name for service in SERVICES} == set(OURS)
    assert target.first.requests.keys() == {method.name for service in SERVICES for method in service.methods}


def test_every_change_shows_in_the_state_and_the_passing_of_time_does_not(target: Target) -> None:
    engine, api = target.engine, target.engine.api
    blocks = engine.allocate(3)
    granted = api.leases.GrantLease(lease_pb2.GrantLeaseRequest(blocks=[group(blocks)], content=content(TOKENS)))
    ref = lease_pb2.LeaseRef(lease_id=granted.lease.lease_id)
    handed = engine.hand_over(TOKENS, blocks)
    seen = [target.digest()]
    assert target.digest() == seen[0]
    for change in (
        lambda: api.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=[ref], ttl=dur(500))),
        lambda: engine.allocate(1),
        lambda: engine.pull(handed.grant, TOKENS, None),
        lambda: engine.cancel(handed.transfer.transfer_id),
        lambda: engine.release(ref.lease_id),
        lambda: engine.free(blocks),
    ):
        change()
        seen.append(target.digest())
    assert len(set(seen)) == len(seen)
    target.check_sound()


@pytest.mark.parametrize("service", ALL, ids=lambda service: service.name)
def test_no_call_stops_the_server_leaks_a_block_or_changes_what_it_refuses(
    target: Target, run: Run, service: ServiceDescriptor
) -> None:
    methods: Any = list(service.methods)

    def call(random: Random) -> None:
        target.begin()
        method = random.choice(methods)
        choices = random.getstate()

        def make() -> list[bytes]:
            random.setstate(choices)
            return bodies_for(Maker(random, target.first.known), random, target, method)

        try:
            target.send(method, make)
        except AssertionError as error:
            raise AssertionError(f"{method.full_name} {list(readable(method, make()))}: {error}") from error

    run(call, 0.8 * SHARES[service.name] / sum(SHARES.values()))
    target.check_sound()
