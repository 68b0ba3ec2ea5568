"""A defect of the server fails closed: nothing of the life that it ended is vouched for, every caller learns of the
end, and a new life begins by itself.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvgrpc.config import Config, PoolConfig
from kvgrpc.core import events
from kvgrpc.core.tables.transfers import Transfer
from kvgrpc.core.values.content import chain
from kvgrpc.errors import InternalError, Reason
from kvgrpc.server import Server
from kvgrpc.service.recovery import Recovery
from kvgrpc.service.runner import Runner
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, lease_pb2, transfer_pb2
from tests.service.conftest import SETTINGS, SHARED, Start
from tests.service.defective import MESSAGE, ONCE_MORE, Defective, DefectiveProcess
from tests.service.engines import FAILED, RETURNED, WAIT_S, Engine, wait_until
from tests.service.values import new_key, prompt

TOKENS = prompt(32)
DEFECT = common_pb2.FAILURE_REASON_INTERNAL_DEFECT


@pytest.fixture
def defective(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(DefectiveProcess(tmp_path / "defective", *SHARED, settings=SETTINGS))
    yield engine
    engine.close()


def fail(engine: Engine, message: str = MESSAGE) -> None:
    """Triggers the defect by a call, which is refused."""
    refusal = engine.api.refusal(lambda: engine.cancel("t-any", message))
    assert (refusal.code, refusal.reason) == ("INTERNAL", "INTERNAL_DEFECT")
    assert refusal.retry_delay_s


def status(engine: Engine) -> admin_pb2.GetStatusResponse:
    return engine.api.admin.GetStatus(admin_pb2.GetStatusRequest())


def lives_again(engine: Engine) -> None:
    wait_until(lambda: status(engine).admission == handshake_pb2.ADMISSION_OPEN, what=lambda: status(engine))


def serving(engine: Engine) -> bool:
    reply = engine.api.health.Check(health_pb2.HealthCheckRequest(service=""))
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def move(source: Engine, destination: Engine) -> None:
    """Pulls blocks to the end, and checks their bytes."""
    blocks = source.allocate(2)
    made = source.write(blocks, seed=3)
    target = destination.allocate(2)
    pull = destination.pull(source.hand_over(TOKENS, blocks).grant, TOKENS, target)
    assert destination.wait(pull.transfer_id).state == transfer_pb2.TRANSFER_STATE_SUCCEEDED
    assert destination.read(target) == made


def test_what_was_under_way_ends_typed_and_a_new_life_begins(defective: Engine, destination: Engine) -> None:
    life = status(defective).header.incarnation
    handed = defective.hand_over(TOKENS)
    pull = destination.pull(handed.grant, TOKENS, None)
    wait_until(lambda: destination.get(pull.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS)
    watch = defective.api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=60)
    assert not next(watch).transfer.transfer_id
    fail(defective)
    change = next(watch).transfer
    assert (change.transfer_id, change.state, change.failure.reason) == (handed.transfer.transfer_id, FAILED, DEFECT)
    assert change.failure.next == common_pb2.NEXT_STEP_RECOMPUTE
    with pytest.raises(grpc.RpcError) as over:
        list(watch)
    assert over.value.code() is grpc.StatusCode.ABORTED
    lives_again(defective)
    now = status(defective)
    assert now.counts.defect_count == 1
    assert now.header.incarnation != life
    assert now.counts.lease_count == now.counts.pinned_block_count == now.counts.quarantined_block_count == 0
    ended = defective.wait(handed.transfer.transfer_id)
    assert (ended.failure.reason, ended.memory) == (DEFECT, RETURNED)
    assert defective.lease(handed.lease.lease_id).state == lease_pb2.LEASE_STATE_LOST
    refs = [lease_pb2.LeaseRef(lease_id=handed.lease.lease_id), lease_pb2.LeaseRef(grant=handed.grant)]
    rows = defective.api.leases.RenewLeases(lease_pb2.RenewLeasesRequest(leases=refs)).leases
    assert [row.reason for row in rows] == [DEFECT, common_pb2.FAILURE_REASON_INCARNATION_CHANGED]
    destination.give(pull.transfer_id, destination.allocate(2))
    lost = destination.wait(pull.transfer_id)
    assert lost.state == FAILED
    again = destination.pull(handed.grant, TOKENS, destination.allocate(2))
    refused = destination.wait(again.transfer_id)
    assert refused.failure.reason == common_pb2.FAILURE_REASON_INCARNATION_CHANGED
    move(defective, destination)


def test_what_a_server_reads_when_its_life_ends_is_never_offered(defective: Engine, source: Engine) -> None:
    target = defective.allocate(2)
    pull = defective.pull(source.hand_over(TOKENS).grant, TOKENS, None)
    wait_until(lambda: defective.get(pull.transfer_id).waiting_for == transfer_pb2.WAITING_FOR_BLOCKS)
    fail(defective)
    lives_again(defective)
    ended = defective.wait(pull.transfer_id)
    assert (ended.state, ended.failure.reason, ended.failure.phase) == (FAILED, DEFECT, common_pb2.TRANSFER_PHASE_QUEUE)
    refusal = defective.api.refusal(lambda: defective.give(pull.transfer_id, target))
    assert refusal.reason == "TRANSFER_ENDED"
    move(source, defective)


def test_who_waits_for_a_transfer_learns_its_end(defective: Engine, source: Engine) -> None:
    wait = defective.api.transfers.WaitTransfer.future(
        transfer_pb2.WaitTransferRequest(transfer_id=defective.hand_over(TOKENS).transfer.transfer_id)
    )
    fail(defective)
    assert wait.result().transfer.failure.reason == DEFECT
    lives_again(defective)
    move(defective, source)


def test_a_server_that_fails_again_and_again_serves_in_the_end(defective: Engine, destination: Engine) -> None:
    """A second and a third defect occur as the next life begins. Each pause is twice as long as the one before."""
    assert isinstance(defective.process, DefectiveProcess)
    defective.process.defects = 3
    watch = defective.api.health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=60)
    seen = iter(watch)
    assert next(seen).status == health_pb2.HealthCheckResponse.SERVING
    fail(defective, ONCE_MORE)
    assert next(seen).status == health_pb2.HealthCheckResponse.NOT_SERVING
    now = status(defective)
    assert now.admission == handshake_pb2.ADMISSION_NO_ENGINE
    assert "defect" in now.admission_reason
    # The call names no life, because the next life may begin, and fail, at any moment.
    refusal = defective.api.refusal(lambda: defective.allocate(1))
    assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "INTERNAL_DEFECT")
    lives_again(defective)
    assert next(seen).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    assert status(defective).counts.defect_count == 3
    move(defective, destination)


def test_a_watch_of_the_engine_outlasts_its_lives(defective: Engine) -> None:
    watch: Any = defective.api.handshake.WatchEngine(handshake_pb2.WatchEngineRequest(), timeout=60)
    before = next(watch).header.incarnation
    fail(defective)
    after = next(reply for reply in watch if reply.status.admission == handshake_pb2.ADMISSION_OPEN)
    assert after.header.incarnation != before
    watch.cancel()


def peer_state(engine: Engine, life: int) -> int:
    """Returns the state in which an engine lists a life of a peer."""
    peers = engine.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    return next((peer.state for peer in peers if peer.incarnation == life), handshake_pb2.PEER_STATE_UNSPECIFIED)


@pytest.mark.parametrize("dialled", [True, False], ids=["a peer that dialled it", "a peer that it dialled"])
def test_peers_learn_at_once_that_the_life_is_over(start: Start, tmp_path: Path, dialled: bool) -> None:
    """A beat comes every twelve minutes, so the test does not wait for one."""
    patient = SETTINGS + "peer_grace_s = 3600.0\n"
    (peer,) = start((), settings=patient)
    engine = Engine(DefectiveProcess(tmp_path / "defective", *SHARED, settings=patient))
    try:
        move(*((engine, peer) if dialled else (peer, engine)))
        life = status(engine).header.incarnation
        wait_until(lambda: peer_state(peer, life) == handshake_pb2.PEER_STATE_CONNECTED)
        fail(engine)
        wait_until(lambda: peer_state(peer, life) != handshake_pb2.PEER_STATE_CONNECTED)
        lives_again(engine)
        move(peer, engine)
        assert peer_state(peer, life) == handshake_pb2.PEER_STATE_DEAD
        move(engine, peer)
    finally:
        engine.close()


class Calls:
    """A server in this process, and calls of its node that are not awaited."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.told: list[Transfer] = []
        server._runner.on_transfer.append(self.told.append)

    @property
    def runner(self) -> Runner:
        return self.server._runner

    def submit(self, make: Any) -> asyncio.Future[Any]:
        number, future = self.runner.next_call_id(), asyncio.get_running_loop().create_future()
        self.runner.submit(number, make(events.Call(number, "test")), future.set_result)
        return future

    async def hand_over(self, **fields: Any) -> Transfer:
        allocated = await self.submit(lambda c: events.AllocateBlocks(c, ((0, 1),)))
        blocks = ((0, allocated.answer.blocks[0]),)
        offered = await self.submit(lambda c: events.FinishedBlocks(c, new_key(), blocks, chain(prompt(16)), **fields))
        transfer: Transfer = offered.answer.transfer
        return transfer


