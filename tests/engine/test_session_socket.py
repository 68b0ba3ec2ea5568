"""Connections to the session socket that are no engines, or faulty ones, end alone."""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvgrpc.config import Config
from kvgrpc.engine import content
from kvgrpc.errors import InvalidRequest, OutOfRange, Reason
from kvgrpc.server import Server
from kvgrpc.service.session import session_server, workers
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, handoff_pb2, lease_pb2, pool_pb2
from kvgrpc.wire import frames
from kvgrpc.wire.frames import FRAME_BYTES_MAX, FrameReader, encode
from tests.engine.conftest import Attach, Leads
from tests.engine.session_client import ATTACH, Client
from tests.engine.support import WAIT_S, Lead, Side, lead_died, received, refused, tokens
from tests.service.api import Api
from tests.service.engines import wait_until
from tests.service.values import for_readers, group, named_blocks, push_part

PROMPT = tokens(20)


@contextmanager
def connected(path: str) -> Iterator[Client]:
    client = Client(path)
    with client.socket:
        yield client


GARBAGE = {
    "random bytes": os.urandom(4096),
    "a length of 4 GB": b"\xff" * 8,
    "a length just above the limit": struct.pack(">I", FRAME_BYTES_MAX + 1),
    "a frame that is no message": struct.pack(">I", 5) + b"\xff" * 5,
    "a frame of the other direction": encode(
        session_pb2.ServerFrame(attached=session_pb2.AttachResponse(session_secret=b"x" * 32))
    ),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an empty frame": bytes(4),
    "calls without an attach": encode(session_pb2.ClientFrame(calls=session_pb2.CallBatch(read_events=1 << 63))),
    "reports without an attach": encode(
        session_pb2.ClientFrame(
            reports=session_pb2.RankReportBatch(reports=[rank_pb2.RankReport(step=rank_pb2.StepReport(step=9))])
        )
    ),
    "a pool kind that does not exist": encode(
        session_pb2.ClientFrame(attach=session_pb2.AttachRequest(kind=99, pool=ATTACH.attach.pool))  # type: ignore[arg-type]
    ),
    "nothing": b"",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_a_connection_that_is_no_engines_ends_alone(leads: Leads, attach: Attach, data: bytes) -> None:
    source, destination = attach(leads[0]), attach(leads[1])
    for side in (source, destination):
        with connected(side.lead.socket_path) as client:
            client.socket.sendall(data)
            client.socket.shutdown(socket.SHUT_WR)
            assert not any(frame.HasField("attached") for frame in client.rest())
    handover = source.hand_over([1, 2], PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start([3, 4])
    received(destination.finish(pull))


def test_a_frame_that_is_too_long_is_refused_before_it_has_come(leads: Leads) -> None:
    with connected(leads[0].socket_path) as client:
        client.socket.sendall(struct.pack(">I", FRAME_BYTES_MAX + 1))
        (frame,) = client.rest()
    assert (frame.refused.code, frame.refused.reason) == ("OUT_OF_RANGE", common_pb2.FAILURE_REASON_LIMIT_EXCEEDED)
    assert str(FRAME_BYTES_MAX) in frame.refused.message


def test_an_engine_that_sends_garbage_ends_and_the_next_one_attaches(leads: Leads, attach: Attach) -> None:
    side = attach(leads[0])
    side.hand_over([1, 2], PROMPT)
    side.engine._lives._session.connection.send(b"\0\0\0\5\xff\xff\xff\xff\xff")
    assert "gone" in lead_died(side).message
    attach(leads[0])
    assert not leads[0].leases()


def test_frames_may_come_byte_by_byte_and_calls_right_behind_the_attach(leads: Leads) -> None:
    free = session_pb2.Call(call_id=7, free_blocks=pool_pb2.FreeBlocksRequest(allocation_id="none"))
    calls = encode(session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=[free])))
    data = encode(ATTACH)
    with connected(leads[0].socket_path) as client:
        for at in range(len(data) - 1):
            client.socket.send(data[at : at + 1])
        client.socket.sendall(data[-1:] + calls)
        assert client.receive().HasField("attached")
        answer = client.receive().events.events[0].answer
    assert answer.call_id == 7
    assert answer.failure.reason == common_pb2.FAILURE_REASON_POOL_KIND_MISMATCH
    assert answer.code == "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    "call",
    [session_pb2.Call(call_id=1), session_pb2.Call(call_id=1, reserve_blocks=handoff_pb2.ReserveBlocksRequest())],
    ids=["empty", "push"],
)
def test_a_call_that_the_lead_does_not_know_is_refused_alone(leads: Leads, call: session_pb2.Call) -> None:
    with connected(leads[0].socket_path) as client:
        client.socket.sendall(encode(ATTACH))
        assert client.receive().HasField("attached")
        for _ in range(2):
            client.socket.sendall(encode(session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=[call]))))
            answer = client.receive().events.events[0].answer
            assert answer.failure.message


