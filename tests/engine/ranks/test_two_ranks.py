"""Two ranks on each side, each a process with its own memory: pushes, layers, and workers that die during a move."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import grpc
import pytest

from kvgrpc.engine import Failed, LayersReceived, Received
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.v1 import admin_pb2, transfer_pb2
from tests.engine.conftest import Leads
from tests.engine.private_side import PrivateSide, Teams
from tests.engine.ranks.moves import (
    LOST,
    NAMES,
    PROMPT,
    SLOW_BYTES_PER_S,
    SOURCE,
    TARGET,
    WAYS,
    Way,
    begun,
    check_push,
    in_the_middle,
)
from tests.engine.support import QUIET_S, Lead, Workers, kinds, lead_died
from tests.service.conftest import TEST_S
from tests.service.engines import wait_until

pytestmark = pytest.mark.timeout(TEST_S)

Attach = Callable[..., PrivateSide]
Kill = Callable[[PrivateSide, int], None]


@pytest.fixture
def sides(leads: Leads, writer: Lead, teams: Teams) -> Iterator[Attach]:
    """Attaches the source or the destination."""
    with ExitStack() as stack:

        def begin(way: Way, who: str, limits: Sequence[float | None] = (None, None)) -> PrivateSide:
            number = ("source", "destination").index(who)
            lead = writer if way.source_writes and who == "source" else leads[number]
            side = PrivateSide(lead, teams[number], way.path, limits=limits)
            stack.callback(side.close)
            return side

        yield begin


@pytest.fixture
def kill(workers: Workers, teams: Teams) -> Kill:
    """Kills a worker with SIGKILL, and makes another one for the next engine."""

    def end(side: PrivateSide, rank: int) -> None:
        dead = side.workers[rank]
        dead.kill()
        (team,) = (team for team in teams if dead in team)
        team[rank] = workers.make()

    return end


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_push_fills_the_blocks_of_each_rank_and_no_others(sides: Attach, way: Way) -> None:
    source, destination = sides(way, "source"), sides(way, "destination")
    for seed in (500, 600):  # the second push reuses the first one's connection
        check_push(source, destination, way, seed)


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_layers_move_when_every_rank_has_written_them_and_not_before(sides: Attach, way: Way) -> None:
    source, destination = sides(way, "source"), sides(way, "destination")
    before = destination.read_all(TARGET)
    push, reservation = begun(source, destination, TARGET, PROMPT)
    for layer in range(2):
        push.finished(SOURCE, layers=(layer, 1), last=layer == 1, after_step=7)
    source.engine.flush()
    expected = source.fill_all(SOURCE, 700)

    def report(rank: int, **step: int) -> None:
        assert (
            source.workers[rank].ask(op="layers_done" if "first" in step else "step_done", step=7, **step) == "reported"
        )

    report(0, first=0, count=1)
    assert destination.engine.poll(QUIET_S) == []
    assert destination.read_all(TARGET) == before
    report(1, first=0, count=1)
    (event,) = destination.poll_until(bool)
    assert isinstance(event, LayersReceived)
    assert event.layers_done == ((0, 1),)
    report(1)
    assert destination.engine.poll(QUIET_S) == []
    report(0)
    assert destination.poll_until(lambda _: reservation.over)[-1] == Received(reservation, len(PROMPT))
    assert destination.read_all(TARGET) == expected


def begin_slow(sides: Attach, way: Way) -> tuple[PrivateSide, PrivateSide, Handle, Handle]:
    """Returns both sides, and both ends of a move in its middle."""
    limits = None, SLOW_BYTES_PER_S
    source = sides(way, "source", limits if way.source_writes else (None, None))
    destination = sides(way, "destination", (None, None) if way.source_writes else limits)
    return source, destination, *in_the_middle(source, destination, way)


def other_worker(side: PrivateSide) -> str:
    """Checks that the other rank's worker is told LeadDied at once. Returns its answer to a detach."""
    assert side.workers[0].ask(op="step_done", step=1) == "LeadDied"
    return str(side.workers[0].ask(op="detach"))


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_destination_whose_worker_dies_within_a_move_frees_its_source(sides: Attach, kill: Kill, way: Way) -> None:
    source, destination, given, _ = begin_slow(sides, way)
    kill(destination, 1)
    lead_died(destination)
    # A peer that writes may have more writes in flight, as far as the rank knows. The memory is then kept, unless the
    # peer's write has failed before.
    assert other_worker(destination) in (("not at rest", "detached") if way.source_writes else ("detached",))
    if way.source_writes:
        kill(destination, 0)
    wait_until(destination.lead.at_rest, what=destination.lead.status)
    if way.source_writes:  # the source's own write may fail first, after which another destination may register
        wait_until(lambda: source.engine.poll() != [] or source.lead.waits_for(given.transfer_id) == "registration")
        given.cancel()
    source.poll_until(lambda _: given.over)
    wait_until(source.lead.at_rest, what=source.lead.status)


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_a_source_whose_worker_dies_within_a_move_fails_its_destination(sides: Attach, kill: Kill, way: Way) -> None:
    source, destination, _, taken = begin_slow(sides, way)
    kill(source, 1)
    lead_died(source)
    assert other_worker(source) == "detached"
    events = destination.poll_until(lambda found: any(isinstance(event, Failed) for event in found))
    assert next(event.reason for event in events if isinstance(event, Failed)) in LOST
    over = destination.lead.transfer(taken.transfer_id)
    assert over.state == transfer_pb2.TRANSFER_STATE_FAILED
    if way.source_writes:
        # The live rank may write on, and writes of the dead one may land until a re-key.
        assert over.memory == transfer_pb2.MEMORY_DISPOSITION_QUARANTINED
        kill(source, 0)
        destination.lead.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
    events += destination.poll_until(lambda _: taken.over)
    assert kinds(events).count("BlocksReturned") == 1
    wait_until(destination.lead.at_rest, what=destination.lead.status)
    wait_until(source.lead.at_rest, what=source.lead.status)


def test_a_release_of_quarantine_whose_caller_hangs_up_is_in_the_audit(sides: Attach, kill: Kill) -> None:
    (way,) = (way for way in WAYS if way.source_writes)
    source, destination, _, taken = begin_slow(sides, way)
    admin, stopped = destination.lead.api.admin, destination.workers[0].pid
    kill(source, 1)
    lead_died(source)
    destination.poll_until(lambda found: any(isinstance(event, Failed) for event in found))
    os.kill(stopped, signal.SIGSTOP)  # the re-key waits for its rank
    try:
        with pytest.raises(grpc.RpcError) as given_up:
            admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest(message="it hangs"), timeout=0.5)
        assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        os.kill(stopped, signal.SIGCONT)
    asked = admin_pb2.ListAuditRecordsRequest()
    wait_until(lambda: [row.message for row in admin.ListAuditRecords(asked).records][:1] == ["it hangs"])
    kill(source, 0)
    admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
    destination.poll_until(lambda _: taken.over)
    for side in (destination, source):
        wait_until(side.lead.at_rest, what=side.lead.status)
