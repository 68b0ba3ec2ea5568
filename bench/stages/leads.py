"""Two leads without processes: their cores, and every message as their services would parse and answer it.

Nothing is sent, gRPC is not involved, and a posting ends the moment it is posted. The rest is the work that a push
costs the leads themselves. It is counted as processor time, the cores separately.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from bench.plan import pool
from kvgrpc.core import actions, events
from kvgrpc.core.actions import Action
from kvgrpc.core.node import Node
from kvgrpc.core.tables.transfers import State
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import PROTOCOL_MAX, PROTOCOL_MIN, Limits
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import handoff_pb2, transfer_pb2
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.wire import accesses, answers, peer_calls, requests
from kvgrpc.wire.values import grant

_LIMITS = Limits()
_MOST = _LIMITS.blocks_per_request
_STEP_S = 0.001
"""Time between two calls on the clock of the cores, in seconds."""
_IGNORED = (actions.TransferChanged, actions.TellEngine, actions.Expect)
"""Actions for ranks, watchers and engines, which do not exist here."""


@dataclass(frozen=True)
class Method:
    """One call: its request, the core's event for it from the calling lead, and the reply from the core's answer."""

    name: str
    request: type[Message]
    to_event: Callable[[Any, peer_pb2.Caller, events.Call], events.Event]
    to_reply: Callable[[ResponseHeader, Any, float], Message]


def _peer_reply(kind: Any, put: Callable[[Any, Any], None]) -> Any:
    def make(header: ResponseHeader, answer: Any, _: float) -> Message:
        reply: Message = kind(header=header)
        put(answer, reply)
        return reply

    return make


RESERVE = Method(
    "ReserveBlocks",
    handoff_pb2.ReserveBlocksRequest,
    lambda request, _, call: requests.reserve_blocks(request, call, "", _MOST),
    lambda header, answer, now: handoff_pb2.ReserveBlocksResponse(
        header=header, transfer=answers.transfer(answer.transfer, now), grant=grant(answer.token)
    ),
)
REGISTER = Method(
    "RegisterPush",
    handoff_pb2.RegisterPushRequest,
    lambda request, _, call: requests.register_push(request, call),
    lambda header, answer, now: handoff_pb2.RegisterPushResponse(
        header=header, transfer=answers.transfer(answer.transfer, now)
    ),
)
FINISH = Method(
    "FinishedBlocks",
    handoff_pb2.FinishedBlocksRequest,
    lambda request, _, call: requests.finished_blocks(request, call, "", _MOST),
    lambda header, answer, now: handoff_pb2.FinishedBlocksResponse(
        header=header,
        lease=answers.lease(answer.lease, answer.times, header.incarnation),
        transfer=answers.transfer(answer.transfer, now),
    ),
)
_OPEN = Method(
    "OpenAccess", peer_pb2.OpenAccessRequest,
    lambda request, caller, call: peer_calls.open_access(request, caller, call, _MOST),
    _peer_reply(peer_pb2.OpenAccessResponse, peer_calls.openings),
)  # fmt: skip
_PARTS = Method(
    "PartsReady", peer_pb2.PartsReadyRequest,
    lambda request, caller, call: peer_calls.parts_ready(request, caller, call, _MOST),
    _peer_reply(peer_pb2.PartsReadyResponse, lambda *_: None),
)  # fmt: skip
_VERDICTS = _peer_reply(peer_pb2.SettleAccessResponse, peer_calls.verdicts)
_SETTLE = Method("SettleAccess", peer_pb2.SettleAccessRequest, peer_calls.settle_access, _VERDICTS)


class Lead:
    """One core with its engine."""

    def __init__(self, name: str, incarnation: int, blocks: int) -> None:
        # Like in servers, the destination of a push moves its bytes.
        self.node = Node(_LIMITS, frozenset())
        self.asks = secrets.token_bytes(32)
        """Proof that the other lead must show."""
        self.description = EngineDescription(
            engine_id=name,
            incarnation=incarnation,
            address=f"127.0.0.1:{incarnation}",
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            weights_revision="bench",
            pool=pool(4 << 10, blocks).layout(),
            pool_kind=PoolKind.ENGINE_MANAGED,
            world_size=1,
        )
        self.node.handle(events.LifeBegan(incarnation, secrets.token_bytes(32), self.description, True), 0.0)

    @property
    def key(self) -> str:
        return peer_key(self.description.engine_id, self.description.incarnation)

    @property
    def caller(self) -> peer_pb2.Caller:
        return peer_pb2.Caller(engine_id=self.description.engine_id, incarnation=self.description.incarnation)


class Leads:
    """A source and a destination that know each other."""

    def __init__(self, blocks: int) -> None:
        self.source, self.destination = Lead("source", 1, blocks), Lead("destination", 2, blocks)
        self.core_s = 0.0
        """Processor time of both cores so far, in seconds."""
        self._now = 0.0
        self._calls = 0
        self._replies: dict[int, actions.Reply] = {}
        self._todo: deque[tuple[Lead, Action]] = deque()
        for lead in (self.source, self.destination):
            call = self._call()
            self._feed(lead, events.ConnectPeer(call, self._other(lead).description.address))
            self._run()
            assert call.id in self._replies, "the two leads do not find to each other"

    def ask(self, lead: Lead, method: Method, request: bytes) -> bytes:
        """Performs one call of an engine and all that follows from it at both leads. Raises KVGrpcError if it is
        refused.
        """
        self._now += _STEP_S
        reply = self._perform(lead, method, request)
        self._run()
        return reply

    def ended(self, transfer_id: str) -> bytes:
        """Returns the destination's answer to a WaitTransfer for a push that is over."""
        transfer = self.destination.node.state.transfers.get(transfer_id)
        assert transfer.state is State.SUCCEEDED, f"the push did not succeed: {transfer}"
        made = transfer_pb2.WaitTransferResponse(
            header=self._header(self.destination), transfer=answers.transfer(transfer, self._now)
        )
        return made.SerializeToString()

    def forget(self) -> None:
        """Lets the engines acknowledge every transfer that is over."""
        for lead in (self.source, self.destination):
            over = tuple(transfer.id for transfer in lead.node.state.transfers if transfer.over)
            self._feed(lead, events.AcknowledgeTransfers(self._call(), over))

    def _call(self) -> events.Call:
        self._calls += 1
        return events.Call(self._calls, "engine")

    def _other(self, lead: Lead) -> Lead:
        return self.destination if lead is self.source else self.source

    def _header(self, lead: Lead) -> ResponseHeader:
        state = lead.node.state
        return ResponseHeader(
            engine_id=lead.description.engine_id, incarnation=state.life.incarnation, event_seq=state.transfers.seq
        )

    def _perform(self, lead: Lead, method: Method, data: bytes) -> bytes:
        """Parses a request, lets the core handle it, and serialises the answer, like a service with an immediate
        answer.
        """
        request = method.request.FromString(data)
        self._calls += 1
        call = requests.make_call(self._calls, "engine", "", method.name, request, proof=lead.asks)
        self._feed(lead, method.to_event(request, self._other(lead).caller, call))
        answer = self._replies.pop(call.id).answer
        return method.to_reply(self._header(lead), answer, self._now).SerializeToString()

    def _feed(self, lead: Lead, event: events.Event) -> None:
        began = time.thread_time()
        todo = lead.node.handle(event, self._now)
        self.core_s += time.thread_time() - began
        for action in todo:
            if isinstance(action, actions.Refuse):
                raise action.error
            if isinstance(action, actions.Reply):
                self._replies[action.call_id] = action
            elif not isinstance(action, _IGNORED):
                self._todo.append((lead, action))

    def _run(self) -> None:
        while self._todo:
            self._carry(*self._todo.popleft())

    def _carry(self, lead: Lead, action: Action) -> None:
        """Performs a lead's action at the other lead, or at its own rank."""
        there = self._other(lead)
        match action:
            case actions.SendOpen(opening=opening):
                sent = accesses.open_request(opening).SerializeToString()
                reply = peer_pb2.OpenAccessResponse.FromString(self._perform(there, _OPEN, sent))
                self._feed(lead, events.AccessAnswered(opening.access_id, accesses.opened(reply, _MOST)))
            case actions.SendParts(access_id=access_id, parts=parts):
                sent = accesses.parts_request(access_id, parts).SerializeToString()
                peer_pb2.PartsReadyResponse.FromString(self._perform(there, _PARTS, sent))
                self._feed(lead, events.PartsAnswered(access_id, None))
            case actions.SendSettle(settling=settling):
                sent = accesses.settle_request(settling).SerializeToString()
                verdict = peer_pb2.SettleAccessResponse.FromString(self._perform(there, _SETTLE, sent))
                self._feed(lead, events.SettleAnswered(settling.access_id, accesses.verdict(verdict)))
            case actions.Post():
                self._feed(lead, events.PostingEnded(action.posting_id, done=True, nbytes=action.runs.total_bytes))
            case _:
                self._meet(lead, there, action)

    def _meet(self, lead: Lead, there: Lead, action: Action) -> None:
        """Performs the steps of a handshake."""
        match action:
            case actions.Dial(address=address, endpoints=endpoints):
                call = self._call()
                told = events.HandshakeReceived(call, lead.description, endpoints, shows=lead.asks, asks=there.asks)
                self._feed(there, told)
                self._run()
                answer = self._replies.pop(call.id).answer
                assert isinstance(answer, actions.Introduced)
                reached = events.PeerAnswered(
                    address, there.description, answer.endpoints, shows=answer.proof, asks=lead.asks
                )
                self._feed(lead, reached)
                self._feed(there, events.PeerAlive(lead.key, there.asks))
            case actions.MakeOffer(rank=rank, key=key):
                endpoint = RankEndpoint(rank, loopback=LoopbackEndpoint(key, 1 << 40))
                self._feed(lead, events.EndpointOffered(rank, key, endpoint))
            case actions.MapPeer(rank=rank, peer=peer, attempt=attempt):
                self._feed(lead, events.PeerMapped(rank, peer, "loopback", "nothing moves here", attempt=attempt))
            case _:
                raise AssertionError(f"{action} is not performed")
