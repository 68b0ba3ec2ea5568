"""Texts of peers: whatever their length and content, no reply grows beyond the message limit."""

from typing import Any

import pytest
from google.protobuf.message import Message

from kvgrpc.errors import NOTE_BYTES_MAX
from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, pool_types_pb2, scheduler_pb2, transfer_pb2
from tests.service.engines import FAILED, Engine
from tests.service.rogue import Change, Rogue
from tests.service.scheduler.schedulers import Scheduler, new_id
from tests.service.values import prompt

TOKENS = prompt(40)
LONG = "x" * 3_900_000
NASTY = "\0\n\x1b[2J\x7f\u202e\u2028"
"""Characters that end a line, or change what a terminal shows."""


def endpoint(**fields: Any) -> Change:
    """Returns a change of the first endpoint of a Handshake's reply."""

    def change(reply: handshake_pb2.HandshakeResponse) -> None:
        reply.endpoints[0].MergeFrom(pool_types_pb2.RankEndpoint(**fields))

    return change


def opening(text: str) -> Change:
    def change(reply: peer_pb2.OpenAccessResponse) -> None:
        reply.results[0].failure.CopyFrom(common_pb2.Failure(message=text))

    return change


def verdict(text: str) -> Change:
    def change(reply: peer_pb2.SettleAccessResponse) -> None:
        reply.results[0].MergeFrom(peer_pb2.SettledAccess(verdict=peer_pb2.VERDICT_STALE, message=text))

    return change


def introduced(**fields: Any) -> Change:
    def change(reply: handshake_pb2.HandshakeResponse) -> None:
        reply.engine.MergeFrom(handshake_pb2.EngineDescription(**fields))

    return change


def renamed(text: str) -> Change:
    def change(reply: handshake_pb2.HandshakeResponse) -> None:
        reply.engine.pool.groups[0].name = text

    return change


TEXTS: dict[str, tuple[str, Any]] = {
    "socket path": ("Handshake", lambda text: endpoint(shm=pool_types_pb2.ShmEndpoint(socket_path=text))),
    "agent": ("Handshake", lambda text: endpoint(nixl=pool_types_pb2.NixlEndpoint(agent=text, backend="UCX"))),
    "backend": ("Handshake", lambda text: endpoint(nixl=pool_types_pb2.NixlEndpoint(agent="a", backend=text))),
    "key": ("Handshake", lambda text: endpoint(loopback=pool_types_pb2.LoopbackEndpoint(key=text, size_bytes=1))),
    "engine id": ("Handshake", lambda text: introduced(engine_id=text)),
    "address": ("Handshake", lambda text: introduced(address=text)),
    "weights": ("Handshake", lambda text: introduced(weights_revision=text)),
    "group": ("Handshake", renamed),
    "failure of an opening": ("OpenAccess", opening),
    "verdict": ("SettleAccess", verdict),
}


def replies(victim: Engine, transfer_id: str, began: admin_pb2.GetStatusResponse) -> list[Message]:
    """Returns the replies to all calls that report how a transfer went."""
    api, header = victim.api, began.header
    found: list[Message] = [
        victim.get(transfer_id),
        api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(page_size=1000)),
        api.admin.ListPeers(admin_pb2.ListPeersRequest()),
        api.admin.GetStatus(admin_pb2.GetStatusRequest()),
    ]
    request = transfer_pb2.WatchTransfersRequest(after_event_seq=header.event_seq, incarnation=header.incarnation)
    watch = api.transfers.WatchTransfers(request, timeout=30)
    for reply in watch:
        found.append(reply)
        if reply.transfer.transfer_id == transfer_id and reply.transfer.state == FAILED:
            break
    watch.cancel()
    return found


@pytest.mark.parametrize("text", [LONG, NASTY], ids=["long", "nasty"])
@pytest.mark.parametrize("what", TEXTS)
def test_no_text_of_a_peer_makes_a_reply_unsendable(victim: Engine, rogue: Rogue, what: str, text: str) -> None:
    began = victim.api.admin.GetStatus(admin_pb2.GetStatusRequest())
    rpc, change = TEXTS[what]
    rogue.changes[rpc] = change(text)
    pulled = victim.pull(rogue.grant(40), TOKENS, victim.allocate(3))
    end = victim.wait(pulled.transfer_id)
    if end.state == FAILED:
        assert 0 < len(end.failure.message.encode()) <= NOTE_BYTES_MAX
        assert end.failure.message.isprintable()
        for reply in replies(victim, pulled.transfer_id, began):
            assert reply.ByteSize() < 1_000_000, type(reply).__name__
    assert not [char for char in NASTY if not char.isprintable() and char != "\n" and char in victim.process.log]
    assert len(victim.process.log) < 100_000


def test_a_scheduler_hears_of_a_loss_whatever_a_peer_says_about_it(victim: Engine, rogue: Rogue) -> None:
    scheduler = Scheduler(victim)
    rpc, change = TEXTS["socket path"]
    rogue.changes[rpc] = change(LONG)
    id_ = new_id()
    scheduler.arrived(id_, offer=rogue.grant(40))
    lost = scheduler.told("take_lost", id_)
    assert 0 < len(lost.failure.message.encode()) <= NOTE_BYTES_MAX
    assert scheduler_pb2.SchedulerNews(take_lost=lost).ByteSize() < 2 * NOTE_BYTES_MAX
