"""Attaching: one engine at a time, one worker per rank, and a refusal ends only the refused attempt."""

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.config import Config, PoolConfig
from kvgrpc.core.values.layout import PoolKind, Strides
from kvgrpc.engine import Engine, Rank, RankTicket, content
from kvgrpc.errors import (
    AlreadyExists,
    Exhausted,
    InvalidRequest,
    KVGrpcError,
    NotFound,
    OutOfRange,
    PermissionDenied,
    PreconditionFailed,
    Reason,
    Unavailable,
)
from kvgrpc.server import Server
from kvgrpc.service.session import session_server
from kvgrpc.v1 import handshake_pb2
from tests.engine.conftest import Attach, Leads
from tests.engine.made import layout
from tests.engine.mirrored.fake_device import FakeDevice
from tests.engine.support import Lead, Side, failure, new_key, received, refused, tokens

PROMPT = tokens(20)
Attempt = Callable[[Lead], object]
Error = tuple[Reason, type[KVGrpcError]]
UNFIT = (Reason.INVALID_FIELD, InvalidRequest)


@pytest.fixture
def side(leads: Leads, attach: Attach) -> Iterator[Side]:
    """Yields an engine that must still be attached, in the same life, at the end of the test."""
    side = attach(leads[0])
    yield side
    side.round_trip()
    assert side.lead.status().header.incarnation == side.engine.incarnation


def test_a_second_engine_is_refused_and_the_first_goes_on(side: Side) -> None:
    handover = side.hand_over([1, 2], PROMPT)
    with refused(Reason.ENGINE_ATTACHED, AlreadyExists):
        Engine.attach(side.lead.socket_path, pool=layout())
    assert side.engine.poll() == []
    assert [lease.lease_id for lease in side.lead.leases()] == [handover.lease_id]


def test_an_engine_attaches_at_once_after_the_last_one_ended(leads: Leads) -> None:
    seen = set()
    for _ in range(10):
        engine = Engine.attach(leads[0].socket_path, pool=layout(4))
        seen.add(engine.incarnation)
        engine.finished_blocks([0], content(PROMPT), transfer_key=new_key())  # never sent
        engine.close()
    assert len(seen) == 10


def test_grants_of_an_engine_that_is_gone_are_refused(leads: Leads, attach: Attach) -> None:
    first = attach(leads[0])
    handover = first.hand_over([1, 2], PROMPT)
    first.close()
    second, destination = attach(leads[0]), attach(leads[1])
    assert second.engine.incarnation != first.engine.incarnation
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start([1, 2])
    assert failure(destination.finish(pull)).reason is Reason.INCARNATION_CHANGED
    assert not second.lead.leases()


@pytest.mark.parametrize("secret", [b"", b"x", os.urandom(32)], ids=["empty", "short", "another"])
def test_a_worker_with_another_ticket_is_refused(side: Side, secret: bytes) -> None:
    ticket = RankTicket(side.lead.socket_path, secret, side.engine.ticket.memory_bytes)
    with refused(Reason.NOT_OWNER, PermissionDenied):
        Rank(ticket)


def test_a_worker_of_an_engine_that_is_gone_is_refused(leads: Leads, attach: Attach) -> None:
    gone = attach(leads[0])
    gone.close()
    with refused(Reason.NOT_OWNER, PermissionDenied):
        Rank(gone.engine.ticket)
    attach(leads[0])
    with refused(Reason.NOT_OWNER, PermissionDenied):
        Rank(gone.engine.ticket)


def test_a_rank_has_one_worker(side: Side) -> None:
    with refused(Reason.ENGINE_ATTACHED, AlreadyExists):
        Rank(side.engine.ticket, 0)


def test_a_rank_that_the_engine_does_not_have_is_refused(side: Side) -> None:
    with refused(Reason.NO_POOL, NotFound):
        Rank(side.engine.ticket, 1)


def test_private_memory_is_refused_where_the_engine_said_shared(side: Side) -> None:
    tensor = np.zeros(side.engine.pool.total_bytes, dtype=np.uint8)
    with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
        Rank(side.engine.ticket, 0, [tensor])


