"""Requests about the engines of a registry, for inputs."""

from collections.abc import Iterator

from google.protobuf.message import Message

from kvgrpc.v1 import common_pb2, fleet_pb2


def fleet_requests(_: object) -> Iterator[tuple[str, Message]]:
    """Yields (RPC, a request that is refused only where there is no registry)."""
    wanted = fleet_pb2.EngineFilter(
        engine_id="e", role=fleet_pb2.ENGINE_ROLE_BOTH, states=[fleet_pb2.ENGINE_STATE_HEALTHY]
    )
    chain = common_pb2.ContentChain(digests=bytes(96), token_count=40)
    yield "ListEngines", fleet_pb2.ListEnginesRequest(filter=wanted, page_size=3)
    yield "WatchEngines", fleet_pb2.WatchEnginesRequest(filter=wanted, after_revision="0-1")
    yield (
        "PickPair",
        fleet_pb2.PickPairRequest(model_name="m", tenant="t", chain=chain, excluded_engine_ids=["e"]),
    )
