"""Every RPC of every service, with random messages, mutated valid messages and broken bytes."""

from random import Random
from typing import Any

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from kvgrpc.v1 import lease_pb2
from tests.fuzz.calls import ALL, STOCK, bodies_for
from tests.fuzz.conftest import Run
from tests.fuzz.messages import Maker
from tests.fuzz.scene import TOKENS
from tests.fuzz.target import Target, readable
from tests.service.services import NAMES, SERVICES
from tests.service.values import content, dur

SHARES = {service.name: len(service.methods) / (4 if service in STOCK else 1) for service in ALL}
"""Share of the inputs, by the number of RPCs; a quarter of that for services that are not ours."""


def test_there_is_a_valid_request_of_every_rpc_of_every_service_that_is_served(target: Target) -> None:
    assert {service.full_name for service in SERVICES} == set(NAMES)
    assert target.first.requests.keys() == {method.name for service in SERVICES for method in service.methods}


def test_every_change_shows_in_the_state_and_the_passing_of_time_does_not(target: Target) -> None:
    engine, api = target.engine, target.engine.api
    blocks = engine.allocate(3)
    granted = api.leases.GrantLease(lease_pb2.GrantLeaseRequest(blocks=engine.blocks(blocks), content=content(TOKENS)))
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
def test_no_call_stops_leaks_or_changes_what_it_refuses(target: Target, run: Run, service: ServiceDescriptor) -> None:
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
