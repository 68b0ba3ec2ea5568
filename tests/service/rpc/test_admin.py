"""AdminService answers an operator's first questions."""

from kvgrpc import __version__
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, handshake_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.consumer import Consumer
from tests.service.engines import SUCCEEDED, Engine, wait_until
from tests.service.values import content, ids_of, prompt, seconds

TOKENS = prompt(32)


def status(engine: Engine) -> admin_pb2.GetStatusResponse:
    return engine.api.admin.GetStatus(admin_pb2.GetStatusRequest())


def test_the_status_of_an_idle_server(source: Engine) -> None:
    found = status(source)
    assert (found.admission, found.admission_reason) == (handshake_pb2.ADMISSION_OPEN, "")
    assert (found.version, found.oldest_transfer_id) == (__version__, "")
    assert seconds(found.uptime) > 0
    assert seconds(found.progress_age) == 0
    counts = found.counts
    assert (counts.pending_transfer_count, counts.active_transfer_count) == (0, 0)
    assert (counts.lease_count, counts.pinned_block_count) == (0, 0)


def test_the_status_counts_what_there_is_and_what_there_was(source: Engine, destination: Engine) -> None:
    before, received = status(source).counts, status(destination).counts.received_bytes
    first, second = source.hand_over(TOKENS), source.hand_over(TOKENS)
    now = status(source)
    assert now.oldest_transfer_id == first.transfer.transfer_id
    assert (now.counts.pending_transfer_count, now.counts.lease_count, now.counts.pinned_block_count) == (2, 2, 4)
    destination.wait(destination.pull(first.grant, TOKENS, destination.allocate(2)).transfer_id)
    source.wait(first.transfer.transfer_id)
    source.cancel(second.transfer.transfer_id)
    after = status(source).counts
    assert after.succeeded_transfer_count - before.succeeded_transfer_count == 1
    assert after.cancelled_transfer_count - before.cancelled_transfer_count == 1
    assert (after.pending_transfer_count, after.lease_count) == (0, 0)
    assert (after.pinned_block_count, after.open_access_count) == (0, 0)
    assert status(destination).counts.received_bytes - received == 2 * 2048


def test_peers_are_listed_page_by_page_each_of_them_once(source: Engine) -> None:
    strangers = [Consumer(source) for _ in range(5)]
    for stranger in strangers:
        stranger.handshake()
    seen: list[tuple[str, int]] = []
    token = ""
    while token or not seen:
        reply = source.api.admin.ListPeers(admin_pb2.ListPeersRequest(page_size=2, page_token=token))
        assert 0 < len(reply.peers) <= 2
        seen += [(peer.engine_id, peer.incarnation) for peer in reply.peers]
        token = reply.next_page_token
    assert len(seen) == len(set(seen))
    assert [engine_id for engine_id, _ in seen[:5]] == [stranger.engine.engine_id for stranger in reversed(strangers)]


def test_peers_are_listed_newest_first_with_their_paths(source: Engine, destination: Engine) -> None:
    request = handshake_pb2.ConnectPeerRequest(peer=common_pb2.PeerAddress(address=source.address))
    destination.api.handshake.ConnectPeer(request)
    stranger = Consumer(source)
    stranger.handshake()
    peers = source.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    assert peers[0].engine_id == stranger.engine.engine_id
    (mine,) = (peer for peer in peers if peer.engine_id == destination.engine_id)
    assert mine.state == handshake_pb2.PEER_STATE_CONNECTED
    assert [path.data_path for path in mine.paths] == [common_pb2.DATA_PATH_SHM]
    assert mine.address == destination.address


def test_pins_say_who_why_and_for_whom(source: Engine, destination: Engine) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    metadata = (("traceparent", f"00-{trace}-00f067aa0ba902b7-01"),)
    blocks, target = source.allocate(2), destination.allocate(2)
    handed = source.hand_over(TOKENS, blocks, request_id="chat-7")
    request = handoff_pb2.PullBlocksRequest(
        grant=handed.grant,
        content=content(TOKENS),
        request_id="chat-7-d",
        after_step=1,
        destination=destination.into(target),
    )
    pulled = destination.api.handoff.PullBlocks(request, metadata=metadata).transfer
    wait_until(lambda: destination.get(pulled.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_STEP)
    (pin,) = destination.pins()
    assert (pin.kind, pin.owner, ids_of(pin.blocks)) == (admin_pb2.PIN_KIND_TARGET, pulled.transfer_id, target)
    assert (pin.request_id, pin.peer_engine_id, pin.trace_id) == ("chat-7-d", source.engine_id, trace)
    assert (pin.missing_proof, seconds(pin.age) >= 0) == ("", True)
    lease, access = source.pins()
    assert (lease.kind, lease.owner, lease.request_id) == (
        admin_pb2.PIN_KIND_LEASE,
        handed.lease.lease_id,
        "chat-7",
    )
    assert (access.kind, access.peer_engine_id, access.request_id) == (
        admin_pb2.PIN_KIND_ACCESS,
        destination.engine_id,
        "chat-7-d",
    )
    assert ids_of(access.blocks) == blocks


def test_what_is_over_pins_nothing(source: Engine, destination: Engine) -> None:
    handed = source.hand_over(TOKENS)
    pulled = destination.pull(handed.grant, TOKENS, destination.allocate(2))
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    source.wait(handed.transfer.transfer_id)
    assert source.pins() == destination.pins() == []


def test_where_nothing_is_in_quarantine_releasing_it_does_nothing(source: Engine) -> None:
    answer = source.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
    assert (answer.released_block_count, answer.left_block_count, answer.memory_generation) == (0, 0, 0)
    source.check_alive()


def test_quarantine_is_not_released_without_a_reason_or_for_an_unknown_transfer(source: Engine) -> None:
    for fields, code, reason in (
        ({"force": True}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"transfer_ids": ["t-1"]}, "INVALID_ARGUMENT", "INVALID_FIELD"),
        ({"force": True, "message": "off", "transfer_ids": ["t-1"]}, "NOT_FOUND", "TRANSFER_NOT_FOUND"),
    ):
        with refused(source.api, code, reason):
            source.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest(**fields))
