"""Moves of engines with two ranks. The second rank connects to its lead over the network."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from kvgrpc.engine import Engine, Failed, content
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, transfer_pb2
from tests.chaos.network import Proxy
from tests.engine.conftest import Leads
from tests.engine.made import layout
from tests.engine.private_side import PrivateSide, Teams
from tests.engine.ranks.moves import (
    GRACE_S,
    LOST,
    NAMES,
    PROMPT,
    SLOW_BYTES_PER_S,
    SOURCE,
    TARGET,
    WAYS,
    Way,
    check_pull,
    check_push,
    in_the_middle,
)
from tests.engine.support import QUIET_S, Lead, Workers, ended, kinds, lead_died, received
from tests.service.conftest import TEST_S
from tests.service.engines import wait_until

pytestmark = pytest.mark.timeout(TEST_S)

REMOTE = {1: ""}


def attach(
    stack: ExitStack, leads: Sequence[Lead], teams: Teams, way: Way, slow: str = ""
) -> tuple[PrivateSide, PrivateSide]:
    """Attaches source and destination. Rank 1 moves slowly on the side named in `slow`."""
    sides = []
    for lead, own, name in zip(leads, teams, ("source", "destination"), strict=True):
        limits = (None, SLOW_BYTES_PER_S if name == slow else None)
        sides.append(PrivateSide(lead, own, way.path, limits=limits, remote=REMOTE))
        stack.callback(sides[-1].close)
    return sides[0], sides[1]


def leads_for(leads: Leads, writer: Lead, way: Way) -> tuple[Lead, Lead]:
    return (writer if way.source_writes else leads[0]), leads[1]


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
def test_what_is_pulled_and_pushed_fills_the_blocks_of_each_rank_and_no_others(
    stack: ExitStack, leads: Leads, writer: Lead, teams: Teams, way: Way
) -> None:
    source, destination = attach(stack, leads_for(leads, writer, way), teams, way)
    for seed in (100, 200):  # the second transfer reuses the first one's connection
        check_pull(source, destination, way, seed)
        check_push(source, destination, way, seed + 10)


def test_steps_of_a_rank_elsewhere_hold_its_engines_blocks_back(stack: ExitStack, leads: Leads, teams: Teams) -> None:
    source, destination = attach(stack, leads, teams, Way("cma"))
    handover = source.hand_over(SOURCE, PROMPT, after_step=4)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    assert source.workers[0].ask(op="step_done", step=4) == "reported"
    assert destination.engine.poll(QUIET_S) == []
    expected = source.fill_all(SOURCE, 300)
    assert source.workers[1].ask(op="step_done", step=4) == "reported"
    received(destination.finish(pull))
    assert destination.read_all(TARGET) == expected


def begin_slow(
    stack: ExitStack, leads: Leads, writer: Lead, teams: Teams, way: Way
) -> tuple[PrivateSide, PrivateSide, Handle, Handle]:
    """Returns both sides, and both ends of a move after the remote rank has moved a part of its bytes."""
    slow = "source" if way.source_writes else "destination"
    source, destination = attach(stack, leads_for(leads, writer, way), teams, way, slow)
    return source, destination, *in_the_middle(source, destination, way)


@pytest.mark.parametrize("way", WAYS[:2], ids=NAMES[:2])
def test_a_rank_elsewhere_that_is_killed_within_a_read_ends_its_engine_and_frees_the_source(
    stack: ExitStack, leads: Leads, writer: Lead, teams: Teams, workers: Workers, way: Way
) -> None:
    source, destination, given, _ = begin_slow(stack, leads, writer, teams, way)
    link = os.pidfd_open(destination.workers[1].ask(op="link_pid"))
    destination.workers[1].kill()
    teams[1][1] = workers.make()
    assert "worker of rank 1 is gone" in lead_died(destination).message
    assert ended(link)
    os.close(link)
    assert destination.workers[0].ask(op="step_done", step=1) == "LeadDied"
    wait_until(destination.lead.at_rest, what=destination.lead.status)
    source.poll_until(lambda _: given.over)
    wait_until(source.lead.at_rest, what=source.lead.status)


def test_a_source_that_loses_a_rank_elsewhere_leaves_what_it_may_still_write_in_quarantine(
    stack: ExitStack, leads: Leads, writer: Lead, teams: Teams, workers: Workers
) -> None:
    """The link dies, but the worker may write on. The source's lead begins its next life, and can prove nothing."""
    source, destination, _, taken = begin_slow(stack, leads, writer, teams, Way("nixl", source_writes=True))
    worker = source.workers[1]
    link = worker.ask(op="link_pid")
    os.kill(worker.pid, signal.SIGSTOP)
    os.kill(link, signal.SIGKILL)
    lead_died(source)
    events = destination.poll_until(lambda found: any(isinstance(event, Failed) for event in found))
    assert next(event.reason for event in events if isinstance(event, Failed)) in LOST
    memory = destination.lead.transfer(taken.transfer_id).memory
    assert memory == transfer_pb2.MEMORY_DISPOSITION_QUARANTINED
    source.lead.wait_no_engine()
    # A handshake of the source's next life with the destination is no proof either.
    with Engine.attach(source.lead.socket_path, pool=layout(), world_size=2) as again:
        known = common_pb2.PeerAddress(address=again.address)
        peer = destination.lead.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=known)).peer
        assert peer.incarnation == again.incarnation
        assert not taken.over
        assert destination.lead.transfer(taken.transfer_id).memory == memory
    worker.kill()
    source.workers[0].kill()
    teams[0][:] = [workers.make(), workers.make()]
    destination.lead.api.admin.ReleaseQuarantine(admin_pb2.ReleaseQuarantineRequest())
    events += destination.poll_until(lambda _: taken.over)
    assert kinds(events).count("BlocksReturned") == 1


