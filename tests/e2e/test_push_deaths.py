"""A side of a push is killed: the other side fails in time, says why, gets its blocks back and serves the next push."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from kvgrpc.core.values import grants
from kvgrpc.engine import Push, Reservation, Reserved, content
from kvgrpc.errors import Reason
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, transfer_pb2
from tests.e2e.conftest import PATHS
from tests.e2e.pushing import (
    BETWEEN,
    BLOCKS,
    LIMITS,
    MIDWAY,
    MOMENTS,
    REGISTERED,
    SLOW,
    TOKENS,
    begin,
    case,
    check_came_to_rest,
    check_end,
    check_unhurt,
)
from tests.engine.support import Lead, Side, failure, received
from tests.service.conftest import Start
from tests.service.engines import BLOCK_BYTES, RETURNED, SUCCEEDED, Engine, blocks_for, wait_until
from tests.service.pushes import check_a_good_push, finish, register, reserve
from tests.service.values import new_key, prompt

ACTIVE = transfer_pb2.TRANSFER_STATE_ACTIVE
CASES = [*(case("shm", moment, quick=moment == MIDWAY) for moment in MOMENTS), case("nixl", MIDWAY, quick=False)]
"""The failure depends on the moment. tests/chaos/test_matrix.py covers every path at every step."""


def of_path(start: Start, path: str, count: int = 2) -> list[Engine]:
    """Starts engines that use this data path."""
    flags, environment = PATHS[path]
    return start(*[(*flags, *SLOW)] * count, settings=LIMITS, **environment)


def three(start: Start, path: str) -> list[Engine]:
    """Starts a source, a destination, and a third engine for the next push."""
    return of_path(start, path, 3)


@pytest.mark.parametrize(("path", "moment"), CASES)
def test_a_source_that_is_killed_fails_the_push_at_its_destination(start: Start, path: str, moment: str) -> None:
    source, destination, third = three(start, path)
    made = begin(source, destination, moment)
    source.process.kill()
    reason = check_end(destination.wait(made.received, returned=False))
    assert reason in {"PEER_LOST", "PEER_UNREACHABLE", "DATA_PATH_FAILED", "SETTLE_TIMEOUT"}
    check_came_to_rest(destination, made.received)
    check_a_good_push(third, destination)
    check_unhurt(destination)


@pytest.mark.parametrize(("path", "moment"), CASES)
def test_a_destination_that_is_killed_ends_the_push_at_its_source(start: Start, path: str, moment: str) -> None:
    source, destination, third = three(start, path)
    made = begin(source, destination, moment)
    destination.process.kill()
    check_end(source.wait(made.sent, returned=False))
    check_came_to_rest(source, made.sent)
    check_a_good_push(source, third)
    check_unhurt(source)


@pytest.mark.slow
def test_a_source_that_dies_unknown_to_its_destination_is_waited_for_as_long_as_a_registration(start: Start) -> None:
    source, destination, third = three(start, "shm")
    reserved = reserve(destination, new_key(), TOKENS, destination.allocate(BLOCKS))
    register(source, reserved.grant)
    source.process.kill()
    assert check_end(destination.wait(reserved.transfer.transfer_id)) == "REGISTRATION_TIMEOUT"
    check_a_good_push(third, destination)
    check_unhurt(destination)


def movers() -> list[object]:
    """Returns the data paths; the quick one is the one over which a source could write."""
    found: list[object] = []
    for path in PATHS:
        marks = [] if path == "nixl" else [pytest.mark.slow]
        found.append(pytest.param(path, marks=marks))
    return found


@pytest.mark.parametrize("path", movers())
def test_the_destination_moves_the_bytes_of_a_push(start: Start, path: str) -> None:
    source, destination = of_path(start, path)
    tokens, key = prompt(40), new_key()
    reserved = reserve(destination, key, tokens, destination.allocate(blocks_for(40)))
    register(source, reserved.grant)
    sent = finish(source, key, tokens, source.allocate(blocks_for(40)))
    end = destination.wait(reserved.transfer.transfer_id)
    assert end.state == SUCCEEDED
    assert sum(moved.moved_bytes for moved in end.paths) == end.total_bytes
    assert sum(moved.moved_bytes for moved in source.wait(sent.transfer.transfer_id).paths) == 0


# ---- an engine is gone, and its lead lives on


@pytest.fixture(scope="module")
def leads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Lead]]:
    """Yields two leads for all tests; engines come and go on them."""
    folder = tmp_path_factory.mktemp("leads")
    with ExitStack() as stack:
        made = [Lead(folder, name, "--data-paths", "shm", *SLOW, settings=LIMITS) for name in ("P", "D")]
        for lead in made:
            stack.callback(lead.close)
        yield [lead.wait_ready() for lead in made]


@pytest.fixture
def sides(leads: list[Lead]) -> Iterator[tuple[Side, Side]]:
    """Yields an engine on each lead: the first has the KV, the second wants it."""
    with ExitStack() as stack:
        for lead in leads:
            lead.wait_no_engine()
        source, destination = (Side(lead) for lead in leads)
        stack.callback(source.close)
        stack.callback(destination.close)
        yield source, destination


def begun(source: Side, destination: Side, moment: str) -> tuple[Push, Reservation]:
    """Returns a push of one engine to another, brought to a moment."""
    blocks, key = range(BLOCKS), new_key()
    source.fill(blocks, seed=1)
    reservation = destination.engine.reserve(blocks, content(TOKENS), transfer_key=key)
    destination.poll_until(bool)
    where = common_pb2.PeerAddress(address=grants.read_claims(reservation.grant).address)
    source.lead.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=where))
    push = source.engine.push(content(TOKENS), transfer_key=key)
    push.register(reservation.grant)
    if moment != REGISTERED:
        push.finished(blocks[:2] if moment == BETWEEN else blocks, last=moment == MIDWAY)
    source.round_trip()
    if moment != REGISTERED:
        wanted = transfer_pb2.WAITING_FOR_PARTS if moment == BETWEEN else transfer_pb2.WAITING_FOR_UNSPECIFIED
        lead, moved = destination.lead, 2 * BLOCK_BYTES if moment == BETWEEN else 0

        def there() -> bool:
            found = lead.transfer(reservation.transfer_id)
            return (found.state, found.waiting_for, found.moved_bytes) == (ACTIVE, wanted, moved)

        wait_until(there, what=lambda: lead.transfer(reservation.transfer_id))
    return push, reservation


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("gone", ["source", "destination"])
def test_an_engine_that_is_gone_ends_its_pushes_at_its_peer(sides: tuple[Side, Side], gone: str, moment: str) -> None:
    source, destination = sides
    push, reservation = begun(source, destination, moment)
    victim, survivor = (source, destination) if gone == "source" else (destination, source)
    handle = reservation if gone == "source" else push
    victim.close()
    lead = survivor.lead
    wait_until(lambda: lead.transfer(handle.transfer_id).memory == RETURNED)
    survivor.round_trip()  # by now the engine was told all of it
    end = failure([event for event in survivor.engine.poll() if not isinstance(event, Reserved)])
    assert handle.over
    assert end.transfer is handle
    assert end.message
    if gone == "source":
        assert end.reason is Reason.SOURCE_FAILED
    victim.lead.wait_no_engine()
    for lead in (source.lead, destination.lead):
        assert not lead.api.admin.ListPins(admin_pb2.ListPinsRequest()).pins
    again = Side(victim.lead)
    try:
        pair = (again, destination) if gone == "source" else (source, again)
        push, reservation = begun(*pair, REGISTERED)
        push.finished(range(BLOCKS), last=True)
        pair[0].engine.flush()
        received(pair[1].poll_until(lambda _: reservation.over))
        assert np.array_equal(pair[1].read(range(BLOCKS)), pair[0].read(range(BLOCKS)))
    finally:
        again.close()