@pytest.fixture
async def calls() -> Any:
    config = Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1))
    server = Server(config, Defective)
    await server.start()
    yield Calls(server)
    await server.stop()


async def test_what_was_decided_before_it_raised_is_performed_also_for_others(calls: Calls) -> None:
    """Deadlines that are due at the same moment are handled first, whatever happens to the event."""
    expires, lives = await calls.hand_over(ttl_s=0.05), await calls.hand_over()
    calls.told.clear()
    time.sleep(0.1)  # noqa: ASYNC251 - stops the loop, so that timer and event are due together
    reply = await calls.submit(lambda c: events.CancelTransfer(c, lives.id, message=MESSAGE))
    assert isinstance(reply, InternalError)
    assert reply.reason is Reason.INTERNAL_DEFECT
    ends = {transfer.id: transfer.failure for transfer in calls.told if transfer.over}
    assert {id_: failure.reason for id_, failure in ends.items() if failure} == {
        expires.id: Reason.LEASE_EXPIRED,
        lives.id: Reason.INTERNAL_DEFECT,
    }


async def test_a_decision_that_cannot_be_performed_ends_the_life_after_all_others_are(calls: Calls) -> None:
    """Else a caller would wait for it until a deadline, and a posting forever."""
    transfer = await calls.hand_over()
    calls.runner.on_transfer.insert(0, raise_once)
    Raised.left = 1
    reply = await calls.submit(lambda c: events.CancelTransfer(c, transfer.id))
    assert calls.runner.defects == 1
    assert not isinstance(reply, Exception), "what was decided with it is performed"
    assert calls.told[-1].over
    begun = asyncio.Event()

    def life() -> None:
        if calls.runner.node.state.life.description is not None:
            begun.set()

    calls.runner.on_life.append(life)
    async with asyncio.timeout(WAIT_S):
        await begun.wait()
    await calls.hand_over()


class Raised:
    left = 0


def raise_once(_: Transfer) -> None:
    if Raised.left:
        Raised.left -= 1
        raise RuntimeError("planted")


async def test_the_pause_doubles_up_to_a_bound(calls: Calls) -> None:
    async def nothing() -> None:
        pass

    recovery = Recovery(calls.runner, nothing, nothing)
    pauses = []
    for _ in range(10):
        recovery.noted()
        pauses.append(recovery._pause_s())
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


async def test_a_server_that_is_stopped_in_the_pause_begins_nothing(tmp_path: Path) -> None:
    config = Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1))
    server = Server(config, Defective)
    await server.start()
    calls = Calls(server)
    for _ in range(3):
        await calls.submit(lambda c: events.CancelTransfer(c, "t-any", message=MESSAGE))
    await server.stop()
    assert server._runner.node.state.life.description is None
    assert server._runner.defects == 3
