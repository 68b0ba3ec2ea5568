"""HandshakeService: describes this engine, and tells whether two engines can exchange blocks."""

from collections.abc import AsyncIterator

from kvgrpc.core.state.engine_status import engine_status
from kvgrpc.core.values.compatibility import compare
from kvgrpc.core.values.limits import PROTOCOL_MAX, PROTOCOL_MIN
from kvgrpc.errors import invalid
from kvgrpc.service.admission import admission
from kvgrpc.service.engine_watchers import BEAT_S, INTERVAL_S
from kvgrpc.service.fleet.entry_messages import entry_to_proto
from kvgrpc.service.lead import Lead
from kvgrpc.service.methods import CONNECT_PEER, HANDSHAKE, ask, reply_to
from kvgrpc.service.rpc.method import streaming, unary
from kvgrpc.v1 import handshake_pb2, handshake_pb2_grpc
from kvgrpc.wire import description
from kvgrpc.wire.limits import limits_to_proto
from kvgrpc.wire.values import data_path, seconds


class HandshakeService(handshake_pb2_grpc.HandshakeServiceServicer):
    """Converts a request, asks the node, and converts its answer."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    @unary
    async def GetCapabilities(
        self, request: handshake_pb2.GetCapabilitiesRequest, trace: str
    ) -> handshake_pb2.GetCapabilitiesResponse:
        lead = self._lead
        known, (open_to, why) = lead.runner.node.state.life.description, admission(lead)
        engine = handshake_pb2.EngineDescription(
            engine_id=lead.config.engine_id, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX
        )
        entry = lead.publication.entry() if lead.publication is not None else None
        return handshake_pb2.GetCapabilitiesResponse(
            header=lead.header(),
            entry=entry_to_proto(entry) if entry is not None else None,
            engine=description.engine_to_proto(known) if known else engine,
            limits=limits_to_proto(lead.config.limits),
            data_paths=[
                handshake_pb2.DataPathStatus(data_path=data_path(name), available=available, why=why)
                for name, available, why in lead.data_paths()
            ],
            version=lead.version,
            admission=open_to,
            admission_reason=why,
        )

    @unary
    async def GetEngine(self, request: handshake_pb2.GetEngineRequest, trace: str) -> handshake_pb2.GetEngineResponse:
        lead = self._lead
        lead.runner.advance()
        return handshake_pb2.GetEngineResponse(header=lead.header(), status=_status(lead))

    @streaming
    async def WatchEngine(
        self, request: handshake_pb2.WatchEngineRequest, trace: str
    ) -> AsyncIterator[handshake_pb2.WatchEngineResponse]:
        lead = self._lead
        asked_s = seconds(request, "min_interval") or 0.0
        if asked_s < 0:
            raise invalid("min_interval", "is not negative")
        interval_s = min(max(asked_s, INTERVAL_S), BEAT_S)
        told: tuple[int, handshake_pb2.EngineStatus] | None = None
        with lead.engine_watchers.one() as watcher:
            in_any_case = True
            while True:
                found = lead.runner.node.state.life.incarnation, _status(lead)
                if in_any_case or found != told:
                    told = found
                    watcher.told()
                    yield handshake_pb2.WatchEngineResponse(header=lead.header(), status=found[1])
                in_any_case = await watcher.wait(interval_s)

    @unary
    async def Handshake(self, request: handshake_pb2.HandshakeRequest, trace: str) -> handshake_pb2.HandshakeResponse:
        reply = await reply_to(HANDSHAKE, self._lead, request, trace)
        self._lead.engine_ids.claim(request.engine.engine_id)
        return reply

    @unary
    async def CheckCompatibility(
        self, request: handshake_pb2.CheckCompatibilityRequest, trace: str
    ) -> handshake_pb2.CheckCompatibilityResponse:
        lead = self._lead
        there = description.engine_from_proto(request.engine, "engine")
        differences = compare(lead.runner.node.state.life.engine, there)
        return handshake_pb2.CheckCompatibilityResponse(
            header=lead.header(),
            compatible=all(difference.bridgeable for difference in differences),
            differences=[description.difference_to_proto(difference) for difference in differences],
        )

    @unary
    async def ConnectPeer(
        self, request: handshake_pb2.ConnectPeerRequest, trace: str
    ) -> handshake_pb2.ConnectPeerResponse:
        if not request.peer.address:
            raise invalid("peer.address", "is required")
        self._lead.check_dial(request.peer.address, "peer.address")
        header, answer = await ask(CONNECT_PEER, self._lead, request, trace)
        node, shown = self._lead.runner.node, None
        if peer := node.state.peers.lives.get(answer.life):
            shown = description.peer_to_proto(peer, node.state.now, node.open_accesses(peer))
        return handshake_pb2.ConnectPeerResponse(header=header, peer=shown)


def _status(lead: Lead) -> handshake_pb2.EngineStatus:
    state = lead.runner.node.state
    open_to, why = admission(lead)
    return description.status_to_proto(engine_status(state), open_to, why, attached=state.life.attached)
