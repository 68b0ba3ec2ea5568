"""Pushes that the source writes over NIXL: the destination gets its blocks back only with a proof."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from kvgrpc.v1 import admin_pb2, handshake_pb2
from tests.e2e.conftest import PATHS, Pair
from tests.e2e.pushing import (
    BETWEEN,
    BLOCKS,
    LIMITS,
    MIDWAY,
    SLOW,
    Pushing,
    begin,
    check_came_to_rest,
    check_end,
    check_unhurt,
)
from tests.service.conftest import SHARED, Start
from tests.service.defective import MESSAGE, DefectiveProcess
from tests.service.engines import QUARANTINED, RETURNED, SUCCEEDED, Engine, wait_until
from tests.service.pushes import check_a_good_push

PATIENT = LIMITS.replace("peer_grace_s = 0.6", "peer_grace_s = 20.0")
CASES = pytest.mark.parametrize("path", ["nixl", pytest.param("nixl-tcp", marks=pytest.mark.slow)])


def pair_of(start: Start, path: str, limits: str) -> Pair:
    flags, environment = PATHS[path]
    source, destination = start(*[(*flags, *SLOW)] * 2, settings="source_writes = true\n" + limits, **environment)
    return source, destination


@CASES
def test_the_source_writes_every_part_and_both_succeed(start: Start, path: str) -> None:
    source, destination = pair_of(start, path, PATIENT)
    made = begin(source, destination, BETWEEN)
    made.finish(2, BLOCKS)
    end, send = destination.wait(made.received), source.wait(made.sent)
    assert (end.state, send.state) == (SUCCEEDED, SUCCEEDED), (end.failure, send.failure)
    assert send.paths[0].moved_bytes == send.total_bytes
    assert not end.paths, "nothing was posted here"
    assert destination.read(made.target) == made.written
    check_unhurt(source)
    check_unhurt(destination)


@CASES
@pytest.mark.parametrize("stops", [True, False], ids=["stood still", "went on"])
def test_a_destination_that_gave_up_has_its_blocks_back_once_at_rest(start: Start, path: str, stops: bool) -> None:
    source, destination = pair_of(start, path, PATIENT)
    made = begin(source, destination, MIDWAY)
    with source.process.stopped() if stops else nullcontext():
        destination.cancel(made.received)
        found = destination.get(made.received)
        check_end(found)
        if stops:
            assert found.memory == QUARANTINED
            (pin,) = destination.pins()
            assert "writes no more" in pin.missing_proof
    check_came_to_rest(destination, made.received)
    later = destination.write(made.target, seed=200)
    check_came_to_rest(source, made.sent)
    check_a_good_push(source, destination)
    assert destination.read(made.target) == later
    check_unhurt(source)
    check_unhurt(destination)


def test_blocks_into_which_a_source_wrote_come_back_with_the_end_of_its_process(start: Start) -> None:
    """The source's own process writes with CMA, so nothing arrives after its end, which is seen before the grace
    ends.
    """
    source, destination = pair_of(start, "nixl", PATIENT)
    made = begin(source, destination, MIDWAY)
    with source.process.stopped():
        destination.cancel(made.received)
        assert destination.get(made.received).memory == QUARANTINED
        source.process.kill()
        check_came_to_rest(destination, made.received)
    later = destination.write(made.target, seed=200)
    assert destination.read(made.target) == later
    check_unhurt(destination)


@pytest.mark.slow
def test_bytes_sent_by_tcp_land_after_their_source_died_until_a_rekey(start: Start) -> None:
    source, destination = pair_of(start, "nixl-tcp", LIMITS)
    made = begin(source, destination, MIDWAY)
    source.process.kill()
    end = destination.wait(made.received, returned=False)
    assert check_end(end) == "PEER_LOST"
    assert end.memory == QUARANTINED
    (pin,) = destination.pins()
    assert "writes no more" in pin.missing_proof
    assert destination.counts().quarantined_block_count == BLOCKS
    check_released(destination, made.received)


def test_by_cma_a_stopped_source_holds_blocks_until_its_end_for_a_rekey_proves_nothing(start: Start) -> None:
    source, destination = pair_of(start, "nixl", LIMITS)
    made = begin(source, destination, MIDWAY)
    with source.process.stopped():
        end = destination.wait(made.received, returned=False)
        assert (check_end(end), end.memory) == ("PEER_LOST", QUARANTINED)
        answer = destination.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
        assert (answer.released_block_count, answer.left_block_count, answer.memory_generation) == (0, BLOCKS, 1)
        source.process.kill()
    check_came_to_rest(destination, made.received)
    check_unhurt(destination)


@pytest.mark.slow
def test_by_tcp_a_rekey_ends_the_writes_of_a_stopped_source(start: Start) -> None:
    source, destination = pair_of(start, "nixl-tcp", LIMITS)
    made = begin(source, destination, MIDWAY)
    with source.process.stopped():
        end = destination.wait(made.received, returned=False)
        assert (check_end(end), end.memory) == ("PEER_LOST", QUARANTINED)
        check_released(destination, made.received)
        later = destination.write(made.target, seed=200)
    check_a_good_push(source, destination)
    assert destination.read(made.target) == later
    check_unhurt(source)
    check_unhurt(destination)


def test_at_an_operators_word_blocks_come_back_that_nothing_proves_and_the_log_has_it(start: Start) -> None:
    flags, environment = PATHS["nixl"]
    source, destination, third = start(
        *[(*flags, *SLOW)] * 3, settings=f"source_writes = true\n{LIMITS}", **environment
    )
    made = begin(source, destination, MIDWAY)
    with source.process.stopped():
        end = destination.wait(made.received, returned=False)
        assert (check_end(end), end.memory) == ("PEER_LOST", QUARANTINED)
        word = "its host was switched off at 17:03"
        request = admin_pb2.ReleaseQuarantineRequest(force=True, message=word, transfer_ids=[made.received])
        answer = destination.api.admin.ReleaseQuarantine(request)
        assert (answer.released_block_count, answer.left_block_count, answer.memory_generation) == (BLOCKS, 0, 0)
        check_came_to_rest(destination, made.received)
        assert f"{BLOCKS} blocks left quarantine at an operator's word: {word}\n" in destination.process.log
        check_a_good_push(third, destination)
        source.process.kill()  # makes the operator's word true
    check_unhurt(destination)
    check_unhurt(third)


def check_released(engine: Engine, transfer_id: str) -> None:
    """Checks that a re-key proves the transfer at rest."""
    answer = engine.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
    assert (answer.released_block_count, answer.left_block_count, answer.memory_generation) == (BLOCKS, 0, 1)
    check_came_to_rest(engine, transfer_id)


@CASES
def test_a_source_that_is_cancelled_keeps_its_blocks_until_its_own_writes_have_ended(start: Start, path: str) -> None:
    source, destination = pair_of(start, path, PATIENT)
    made = begin(source, destination, MIDWAY)
    source.cancel(made.sent)
    found = source.get(made.sent)
    check_end(found)
    assert found.memory == QUARANTINED
    (pin,) = source.pins()
    assert pin.missing_proof == "the end of the posting of rank 0"
    wait_until(lambda: source.get(made.sent).memory == RETURNED)
    check_came_to_rest(destination, made.received)
    check_unhurt(source)
    check_unhurt(destination)


@pytest.fixture
def defective(start: Start, tmp_path: Path) -> Iterator[Callable[[str], Pushing]]:
    """Yields a function that begins a push over a data path, from a source with a defect, up to bytes that move."""
    with ExitStack() as stack:

        def make(path: str) -> Pushing:
            flags, environment = PATHS[path]
            settings = f"source_writes = true\n{PATIENT}"
            (destination,) = start((*flags, *SLOW), settings=settings, **environment)
            process = DefectiveProcess(tmp_path / "bad", *SHARED, *flags, *SLOW, settings=settings, **environment)
            stack.callback(process.end)
            source = Engine(process)
            stack.callback(source.api.close)
            return begin(source, destination, MIDWAY)

        yield make


def fail(source: Engine) -> None:
    """Triggers a defect that ends the source's life, and waits for the next life."""
    life = source.incarnation()
    source.api.refusal(lambda: source.cancel("t-any", MESSAGE))
    assert source.incarnation() != life
    admission = source.api.admin.GetStatus
    wait_until(lambda: admission(admin_pb2.GetStatusRequest()).admission == handshake_pb2.ADMISSION_OPEN)


@CASES
def test_after_a_defect_blocks_come_back_at_proved_rest(defective: Callable[[str], Pushing], path: str) -> None:
    made = defective(path)
    source, destination = made.source, made.destination
    fail(source)
    check_came_to_rest(destination, made.received)
    later = destination.write(made.target, seed=200)
    check_a_good_push(source, destination)
    assert destination.read(made.target) == later
    check_unhurt(destination)


@pytest.mark.slow
def test_after_a_defect_blocks_stay_in_quarantine_without_a_proof(defective: Callable[[str], Pushing]) -> None:
    """Bytes that TCP carries to a stopped destination land later."""
    made = defective("nixl-tcp")
    source, destination = made.source, made.destination
    with destination.process.stopped():
        fail(source)
    check_a_good_push(source, destination)
    assert check_end(destination.get(made.received)) == "PEER_LOST"
    assert destination.get(made.received).memory == QUARANTINED
    check_released(destination, made.received)