def test_private_memory_is_refused_unless_it_is_what_the_engine_said(leads: Leads) -> None:
    with Engine.attach(leads[0].socket_path, pool=layout(), private_memory=True) as engine:
        nbytes = engine.pool.total_bytes
        for tensors in ([np.zeros(nbytes - 1, dtype=np.uint8)], [np.zeros(nbytes)], []):
            with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
                Rank(engine.ticket, 0, tensors)
        with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
            Rank(engine.ticket, 1, [np.zeros(nbytes, dtype=np.uint8)])
        halves = [np.zeros(nbytes // 2, dtype=np.uint8), np.zeros(nbytes // 4, dtype=np.int16)]
        with Rank(engine.ticket, 0, halves) as rank:
            rank.step_done(1)
            with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
                _ = rank.memory
            assert engine.poll() == []


def test_a_device_and_tensors_are_refused_unless_they_are_what_the_engine_said(leads: Leads) -> None:
    device, memory = FakeDevice(), np.zeros(layout().total_bytes, dtype=np.uint8)
    for mirrored in (True, False):
        with Engine.attach(
            leads[0].socket_path, pool=layout(), mirrored=mirrored, private_memory=not mirrored
        ) as engine:
            wrong = [{"device": FakeDevice(nbytes=8)}, {"device": device, "tensors": [memory]}, {}]
            for options in (*wrong, {"tensors": [memory]} if mirrored else {"device": device}):
                with refused(Reason.POOL_KIND_MISMATCH, PreconditionFailed):
                    Rank(engine.ticket, 0, **options)  # type: ignore[arg-type]
            with Rank(engine.ticket, 0, **({"device": device} if mirrored else {"tensors": [memory]})) as rank:
                rank.step_done(1)
                assert engine.poll() == []
    assert device.opened == 2, "also for the engine that refused it, which is asked afterwards"
    device.open(np.zeros(device.nbytes, dtype=np.uint8))  # the device has no mirror open


def _attach(**options: object) -> Attempt:
    return lambda lead: Engine.attach(lead.socket_path, **{"pool": layout(), **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (_attach(pool=None), UNFIT),
        (_attach(pool=layout(1 << 24)), (Reason.POOL_EXHAUSTED, Exhausted)),
        (_attach(pool=layout(1 << 30), private_memory=True), UNFIT),
        (_attach(world_size=1 << 31), UNFIT),
        (_attach(world_size=1 << 31, private_memory=True), UNFIT),
        (_attach(engine_id="x" * 140), UNFIT),
    ],
    ids=["no pool", "memory", "blocks", "ranks", "private ranks", "engine id"],
)
def test_an_engine_that_does_not_fit_is_refused(leads: Leads, attach: Attach, attempt: Attempt, error: Error) -> None:
    with refused(*error):
        attempt(leads[0])
    attach(leads[0])


def test_a_refusal_names_the_field_that_is_wrong(leads: Leads) -> None:
    with pytest.raises(InvalidRequest, match="world_size: is at most"):
        Engine.attach(leads[0].socket_path, pool=layout(), world_size=5000)


def test_where_no_lead_listens_attaching_says_so(tmp_path: Path) -> None:
    for path in (tmp_path / "nobody.sock", tmp_path / ("long" * 40)):
        with refused(Reason.PEER_UNREACHABLE, Unavailable):
            Engine.attach(str(path), pool=layout())


def test_an_engine_with_a_thousand_descriptors_works(leads: Leads, attach: Attach) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this process may have {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as stack:
        while (fd := os.open("/dev/null", os.O_RDONLY)) < 1100:
            stack.callback(os.close, fd)
        stack.callback(os.close, fd)
        source, destination = attach(leads[0]), attach(leads[1])
        assert source.engine.fileno() > 1023
        handover = source.hand_over([1, 2], PROMPT)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        pull.start([1, 2])
        received(destination.finish(pull))
        source.close()
        destination.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_blocks_of_a_server_managed_pool_are_taken_and_given_back(leads: Leads, attach: Attach) -> None:
    source = attach(leads[0], kind=PoolKind.SERVER_MANAGED)
    destination = attach(leads[1], kind=PoolKind.SERVER_MANAGED)
    taken = source.engine.allocate(2)
    made = source.fill(taken, seed=1)
    handover = source.hand_over(taken, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
        destination.engine.allocate(65)
    others = destination.engine.allocate(64)
    with refused(Reason.POOL_EXHAUSTED, Exhausted):
        destination.engine.allocate(1)
    destination.engine.free(others)
    into = destination.engine.allocate(2)
    source.engine.free(taken)  # still pinned: the blocks are free once the reader is done
    assert taken[0] not in source.engine.allocate(62)
    pull.start(into)
    received(destination.poll_until(lambda _: pull.over))
    assert (destination.read(into) == made).all()
    source.finish(handover)
    assert sorted(source.engine.allocate(2)) == sorted(taken)
    destination.engine.free(into)
    with refused(Reason.BLOCK_NOT_ALLOCATED, PreconditionFailed):
        destination.engine.free(into)


async def test_an_engine_may_take_the_pool_that_the_server_has(tmp_path: Path) -> None:
    """The engine takes the pool over and gives it back. The embedded pool serves while no engine is attached."""
    path = str(tmp_path / "session.sock")
    pool = PoolConfig(layers=2, kv_heads=2, head_dim=8, blocks=32)
    server = Server(Config(listen="127.0.0.1:0", pool=pool, session_socket=path, data_paths=("shm",)))
    await server.start()

    def use() -> None:
        for _ in range(2):
            with Engine.attach(path, kind=PoolKind.SERVER_MANAGED) as engine:
                assert engine.pool == pool.layout()
                assert len(engine.allocate(32)) == 32

    try:
        await asyncio.to_thread(use)
    finally:
        await server.stop()


@pytest.mark.parametrize("sets_aside", [False, True])
async def test_an_engine_sets_blocks_aside_by_default_also_with_checksums(tmp_path: Path, sets_aside: bool) -> None:
    path = str(tmp_path / "session.sock")
    server = Server(Config(listen="127.0.0.1:0", pool=None, session_socket=path, data_paths=("shm",), checksums=True))
    await server.start()
    try:
        engine = await asyncio.to_thread(Engine.attach, path, pool=layout(), sets_aside=sets_aside)
        assert server._node.state.life.sets_aside is sets_aside
        await asyncio.to_thread(engine.close)
    finally:
        await server.stop()


def test_a_session_socket_never_replaces_what_it_should_not(leads: Leads, tmp_path: Path) -> None:
    async def start(path: str) -> None:
        await session_server.SessionServer(None, None, None, path).start()  # type: ignore[arg-type]

    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for path in (str(file), leads[0].socket_path, str(tmp_path / ("long" * 40)), str(tmp_path / "no" / "folder")):
        with refused(Reason.INVALID_FIELD, InvalidRequest):
            asyncio.run(start(path))
    assert file.read_text() == "mine"


def test_an_engine_that_cannot_set_blocks_aside_tells_its_peers_to_write_nothing(leads: Leads) -> None:
    for sets_aside in (False, True):
        with Engine.attach(leads[0].socket_path, pool=layout(), sets_aside=sets_aside):
            told = leads[0].api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest())
            assert (handshake_pb2.FEATURE_READS_PUSHES in told.engine.features) is not sets_aside
        leads[0].wait_no_engine()


def test_an_engine_whose_keys_stand_in_columns_requires_peers_that_read_them(leads: Leads) -> None:
    rows = layout()
    strides = Strides(0, 256, 512, 16, 32)
    columns = replace(rows, regions=tuple(replace(region, strides=strides) for region in rows.regions))
    for pool, required in ((rows, []), (columns, [handshake_pb2.FEATURE_KEY_COLUMNS])):
        with Engine.attach(leads[0].socket_path, pool=pool):
            told = leads[0].api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest()).engine
            assert list(told.required_features) == required
            assert handshake_pb2.FEATURE_KEY_COLUMNS in told.features
        leads[0].wait_no_engine()