def many_leases(count: int, incarnation: int) -> bytes:
    """Returns a frame with that many calls."""
    blocks = named_blocks(incarnation, group([1, 2]))
    request = lease_pb2.GrantLeaseRequest(blocks=blocks, content=content(PROMPT).message)
    call = session_pb2.Call(call_id=1, grant_lease=request)
    return encode(session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=[call] * count)))


def test_others_are_served_between_the_thousands_of_calls_of_a_frame(leads: Leads) -> None:
    lead, count = leads[0], 5_000
    with connected(lead.socket_path) as client:
        client.socket.sendall(encode(ATTACH))
        client.socket.sendall(many_leases(count, client.receive().attached.header.incarnation))
        seen = [0]
        while seen[-1] < count:
            seen.append(lead.status().counts.lease_count)
    assert len(set(seen)) > 3, "of a frame that is handled in one go, nothing or everything is seen"
    lead.wait_no_engine()


def test_calls_that_wait_for_a_turn_end_with_their_engine(leads: Leads, attach: Attach) -> None:
    lead, count = leads[0], 20_000
    with connected(lead.socket_path) as client:
        client.socket.sendall(encode(ATTACH))
        attached = client.receive().attached
        with connected(lead.socket_path) as worker:
            request = session_pb2.AttachRankRequest(ticket=attached.rank_ticket)
            worker.socket.sendall(encode(session_pb2.ClientFrame(attach_rank=request)))
            assert worker.receive().HasField("rank_attached")
            client.socket.sendall(many_leases(count, attached.header.incarnation))
            wait_until(lambda: lead.status().counts.lease_count > 0)
        lead.wait_no_engine()
        attach(lead)
        client.rest()
        assert not lead.leases()


@pytest.mark.parametrize("make", [for_readers, partial(push_part, last=True)], ids=["readers", "push"])
def test_a_hand_over_that_is_only_checked_makes_nothing(
    leads: Leads, make: Callable[..., handoff_pb2.FinishedBlocksRequest]
) -> None:
    with connected(leads[0].socket_path) as client:
        client.socket.sendall(encode(ATTACH))
        blocks = named_blocks(client.receive().attached.header.incarnation, group([1, 2]))
        request = make(transfer_key=b"k" * 16, content=content(PROMPT).message, blocks=blocks, validate_only=True)
        call = session_pb2.Call(call_id=1, finished_blocks=request)
        client.socket.sendall(encode(session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=[call]))))
        answer = client.receive().events.events[0].answer
        assert answer.WhichOneof("response") == "finished_blocks", answer
        assert not leads[0].leases()


def test_a_hand_over_whose_lease_the_lead_mints_is_answered_with_its_grant(leads: Leads) -> None:
    with connected(leads[0].socket_path) as client:
        client.socket.sendall(encode(ATTACH))
        incarnation = client.receive().attached.header.incarnation
        for lease_id, blocks in (("", [1]), ("of-the-engine", [2])):
            fields = {"transfer_key": os.urandom(16), "content": content(PROMPT[:16]).message, "lease_id": lease_id}
            request = for_readers(blocks=named_blocks(incarnation, group(blocks)), **fields)
            call = session_pb2.Call(call_id=1, finished_blocks=request)
            client.socket.sendall(encode(session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=[call]))))
            answer = client.receive().events.events[0].answer.finished_blocks
            assert answer.transfer.transfer_id, answer
            assert bool(answer.grant.token) == (not lease_id)


async def test_a_connection_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "ATTACH_TIMEOUT_S", 0.05)
    path = str(tmp_path / "session.sock")
    server = Server(Config(listen="127.0.0.1:0", pool=None, session_socket=path, data_paths=("shm",)))
    await server.start()
    try:
        for start in (b"", b"\0\0"):
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(start)
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
    finally:
        await server.stop()


async def test_an_engine_that_never_reads_is_declared_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "UNREAD_BYTES_MAX", 1)
    path = str(tmp_path / "session.sock")
    server = Server(Config(listen="127.0.0.1:0", pool=None, session_socket=path, data_paths=("shm",)))
    await server.start()
    try:
        for _ in range(2):  # the first engine has left its place
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(_call_without_reading(path), WAIT_S)
    finally:
        await server.stop()


async def _call_without_reading(path: str) -> None:
    """Attaches, then makes calls with long answers and reads none. Raises ConnectionError once the server hangs up."""
    leases = [lease_pb2.LeaseRef(lease_id=f"{i:064}") for i in range(5_000)]
    call = session_pb2.Call(call_id=1, renew_leases=lease_pb2.RenewLeasesRequest(leases=leases))
    frame = encode(session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=[call])))
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        await loop.sock_connect(client, path)
        await loop.sock_sendall(client, encode(ATTACH))
        while True:
            await loop.sock_sendall(client, frame)


async def test_a_server_that_stops_ends_its_engine(tmp_path: Path) -> None:
    path = tmp_path / "session.sock"
    server = Server(Config(listen="127.0.0.1:0", pool=None, session_socket=str(path), data_paths=("shm",)))
    await server.start()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(encode(ATTACH))
    await asyncio.wait_for(reader.readexactly(4), WAIT_S)
    await server.stop()
    await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    assert not path.exists()


