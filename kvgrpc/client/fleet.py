"""FleetService: the engines of a registry, at a lead with one or at `kvgrpc fleet`; see fleet.proto.

    fleet = client.fleet()
    pair = await fleet.pick_pair(model_name="llama")           # pair.prefill.engine, pair.decode.engine, pair.reason
    async for event in fleet.watch(EngineFilter(model_name="llama")):
        ...                                                    # FleetEngines: all of them, after each change

A server that cannot be reached is a marker in a watch, which goes on.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from kvgrpc.client import options as opt
from kvgrpc.client.caller import Caller
from kvgrpc.client.values import in_seconds
from kvgrpc.client.watch_engine import EngineUnreachable, again_and_again, one_stream
from kvgrpc.v1 import fleet_pb2 as pb
from kvgrpc.v1.common_pb2 import ContentChain

if TYPE_CHECKING:
    from kvgrpc.v1.fleet_pb2_grpc import FleetServiceAsyncStub


@dataclass(frozen=True)
class FleetEngines:
    """All entries that meet the filter, by their ids, as of one revision."""

    engines: Mapping[str, pb.FleetEngine]
    registry_silence_s: float | None
    """Time since the registry broke off, in seconds; None while it answers."""


FleetEvent = FleetEngines | EngineUnreachable
"""The engines after a change, or a marker: the server of the fleet cannot be reached, and what is known may be old."""


class Fleet:
    """The calls about the engines of a registry; `Client.fleet` makes it."""

    def __init__(self, caller: Caller, stub: "FleetServiceAsyncStub") -> None:
        self._call = caller
        self._stub = stub

    async def engines(
        self, wanted: pb.EngineFilter | None = None, **options: Unpack[opt.ListOptions]
    ) -> pb.ListEnginesResponse:
        """Returns the entries of the registry that meet a filter, with what is known of their engines."""
        request = pb.ListEnginesRequest(filter=wanted)
        return await self._call.pages(self._stub.ListEngines, request, options, "engines")

    async def pick_pair(
        self,
        *,
        model_name: str = "",
        model_digest: str = "",
        layout_digest: str = "",
        tenant: str = "",
        chain: ContentChain | None = None,
        exclude: Sequence[str] = (),
        **options: Unpack[opt.CallOptions],
    ) -> pb.PickPairResponse:
        """Returns a prefill and a decode engine for a request, and why these; without them if no pair fits."""
        request = pb.PickPairRequest(model_name=model_name, tenant=tenant, chain=chain, excluded_engine_ids=exclude)
        request.model_digest, request.layout_digest = model_digest, layout_digest
        return await self._call.read(self._stub.PickPair, request, options)

    def watch(self, wanted: pb.EngineFilter | None = None) -> AsyncGenerator[FleetEvent, None]:
        """Yields all entries that meet a filter at once, then all of them after each change, for any length of time:
        a stream that ends is followed by another one, which goes on where it was.
        """
        request, known = pb.WatchEnginesRequest(filter=wanted), dict[str, pb.FleetEngine]()
        return again_and_again(lambda: self._stream(request, known))

    async def _stream(
        self, request: pb.WatchEnginesRequest, known: dict[str, pb.FleetEngine]
    ) -> AsyncGenerator[FleetEngines, None]:
        """Yields the entries after each complete change of one stream. `known` and the request go on from it."""
        now, silent, told = dict(known), False, False
        async with aclosing(one_stream(self._call, self._stub.WatchEngines, request)) as replies:
            async for reply in replies:
                if reply.snapshot:
                    now = {}
                now |= {one.entry_id: one for one in reply.engines}
                for entry_id in reply.removed_entry_ids:
                    now.pop(entry_id, None)
                if not reply.complete:
                    continue
                silence_s = in_seconds(reply.registry_silence) if reply.HasField("registry_silence") else None
                news = now != known or silent is not (silence_s is not None) or not (told or request.after_revision)
                known.clear()
                known |= now
                request.after_revision, silent, told = reply.revision, silence_s is not None, True
                if news:
                    yield FleetEngines(dict(now), silence_s)
