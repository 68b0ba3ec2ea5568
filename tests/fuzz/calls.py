"""The RPCs of all services that the server serves, and requests for them."""

from random import Random

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.fuzz.messages import Maker
from tests.fuzz.target import Target
from tests.service.services import SERVICES

STOCK: list[ServiceDescriptor] = [
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    channelz_pb2.DESCRIPTOR.services_by_name["Channelz"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
]
ALL = [*SERVICES, *STOCK]


def bodies_for(maker: Maker, random: Random, target: Target, method: MethodDescriptor) -> list[bytes]:
    """Returns the request bodies of one call: one, or up to three if the client streams."""
    valid, found = target.first.requests.get(method.name, []), []
    for _ in range(random.choice((1, 2, 3)) if method.client_streaming else 1):
        kind = random.choice(("any", "mutated", "mutated", "mutated", "garbled")) if valid else "any"
        made = maker.any_of(method.input_type) if kind == "any" else random.choice(valid)
        if kind == "mutated":
            made = maker.mutated(made)
        body = target.scene.translated(made, target.first).SerializeToString()
        found.append(maker.garbled(body) if kind == "garbled" else body)
    return found