def cut_engine(stack: ExitStack, lead: Lead, workers: Workers) -> tuple[PrivateSide, Proxy]:
    """Returns an engine whose rank 1 is behind a network that can be cut."""
    proxy = Proxy()
    stack.callback(proxy.close)
    host, _, port = lead.process.wait_ready()["address"].rpartition(":")
    proxy.target = host, int(port)
    side = PrivateSide(lead, [workers.make(), workers.make()], "cma", remote={1: proxy.address})
    stack.callback(side.close)
    return side, proxy


def test_a_network_that_swallows_everything_is_a_death_within_the_grace(
    stack: ExitStack, impatient: Lead, workers: Workers
) -> None:
    side, proxy = cut_engine(stack, impatient, workers)
    link = os.pidfd_open(side.workers[1].ask(op="link_pid"))
    stack.callback(os.close, link)
    side.engine.poll(2 * GRACE_S)  # an idle rank sends beats, so it lives
    proxy.cut()
    error = lead_died(side)
    assert f"said nothing for {GRACE_S:g} s" in error.message
    assert "rank 1" in error.message
    # The worker notices by itself, and its memory comes to rest.
    wait_until(lambda: side.workers[1].ask(op="step_done", step=1) == "LeadDied")
    proxy.mend()
    impatient.wait_no_engine()
    assert side.workers[1].ask(op="detach") == "detached"
    assert ended(link)
    following, _ = cut_engine(stack, impatient, workers)
    following.fill_all(SOURCE, 1)


def test_a_lead_that_stands_still_is_dead_to_a_rank_elsewhere(
    stack: ExitStack, impatient: Lead, workers: Workers
) -> None:
    side, _ = cut_engine(stack, impatient, workers)
    with impatient.process.stopped():
        wait_until(lambda: side.workers[1].ask(op="step_done", step=1) == "LeadDied")
    impatient.wait_no_engine()


def test_a_server_with_a_session_socket_says_that_it_takes_ranks_from_elsewhere(
    stack: ExitStack, leads: Leads, teams: Teams
) -> None:
    side = PrivateSide(leads[0], teams[0], "cma")
    stack.callback(side.close)
    known = leads[0].api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest())
    assert handshake_pb2.FEATURE_REMOTE_RANKS in known.engine.features
