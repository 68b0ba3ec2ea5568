"""Engines come and go at one lead, and afterwards it and its peer hold no more resources than before."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.engine import content
from kvgrpc.v1 import admin_pb2, handshake_pb2
from tests.engine.conftest import Leads
from tests.engine.support import WAIT_S, Lead, Side, received, tokens
from tests.service.engines import wait_until
from tests.service.footprint import footprint

PROMPT = tokens(40)
LIVES = 12
"""Number of lives. Leaving one connection each would exceed the few that may be about to close."""
SETTINGS = """
[limits]
peer_grace_s = 0.5
"""


@pytest.fixture
def short_leads(tmp_path: Path) -> Iterator[Leads]:
    """Yields leads that soon notice the end of a life."""
    with ExitStack() as stack:
        leads = [Lead(tmp_path, name, "--data-paths", "shm", settings=SETTINGS) for name in ("P", "D")]
        for lead in leads:
            stack.callback(lead.close)
        yield leads[0].wait_ready(), leads[1].wait_ready()


def _lives(lead: Lead) -> int:
    """Returns the number of peers that this lead does not consider dead."""
    peers = lead.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    return sum(peer.state != handshake_pb2.PEER_STATE_DEAD for peer in peers)


def _one_life(lead: Lead, other: Side, seed: int) -> None:
    """Attaches an engine, pulls in both directions, and ends it. Waits until the lead has noticed."""
    side = Side(lead)
    try:
        for source, destination in ((side, other), (other, side)):
            written = source.fill([1, 2, 3], seed)
            handover = source.hand_over([1, 2, 3], PROMPT)
            pull = destination.engine.pull(handover.grant, content(PROMPT))
            pull.start([11, 12, 13])
            received(destination.finish(pull))
            source.finish(handover)
            assert np.array_equal(destination.read([11, 12, 13]), written)
    finally:
        side.close()
    lead.wait_no_engine()
    wait_until(lambda: not _lives(other.lead))


def test_leads_hold_nothing_of_engines_and_peers_that_are_gone(short_leads: Leads) -> None:
    lead, there = short_leads
    other = Side(there)
    try:
        _one_life(lead, other, seed=0)
        pids = [one.process.pid for one in short_leads]
        before = [footprint(pid) for pid in pids]
        for seed in range(1, LIVES):
            _one_life(lead, other, seed)
        wait_until(
            lambda: all(footprint(pid).same(old) for pid, old in zip(pids, before, strict=True)),
            timeout_s=WAIT_S,
            what=lambda: (before, [footprint(pid) for pid in pids]),
        )
    finally:
        other.close()
