"""Descriptions of engines, and checks of their compatibility."""

from kvgrpc.v1 import handshake_pb2
from tests.service.engines import Engine

Description = handshake_pb2.EngineDescription


def capabilities(engine: Engine) -> handshake_pb2.GetCapabilitiesResponse:
    return engine.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest())


def check(engine: Engine, description: Description) -> handshake_pb2.CheckCompatibilityResponse:
    request = handshake_pb2.CheckCompatibilityRequest(engine=description)
    return engine.api.handshake.CheckCompatibility(request)
