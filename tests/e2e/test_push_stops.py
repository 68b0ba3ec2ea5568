"""A side of a push stands still for longer than the grace, then goes on and finds that the push is over.

Its late acts change no outcome. Above all they change no byte of blocks that were given back and now hold something
else.
"""

import pytest

from tests.e2e.conftest import PATHS, Pair
from tests.e2e.pushing import (
    BETWEEN,
    LIMITS,
    MIDWAY,
    REGISTERED,
    REST_S,
    SLOW,
    Pushing,
    begin,
    case,
    check_came_to_rest,
    check_end,
    check_unhurt,
)
from tests.service.conftest import Start
from tests.service.engines import RETURNED, SUCCEEDED, Engine
from tests.service.pushes import check_a_good_push

ALWAYS_AT_REST = ("shm", "cma")
"""Data paths whose reads need nothing of a stopped process."""
CASES = [
    *(case("shm", moment, quick=False) for moment in (REGISTERED, BETWEEN)),
    *(case(path, MIDWAY, quick=path == "nixl") for path in PATHS),
]
"""The quick case is the one in which most could still arrive: bytes move, and only the library knows where.
tests/chaos/test_matrix.py covers every path at the other steps.
"""


def pair_of(start: Start, path: str) -> Pair:
    flags, environment = PATHS[path]
    source, destination = start(*[(*flags, *SLOW)] * 2, settings=LIMITS, **environment)
    check_a_good_push(source, destination, seed=5)
    return source, destination


def outlive(made: Pushing, victim: Engine, survivor: Engine, mine: list[int], *, at_rest: bool) -> list[bytes]:
    """Stops the victim until the survivor has given it up, then continues it. Returns what the survivor wrote into its
    blocks as soon as they were its own.
    """
    later: list[bytes] = []
    with victim.process.stopped():
        end = survivor.wait(made.of(survivor), returned=False)
        check_end(end)
        if at_rest:
            assert survivor.wait(made.of(survivor), timeout_s=REST_S).memory == RETURNED
        if survivor.get(made.of(survivor)).memory == RETURNED:
            later = survivor.write(mine, seed=200)
    check_came_to_rest(survivor, made.of(survivor))
    assert survivor.get(made.of(survivor)).state == end.state
    return later or survivor.write(mine, seed=200)


@pytest.mark.parametrize(("path", "moment"), CASES)
def test_a_source_that_stood_still_touches_nothing_when_it_goes_on(start: Start, path: str, moment: str) -> None:
    source, destination = pair_of(start, path)
    made = begin(source, destination, moment)
    later = outlive(made, source, destination, made.target, at_rest=path in ALWAYS_AT_REST)
    check_came_to_rest(source, made.sent)
    check_a_good_push(source, destination)
    assert destination.read(made.target) == later
    assert source.read(made.blocks) == made.written
    check_unhurt(source)
    check_unhurt(destination)


@pytest.mark.parametrize(("path", "moment"), CASES)
def test_a_destination_that_stood_still_gets_nothing_when_it_goes_on(start: Start, path: str, moment: str) -> None:
    source, destination = pair_of(start, path)
    made = begin(source, destination, moment)
    later = outlive(made, destination, source, made.blocks, at_rest=path in ALWAYS_AT_REST)
    found = destination.wait(made.received, timeout_s=REST_S)
    if found.state == SUCCEEDED:  # what it was told before it stopped is true
        assert destination.read(made.target) == made.written
    else:
        check_end(found)
    check_came_to_rest(destination, made.received)
    check_a_good_push(source, destination)
    assert source.read(made.blocks) == later
    check_unhurt(source)
    check_unhurt(destination)


def test_a_destination_that_stops_briefly_between_parts_costs_nothing_but_time(start: Start) -> None:
    patient = LIMITS.replace("peer_grace_s = 0.6", "peer_grace_s = 20.0")
    source, destination = start(SLOW, SLOW, settings=patient)
    made = begin(source, destination, BETWEEN)
    with destination.process.stopped():
        pass
    made.finish(2, len(made.blocks))
    assert destination.wait(made.received).failure.message == ""
    assert destination.read(made.target) == made.written
    assert source.wait(made.sent).failure.message == ""
