"""A side of a push is restarted between any two of its steps: nothing of the old life passes for the new life's."""

import pytest

from tests.e2e.conftest import PATHS
from tests.e2e.pushing import (
    BLOCKS,
    LIMITS,
    MIDWAY,
    MOMENTS,
    SLOW,
    TOKENS,
    begin,
    case,
    check_came_to_rest,
    check_end,
    check_unhurt,
)
from tests.service.api import refused
from tests.service.conftest import Start
from tests.service.engines import Engine, memory_unchanged
from tests.service.pushes import check_a_good_push, finish, register, reserve
from tests.service.values import new_key

CASES = [
    case(path, moment, quick=(path == "shm" and moment != MIDWAY)) for path in ("shm", "nixl") for moment in MOMENTS
]


def begin_pair(start: Start, path: str) -> tuple[Engine, Engine]:
    flags, environment = PATHS[path]
    source, destination = start(
        *[(*flags, *SLOW, "--engine-id", name) for name in ("p", "d")], settings=LIMITS, **environment
    )
    return source, destination


def restart(start: Start, path: str, engine: Engine) -> Engine:
    """Restarts the engine in a new life, with the same engine id and address."""
    engine.process.kill()
    flags, environment = PATHS[path]
    where = ("--listen", engine.address, "--engine-id", engine.engine_id)
    (again,) = start((*flags, *SLOW, *where), settings=LIMITS, **environment)
    assert (again.address, again.engine_id) == (engine.address, engine.engine_id)
    return again


@pytest.mark.parametrize(("path", "moment"), CASES)
def test_a_source_that_restarts_starts_over(start: Start, path: str, moment: str) -> None:
    source, destination = begin_pair(start, path)
    life = source.incarnation()
    made = begin(source, destination, moment)
    again = restart(start, path, source)
    check_end(destination.wait(made.received, returned=False))
    check_came_to_rest(destination, made.received)
    again.allocate(BLOCKS)
    with memory_unchanged(again, destination), refused(again.api, "ABORTED", "INCARNATION_CHANGED"):
        finish(again, made.key, TOKENS, made.blocks[2:], incarnation=life)
    check_a_good_push(again, destination)
    check_unhurt(destination)
    check_unhurt(again)


@pytest.mark.parametrize(("path", "moment"), CASES)
def test_a_restarted_destination_is_not_filled_for_its_last_life(start: Start, path: str, moment: str) -> None:
    source, destination = begin_pair(start, path)
    made = begin(source, destination, moment)
    again = restart(start, path, destination)
    assert again.allocate(BLOCKS) == made.target, "the lowest free blocks are given out first"
    kept = again.write(made.target, seed=300)
    check_end(source.wait(made.sent, returned=False))
    check_came_to_rest(source, made.sent)
    check_a_good_push(source, again)
    assert again.read(made.target) == kept
    check_unhurt(source)
    check_unhurt(again)


def test_a_reservation_of_an_earlier_life_is_refused_by_the_next(start: Start) -> None:
    source, destination = begin_pair(start, "shm")
    key, blocks = new_key(), source.allocate(BLOCKS)
    grant = reserve(destination, key, TOKENS, destination.allocate(BLOCKS)).grant
    again = restart(start, "shm", destination)
    with memory_unchanged(again):
        register(source, grant)
        sent = finish(source, key, TOKENS, blocks)
        end = source.wait(sent.transfer.transfer_id)
        assert check_end(end) == "REGISTRATION_TIMEOUT", "another destination may come, and none does"
        assert "restarted since the grant" in end.failure.message
    check_a_good_push(source, again)
    check_unhurt(source)
