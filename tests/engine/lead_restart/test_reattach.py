"""An engine that comes back, as its new lead sees it: which workers may come along, and which memory is accepted."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.session.v1 import session_pb2
from kvgrpc.v1 import common_pb2
from kvgrpc.wire.frames import encode
from tests.engine.conftest import Attach, Leads
from tests.engine.made import layout
from tests.engine.session_client import ATTACH, Client

TICKET = os.urandom(32)
NBYTES = layout().total_bytes
Connect = Callable[[], Client]
Fields = dict[str, object]


@pytest.fixture
def connect(leads: Leads) -> Iterator[Connect]:
    """Opens connections to one lead, and closes them at the end of the test."""
    with ExitStack() as stack:

        def begin() -> Client:
            client = Client(leads[0].socket_path)
            stack.callback(client.socket.close)
            return client

        yield begin
    leads[0].wait_no_engine()


def back(connect: Connect, **fields: object) -> Client:
    """Attaches a scheduler that comes back."""
    frame = session_pb2.ClientFrame()
    frame.CopyFrom(ATTACH)
    frame.attach.MergeFrom(session_pb2.AttachRequest(**{"rank_ticket": TICKET, **fields}))  # type: ignore[arg-type]
    client = connect()
    client.socket.sendall(encode(frame))
    return client


def worker(connect: Connect, **fields: object) -> Client:
    """Attaches a worker, which comes back unless the fields say otherwise."""
    request = session_pb2.AttachRankRequest(**{"ticket": TICKET, "returns": True, **fields})  # type: ignore[arg-type]
    client = connect()
    client.socket.sendall(encode(session_pb2.ClientFrame(attach_rank=request)))
    return client


def give(client: Client, *descriptors: int) -> None:
    """Sends memory to the lead that asks for it."""
    data, found, _, _ = socket.recv_fds(client.socket, 1 << 16, 1)
    (frame,) = client._reader.feed(data)
    assert frame.HasField("memory_wanted"), frame
    with socket.socket(fileno=found[0]) as lead:
        socket.send_fds(lead, [b"."], descriptors)


def refusal(client: Client) -> str:
    """Returns the reason of the refusal that ends a connection."""
    frame = client.receive()
    assert frame.HasField("refused"), frame
    return common_pb2.FailureReason.Name(frame.refused.reason).removeprefix("FAILURE_REASON_")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(NBYTES)
    yield made
    made.close()


def test_memory_comes_back_as_it_was_and_both_are_attached_then(connect: Connect, memory: SharedMemory) -> None:
    memory.as_numpy()[:] = 7
    scheduler, rank = back(connect, engine_id="mine"), worker(connect)
    give(rank, memory.fd)
    attached = scheduler.receive().attached
    assert (attached.rank_ticket, attached.header.engine_id) == (TICKET, "mine")
    answer = rank.receive()
    assert answer.HasField("rank_attached")
    assert answer.rank_attached.shared_bytes == 0
    assert (memory.as_numpy() == 7).all()
    scheduler.socket.close()
    assert [frame.WhichOneof("frame") for frame in rank.rest()] == ["over"]


def test_an_engine_is_attached_once_every_worker_is_here(connect: Connect) -> None:
    private = {"memory": session_pb2.POOL_MEMORY_PRIVATE, "world_size": 2}
    scheduler = back(connect, **private)
    first = worker(connect, private_memory=True)
    for client in (scheduler, first):
        client.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.receive()
        client.socket.settimeout(15.0)
    second = worker(connect, private_memory=True, rank=1)
    assert scheduler.receive().HasField("attached")
    for client in (first, second):
        assert client.receive().HasField("rank_attached")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"returns": False}, "NOT_OWNER"),
        ({"private_memory": True}, "POOL_KIND_MISMATCH"),
        ({"rank": 1}, "POOL_KIND_MISMATCH"),
        ({"ticket": b"x" * 32}, "NOT_OWNER"),
    ],
    ids=["new", "private", "rank", "ticket"],
)
def test_another_engines_worker_is_refused(connect: Connect, memory: SharedMemory, fields: Fields, reason: str) -> None:
    scheduler = back(connect)
    assert refusal(worker(connect, **fields)) == reason
    rank = worker(connect)
    give(rank, memory.fd)
    assert scheduler.receive().HasField("attached")


def test_a_rank_comes_back_once(connect: Connect) -> None:
    back(connect, memory=session_pb2.POOL_MEMORY_PRIVATE, world_size=2)
    worker(connect, private_memory=True)
    again = worker(connect, private_memory=True)
    assert refusal(again) == "ENGINE_ATTACHED"


def too_large() -> int:
    made = SharedMemory.create(NBYTES + 1)
    try:
        return os.dup(made.fd)
    finally:
        made.close()


def unsealed() -> int:
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 1 << 20)
    return fd


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (too_large, "POOL_KIND_MISMATCH"),
        (unsealed, "POOL_KIND_MISMATCH"),
        (lambda: os.open("/dev/null", os.O_RDWR), "POOL_KIND_MISMATCH"),
        (lambda: os.memfd_create("empty"), "POOL_KIND_MISMATCH"),
    ],
    ids=["size", "unsealed", "no file", "empty"],
)
def test_memory_that_is_not_the_pools_is_refused(connect: Connect, make: Callable[[], int], reason: str) -> None:
    scheduler, rank = back(connect), worker(connect)
    fd = make()
    give(rank, fd)
    os.close(fd)
    assert refusal(scheduler) == reason
    assert refusal(rank) == "NOT_OWNER"


def test_a_worker_that_gives_no_memory_is_refused_and_may_try_again(connect: Connect, memory: SharedMemory) -> None:
    scheduler, rank = back(connect), worker(connect)
    give(rank)
    assert refusal(rank) == "ENGINE_LOST"
    give(worker(connect), memory.fd)
    assert scheduler.receive().HasField("attached")


def test_an_engine_whose_memory_is_not_at_rest_is_told_so_and_does_not_come_back(connect: Connect) -> None:
    scheduler = back(connect, world_size=2)
    rank = worker(connect, rank=1, not_at_rest="the weather")
    assert refusal(rank) == "DATA_PATH_FAILED"
    frame = scheduler.receive()
    assert frame.refused.code == "INTERNAL"
    assert "rank 1" in frame.refused.message
    assert "the weather" in frame.refused.message


def test_a_ticket_that_can_be_guessed_is_refused(connect: Connect) -> None:
    assert refusal(back(connect, rank_ticket=b"short")) == "INVALID_FIELD"


def test_an_engine_that_left_makes_room_for_the_next(connect: Connect, leads: Leads, attach: Attach) -> None:
    scheduler, rank = back(connect, world_size=2), worker(connect)
    scheduler.socket.shutdown(socket.SHUT_WR)
    assert refusal(scheduler) == "ENGINE_LOST"
    side = attach(leads[0])
    assert side.engine.poll() == []
    rank.socket.close()


def test_a_worker_that_reattaches_without_its_engine_is_refused(leads: Leads, attach: Attach, connect: Connect) -> None:
    side = attach(leads[0])
    assert refusal(worker(connect, ticket=side.engine.ticket.secret)) == "NOT_OWNER"
    assert side.engine.poll() == []
    side.close()