async def test_a_server_that_stops_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "session.sock"
    first, second = (
        Server(Config(listen="127.0.0.1:0", pool=None, session_socket=str(path), data_paths=("shm",))) for _ in range(2)
    )
    await first.start()
    path.unlink()
    await second.start()
    try:
        await first.stop()
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
    finally:
        await second.stop()
    assert not path.exists()


async def test_a_server_that_did_not_start_can_be_stopped() -> None:
    await Server(Config(listen="127.0.0.1:0", data_paths=("shm",))).stop()


async def test_a_start_that_fails_in_its_last_step_leaves_no_port_thread_or_memory(tmp_path: Path) -> None:
    path = tmp_path / "session.sock"
    path.write_text("no socket")
    before = _held()
    server = Server(Config(listen="127.0.0.1:0", session_socket=str(path), data_paths=("shm",)))
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        await server.start()
    assert _held() == before
    host, _, port = server.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    await server.stop()


def _held() -> tuple[int, int]:
    """Returns the number of shared memories and of movers in this process."""
    files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("memfd:" in file for file in files), sum("kvgrpc" in thread.name for thread in threading.enumerate())


async def test_a_server_tied_to_an_engine_exits_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "FIRST_ENGINE_S", 0.05)
    path = str(tmp_path / "session.sock")
    config = Config(listen="127.0.0.1:0", pool=None, session_socket=path, data_paths=("shm",), exit_with_engine=True)
    server = Server(config)
    await server.start()
    try:
        await asyncio.wait_for(server.engine_over(), WAIT_S)
    finally:
        await server.stop()


def test_exiting_with_an_engine_takes_a_socket_where_it_attaches() -> None:
    with pytest.raises(InvalidRequest, match="exit_with_engine"):
        Config(exit_with_engine=True)


def test_batches_longer_than_a_frame_are_sent_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 100)
    rows = [session_pb2.Event(event_id=i, received=session_pb2.Received(request_id="r" * 20)) for i in range(1, 14)]

    def frame(part: object) -> session_pb2.ServerFrame:
        return session_pb2.ServerFrame(events=session_pb2.EventBatch(events=part))  # type: ignore[arg-type]

    reader = FrameReader(session_pb2.ServerFrame)
    sent = b"".join(frames.encode_rows(rows, frame, unexpected))
    got = [event.event_id for row in reader.feed(sent) for event in row.events.events]
    assert got == list(range(1, 14))
    assert list(frames.encode_rows([], frame, unexpected)) == [encode(frame([]))]


def unexpected(event: session_pb2.Event, error: OutOfRange) -> None:
    raise AssertionError((event, error))


def test_a_row_longer_than_a_frame_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 100)
    sizes = (20, 200, 20)
    rows = [
        session_pb2.Event(event_id=i, received=session_pb2.Received(request_id="r" * n)) for i, n in enumerate(sizes)
    ]
    left_out: list[tuple[int, Reason]] = []

    def told(event: session_pb2.Event, error: OutOfRange) -> None:
        left_out.append((event.event_id, error.reason))

    def frame(part: object) -> session_pb2.ServerFrame:
        return session_pb2.ServerFrame(events=session_pb2.EventBatch(events=part))  # type: ignore[arg-type]

    sent = b"".join(frames.encode_rows(rows, frame, told))
    got = [event.event_id for row in FrameReader(session_pb2.ServerFrame).feed(sent) for event in row.events.events]
    assert (got, left_out) == ([0, 2], [(1, Reason.LIMIT_EXCEEDED)])


LIMIT = 128
WITHIN = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$@"', "--")
STRANGERS = LIMIT


@pytest.fixture
def poor_lead(tmp_path: Path) -> Iterator[Lead]:
    """Yields a lead that may have few open files."""
    made = Lead(tmp_path, "P", within=WITHIN)
    yield made.wait_ready()
    made.close()


def test_processes_that_only_connect_leave_descriptors_to_all_others_and_one_line_in_the_log(poor_lead: Lead) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(STRANGERS)]
        for stranger in strangers:
            stranger.connect(poor_lead.socket_path)
        wait_until(lambda: "wait: this process may have" in poor_lead.process.log)
        api = Api(poor_lead.process.wait_ready()["address"])  # over a new connection
        stack.callback(api.close)
        assert api.admin.GetStatus(admin_pb2.GetStatusRequest()).header.engine_id == "P"
        assert strangers[0].recv(1_024) == b"", "it was let in, and sent away when it said nothing"
    side = Side(poor_lead)
    assert side.engine.poll() == []
    side.close()
    assert poor_lead.process.log.count("wait: this process may have") == 1
    poor_lead.process.check_log()


def test_a_server_takes_all_open_files_that_the_system_allows(tmp_path: Path) -> None:
    within = ("bash", "-c", f'ulimit -Sn {LIMIT}; exec "$@"', "--")
    lead = Lead(tmp_path, "P", within=within).wait_ready()
    (row,) = [
        line for line in Path(f"/proc/{lead.process.pid}/limits").read_text().splitlines() if "open files" in line
    ]
    soft, hard = row.split()[3:5]
    assert soft == hard
    lead.close()
