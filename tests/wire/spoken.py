"""Messages between leads as a lead writes them, with values that make sense, and how a lead reads each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message

from kvgrpc.core import actions, events
from kvgrpc.core.tables.accesses import AccessOpening, CloseOutcome, Verdict
from kvgrpc.core.tensors.descriptions import Description
from kvgrpc.core.values.content import ContentClaim, chain
from kvgrpc.core.values.sends import SendAsk
from kvgrpc.errors import Reason
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import handshake_pb2
from kvgrpc.wire import accesses, description, endpoints, peer_calls, sends, tensors
from tests.core.nodes import describe, endpoints as endpoints_of, hybrid

LIMIT = 1_000
CALL = events.Call(1, "peer", "")
CALLER = peer_pb2.Caller(engine_id="p", incarnation=7, proof=b"proof" * 4)
ACCESS = b"a" * 16
CONTENT = chain(range(40))
ENGINE = describe("d", 9, pool=hybrid(), world_size=2)
PARTS = (
    events.ReadyPart(0, ((0, np.array([4, 5, 9])), (1, np.array([7]))), (), (0, 2), False),
    events.ReadyPart(1, ((0, np.array([1])),), (0, 3), None, True),
)
OPENED = events.Opened(((0, np.array([3, 4, 8])), (1, np.array([2]))), 40, 48, 12.5, 30.0, 2, "t-1", "l-1")
ASK = SendAsk(0, 1, 2, 3, np.array([64]), np.array([128]), (("key", b"value"),))


@dataclass(frozen=True)
class Spoken:
    """A message as a lead writes it. `again` reads it by the code of today, and writes what was read."""

    name: str
    make: Callable[[], Message]
    again: Callable[[Any], Message]


def _openings(opened: events.Opened) -> peer_pb2.OpenAccessResponse:
    made = peer_pb2.OpenAccessResponse()
    peer_calls.openings(actions.Openings((opened,)), made)
    return made


def _verdict(value: Verdict) -> peer_pb2.SettleAccessResponse:
    made = peer_pb2.SettleAccessResponse()
    peer_calls.verdicts(actions.Verdicts((value,)), made)
    return made


def _checksums(by_rank: tuple[bytes, ...]) -> peer_pb2.ChecksumBlocksResponse:
    made = peer_pb2.ChecksumBlocksResponse()
    peer_calls.checksums(actions.Checksums(by_rank), made)
    return made


def _handshake() -> handshake_pb2.HandshakeRequest:
    rows = [endpoints.endpoint_to_proto(row) for row in endpoints_of(ENGINE)]
    return handshake_pb2.HandshakeRequest(engine=description.engine_to_proto(ENGINE), endpoints=rows)


def _handshake_again(read: handshake_pb2.HandshakeRequest) -> handshake_pb2.HandshakeRequest:
    engine = description.engine_from_proto(read.engine, "engine")
    rows = [endpoints.endpoint_to_proto(row) for row in endpoints.endpoints_from_proto(read.endpoints)]
    return handshake_pb2.HandshakeRequest(engine=description.engine_to_proto(engine), endpoints=rows)


def _opening(read: peer_pb2.OpenAccessRequest) -> Message:
    return accesses.open_request(peer_calls.open_access(read, CALLER, CALL, LIMIT).openings[0])


def _parts(read: peer_pb2.PartsReadyRequest) -> Message:
    heard = peer_calls.parts_ready(read, CALLER, CALL, LIMIT)
    return accesses.parts_request(heard.access_id, heard.parts)


def _ask(read: peer_pb2.ChecksumBlocksRequest) -> Message:
    heard = peer_calls.checksum_blocks(read, CALLER, CALL, LIMIT)
    blocks = [(tuple(ids for _, ids in lists), layers) for lists, layers in heard.blocks]
    return accesses.checksum_request(heard.access_id, blocks)


def _send(read: peer_pb2.PostSendRequest) -> Message:
    heard = sends.post_send(read, CALLER, CALL)
    return sends.post_send_request(heard.access_id, heard.ask)


SPOKEN = (
    Spoken(
        "of a pull",
        lambda: accesses.open_request(
            AccessOpening(ACCESS, b"token", ContentClaim(32, b"d" * 32, b"", b"p" * 32), "t-1", "r-1", ("shm", "nixl")),
        ),
        _opening,
    ),
    Spoken(
        "of a push",
        lambda: accesses.open_request(
            AccessOpening(ACCESS, b"token", None, "t-1", "r-1", ("cma",), b"r" * 16, CONTENT, 3, PARTS)
        ),
        _opening,
    ),
    Spoken("opened", lambda: _openings(OPENED), lambda read: _openings(accesses.opened(read, LIMIT))),
    Spoken(
        "of a part",
        lambda: accesses.settle_request(events.AccessSettling(ACCESS, False, 99, 2, ((0, 4), (8, 2)))),
        lambda read: accesses.settle_request(peer_calls.settle_access(read, CALLER, CALL).settlings[0]),
    ),
    Spoken("valid", lambda: _verdict(Verdict(True)), lambda read: _verdict(accesses.verdict(read))),
    Spoken(
        "stale",
        lambda: _verdict(Verdict(False, Reason.LEASE_EXPIRED, "it ran out")),
        lambda read: _verdict(accesses.verdict(read)),
    ),
    Spoken(
        "cancelled",
        lambda: accesses.close_request(events.AccessClosing(ACCESS, CloseOutcome.CANCELLED, True, b"token", "gone")),
        lambda read: accesses.close_request(peer_calls.close_access(read, CALLER, CALL).closings[0]),
    ),
    Spoken("of two parts", lambda: accesses.parts_request(ACCESS, PARTS), _parts),
    Spoken(
        "of layers",
        lambda: accesses.checksum_request(ACCESS, [((np.array([1, 2]), np.array([5])), (0, 2))]),
        _ask,
    ),
    Spoken(
        "of two ranks",
        lambda: _checksums((b"\1\0\0\0" * 2, b"\2\0\0\0" * 2)),
        lambda read: _checksums(accesses.checksums(read)),
    ),
    Spoken(
        "of a group",
        lambda: sends.post_send_request(
            ACCESS, SendAsk(0, 1, 2, 3, np.array([64]), np.array([128]), (("key", b"value"),))
        ),
        _send,
    ),
    Spoken("of two ranks", _handshake, _handshake_again),
    Spoken(
        "of a tensor",
        lambda: tensors.description_to_proto(Description("float16", (2, 3), 12)),
        lambda read: tensors.description_to_proto(tensors.described(read)),
    ),
)
