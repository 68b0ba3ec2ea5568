"""WaitTransfer and GetTransfer, for callers without a stream."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvgrpc.service.rpc.server import _OthersFaults
from kvgrpc.service.watchers import WAITED_MAX
from kvgrpc.v1 import common_pb2, transfer_pb2
from tests.service.api import refused
from tests.service.engines import CANCELLED, RETURNED, SUCCEEDED, Engine, unchanged
from tests.service.values import dur, phase_name, prompt

PENDING = transfer_pb2.TRANSFER_STATE_PENDING
UNTIL = [
    transfer_pb2.WAIT_CONDITION_UNSPECIFIED,
    transfer_pb2.WAIT_CONDITION_ENDED,
    transfer_pb2.WAIT_CONDITION_RETURNED,
]


def wait(engine: Engine, transfer_id: str, until: int, timeout_s: float) -> transfer_pb2.Transfer:
    request = transfer_pb2.WaitTransferRequest(
        transfer_id=transfer_id,
        until=until,  # type: ignore[arg-type]
        timeout=dur(timeout_s),
    )
    return engine.api.transfers.WaitTransfer(request).transfer


@pytest.mark.parametrize("until", UNTIL)
def test_waiting_answers_at_the_end_of_the_transfer(source: Engine, until: int) -> None:
    handed = source.hand_over(prompt(16))
    with ThreadPoolExecutor(4) as threads:
        waiters = [threads.submit(wait, source, handed.transfer.transfer_id, until, 15.0) for _ in range(4)]
        source.release(handed.lease.lease_id)
        ends = [waiter.result() for waiter in waiters]
    assert {(end.state, end.memory) for end in ends} == {(CANCELLED, RETURNED)}


@pytest.mark.parametrize("until", UNTIL)
@pytest.mark.parametrize("timeout_s", [0.02, 0.0])
def test_the_end_of_the_time_is_no_error(source: Engine, until: int, timeout_s: float) -> None:
    handed = source.hand_over(prompt(16))
    with unchanged(source):
        found = wait(source, handed.transfer.transfer_id, until, timeout_s)
    assert found.state == PENDING
    assert found.waiting_for == transfer_pb2.WAITING_FOR_READERS


def test_a_time_that_is_negative_is_refused(source: Engine) -> None:
    handed = source.hand_over(prompt(16))
    with unchanged(source), refused(source.api, "INVALID_ARGUMENT", "INVALID_FIELD"):
        wait(source, handed.transfer.transfer_id, UNTIL[0], -1.0)


@pytest.mark.parametrize("until", UNTIL)
def test_waiting_for_what_is_over_answers_at_once(source: Engine, destination: Engine, until: int) -> None:
    tokens = prompt(16)
    handed = source.hand_over(tokens)
    pulled = destination.pull(handed.grant, tokens, destination.allocate())
    destination.wait(pulled.transfer_id)
    assert wait(destination, pulled.transfer_id, until, 0.0).state == SUCCEEDED


def test_layers_of_a_pull_are_done_when_it_has_succeeded(source: Engine, destination: Engine) -> None:
    tokens = prompt(16)
    pulled = destination.pull(source.hand_over(tokens).grant, tokens, destination.allocate(1))
    request = transfer_pb2.WaitTransferRequest(
        transfer_id=pulled.transfer_id, layers=common_pb2.LayerRange(first=0, count=1), timeout=dur(20)
    )
    assert destination.api.transfers.WaitTransfer(request).transfer.state == SUCCEEDED


def wait_many(engine: Engine, ids: list[str], *, wait_for: int = 0, timeout_s: float = 0.0) -> Any:
    return engine.api.transfers.WaitTransfers(
        transfer_pb2.WaitTransfersRequest(
            transfer_ids=ids,
            wait_for=wait_for,  # type: ignore[arg-type]
            timeout=dur(timeout_s),
        )
    )


def test_one_of_several_is_enough_for_who_waits_for_any(source: Engine) -> None:
    first, second = source.hand_over(prompt(16)), source.hand_over(prompt(16))
    ids = [first.transfer.transfer_id, second.transfer.transfer_id]
    assert not wait_many(source, ids).condition_met
    with ThreadPoolExecutor(2) as threads:
        waits = [
            threads.submit(wait_many, source, ids, wait_for=wait_for, timeout_s=15.0)
            for wait_for in (transfer_pb2.WAIT_FOR_ANY, transfer_pb2.WAIT_FOR_ALL)
        ]
        source.release(second.lease.lease_id)
        found = waits[0].result()
        assert [row.condition_met for row in found.waited_transfers] == [False, True]
        assert not waits[1].done()
        source.release(first.lease.lease_id)
        assert [row.transfer.state for row in waits[1].result().waited_transfers] == [CANCELLED, CANCELLED]


def test_as_many_as_a_call_may_wait_for_fit_into_it_and_each_is_answered_once(source: Engine) -> None:
    handed = source.hand_over(prompt(16))
    ids = [f"t-0123456789abcdef-{1_000_000 + i}" for i in range(WAITED_MAX - 2)] + [handed.transfer.transfer_id] * 2
    found = wait_many(source, ids)
    assert [row.transfer_id for row in found.waited_transfers] == ids[:-1]
    assert [row.transfer_id for row in found.waited_transfers if row.HasField("transfer")] == ids[-1:]
    with refused(source.api, "OUT_OF_RANGE", "LIMIT_EXCEEDED"):
        wait_many(source, [*ids, "t"])


def test_several_transfers_are_told_without_their_paths(source: Engine, destination: Engine) -> None:
    tokens = prompt(16)
    handed = source.hand_over(tokens)
    pulled = destination.pull(handed.grant, tokens, destination.allocate())
    assert destination.wait(pulled.transfer_id).paths
    (row,) = wait_many(destination, [pulled.transfer_id]).waited_transfers
    assert (row.transfer.state, list(row.transfer.paths)) == (SUCCEEDED, [])


def test_a_transfer_stays_known_after_its_end(source: Engine, destination: Engine) -> None:
    tokens = prompt(40)
    handed = source.hand_over(tokens, request_id="r-1")
    pulled = destination.pull(handed.grant, tokens, destination.allocate(3), request_id="r-1")
    end = destination.wait(pulled.transfer_id)
    assert (end.state, end.use_tokens, end.block_count) == (SUCCEEDED, 40, 3)
    assert end.moved_bytes == end.total_bytes == 3 * 2048
    assert (end.peer.engine_id, end.peer.address) == (source.engine_id, source.address)
    assert end.peer.transfer_id == handed.transfer.transfer_id
    assert [phase_name(phase.phase) for phase in end.phases] == ["handshake", "open", "queue", "wire", "settle"]
    assert [path.data_path for path in end.paths] == [common_pb2.DATA_PATH_SHM]
    sent = source.wait(handed.transfer.transfer_id)
    assert (sent.state, sent.done_consumer_count, sent.consumer_count) == (SUCCEEDED, 1, 1)
    assert (sent.peer.engine_id, sent.peer.transfer_id) == (destination.engine_id, pulled.transfer_id)


@pytest.mark.parametrize("transfer_id", ["", "t-0-0", "nonsense", "x" * 256])
def test_an_unknown_transfer_is_not_found(source: Engine, transfer_id: str) -> None:
    with unchanged(source):
        with refused(source.api, "NOT_FOUND", "TRANSFER_NOT_FOUND"):
            source.get(transfer_id)
        with refused(source.api, "NOT_FOUND", "TRANSFER_NOT_FOUND"):
            wait(source, transfer_id, UNTIL[0], 1.0)


def test_callers_that_leave_while_they_are_answered_are_no_defect(source: Engine) -> None:
    handed = source.hand_over(prompt(16))
    request = transfer_pb2.WaitTransferRequest(transfer_id=handed.transfer.transfer_id, timeout=dur(0.02))
    for _ in range(20):  # about one in a thousand calls leaves at the critical moment
        patiences_s = [0.02 + i / 10_000 for i in range(-10, 30)]
        calls: list[Any] = [source.api.transfers.WaitTransfer.future(request, timeout=s) for s in patiences_s]
        codes = {call.code() for call in calls}
        assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
    source.process.check_log()


def test_what_else_grpc_tells_of_stays_an_error() -> None:
    error = ValueError("a defect")
    record = logging.LogRecord("grpc", logging.ERROR, "", 0, "failed", (), (ValueError, error, None))
    assert _OthersFaults().filter(record)
    assert (record.levelno, record.exc_info) == (logging.ERROR, (ValueError, error, None))


def acknowledge(engine: Engine, *ids: str) -> int:
    request = transfer_pb2.AcknowledgeTransfersRequest(transfer_ids=ids)
    return engine.api.transfers.AcknowledgeTransfers(request).acknowledged_count


def test_acknowledging_counts_what_is_known_over_and_returned_and_may_be_repeated(source: Engine) -> None:
    over, open_ = source.hand_over(prompt(16)), source.hand_over(prompt(16))
    source.release(over.lease.lease_id)
    ids = [over.transfer.transfer_id, open_.transfer.transfer_id, "t-unknown"]
    assert acknowledge(source, *ids) == 1
    assert acknowledge(source, *ids) == 1
    assert source.get(over.transfer.transfer_id).state == CANCELLED
    assert source.get(open_.transfer.transfer_id).state == PENDING
