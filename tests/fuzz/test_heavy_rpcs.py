"""Every RPC of every service, with the heaviest possible messages: no memory is kept, and nobody waits long."""

from copy import deepcopy
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from kvgrpc.peer.v1 import peer_pb2
from tests.fuzz.calls import ALL
from tests.fuzz.conftest import Run
from tests.fuzz.heavy import Heavy, Place, places, runs
from tests.fuzz.target import Target
from tests.service.services import SERVICES

SHARE = 0.05
WEIGHTS = {method: 1 + len(places(method.input_type)) for service in ALL for method in service.methods}
"""Weight of each method: the number of its fields that can be heavy, and one."""


def bodies_for(random: Random, target: Target, method: MethodDescriptor, valid: list[Any]) -> list[bytes]:
    """Returns the requests of one call; on a stream up to three, of which the last is heavy."""
    before = random.choice((0, 0, 1, 2)) if method.client_streaming and valid else 0
    heavy = Heavy(random, target.scene.known).body(method.input_type, random.choice(valid) if valid else None)
    return [random.choice(valid).SerializeToString() for _ in range(before)] + [heavy]


def of_the_scene(target: Target, method: MethodDescriptor) -> list[Any]:
    """Returns valid requests about the scene."""
    return [target.scene.translated(deepcopy(row), target.first) for row in target.first.requests.get(method.name, [])]


def of_a_push(target: Target, method: MethodDescriptor) -> list[Any]:
    """Returns a valid request about a push that has just begun: the call that reports its parts."""
    try:
        told = target.scene.opened_push()
    except grpc.RpcError:  # another input has replaced the consumer's life, or ended the reservation
        return of_the_scene(target, method)
    caller, call = target.scene.consumer.caller, peer_pb2.PeerCall(call_id=1, parts_ready=told)
    return [peer_pb2.ConverseRequest(calls=[call], caller=caller)]


def test_every_field_of_every_request_is_filled_in_its_turn() -> None:
    for service in SERVICES:
        for method in service.methods:
            found = {place[-1] for place in places(method.input_type)}
            inside = {field.message_type for field in found if field.message_type is not None} | {method.input_type}
            wanted = {field for message in inside if not message.GetOptions().map_entry for field in message.fields}
            assert found == wanted, method.full_name


RUNS = [(method, place) for service in SERVICES for method in service.methods for place in runs(method.input_type)]


@pytest.mark.parametrize(
    ("method", "place"), RUNS, ids=[f"{method.name}-{'.'.join(f.name for f in place)}" for method, place in RUNS]
)
def test_naming_many_blocks_is_not_heavy(target: Target, run: Run, method: MethodDescriptor, place: Place) -> None:
    def call(random: Random) -> None:
        target.begin()

        def make() -> list[bytes]:
            valid = of_the_scene(target, method)
            made = Heavy(random, target.scene.known)
            return [row.SerializeToString() + made.amplified(place, row) for row in valid[-1:]]

        target.send(method, make)

    run(call, 1e-9)


@pytest.mark.parametrize("service", ALL, ids=lambda service: service.name)
def test_no_call_keeps_memory_or_holds_up_the_loop(target: Target, run: Run, service: ServiceDescriptor) -> None:
    methods: Any = list(service.methods)

    def call(random: Random) -> None:
        target.begin()
        (method,) = random.choices(methods, [WEIGHTS[method] for method in methods])
        pushes = method.name == "Converse" and random.random() < 0.5
        choices = random.getstate()

        def bodies(valid: list[Any]) -> list[bytes]:
            random.setstate(choices)
            return bodies_for(random, target, method, valid)

        def anew() -> list[bytes]:
            return bodies(of_a_push(target, method) if pushes else of_the_scene(target, method))

        made = anew()
        target.look()
        try:
            target.send(method, (lambda: made) if pushes else anew, anew)
        except AssertionError as error:
            raise AssertionError(f"{method.full_name} {[body[:200] for body in made]}: {error}") from error

    run(call, SHARE * sum(WEIGHTS[method] for method in methods) / sum(WEIGHTS.values()))
    target.check_sound()
