"""No byte lands after a restart in blocks that came back. An engine stays away while a write may still land."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import numpy as np
import pytest

from kvgrpc.engine import Engine, Event, HandOver, LeadDied, Pull, Push, Received, Reservation, content
from kvgrpc.engine.transfers.handles import Handle
from kvgrpc.errors import InternalError
from kvgrpc.v1 import admin_pb2
from tests.engine.conftest import SETTINGS
from tests.engine.lead_restart.sides import (
    CACHED,
    LAYOUT,
    MODES,
    PROMPT,
    SLOW,
    SOURCE,
    TARGET,
    Side,
    Sides,
    begun,
    check_serves,
    kill,
    launched,
    move,
    poll_on,
    replaced,
    shared,
)
from tests.engine.support import Lead, new_key, tokens
from tests.service.api import Api
from tests.service.conftest import TEST_S
from tests.service.engines import wait_until

Begin = Callable[..., tuple[Handle, Handle]]

pytestmark = pytest.mark.timeout(TEST_S)


def _is_over(handle: Handle) -> Callable[[list[Event]], bool]:
    return lambda _: handle.over


def in_flight(source: Side, destination: Side, blocks: list[int], prompt: list[int]) -> tuple[HandOver, Pull]:
    """Returns both ends of a pull whose first bytes have arrived, and whose last ones may still be in flight."""
    while True:
        destination.view[:, blocks] = 0
        handover = source.engine.finished_blocks(blocks, content(prompt), transfer_key=new_key())
        source.engine.flush()
        pull = destination.engine.pull(handover.grant, content(prompt))
        pull.start(blocks)
        while not (destination.view[:, 0, 0].any() or pull.over):
            destination.engine.poll()
        if not pull.over:
            return handover, pull
        source.until(_is_over(handover))


def push_in_flight(source: Side, destination: Side, blocks: list[int], prompt: list[int]) -> tuple[Push, Reservation]:
    """Returns both ends of a push whose bytes are in flight, as in `in_flight`. The destination moves it, too."""
    while True:
        destination.view[:, blocks] = 0
        push, target = begun(source, destination, blocks, prompt)
        push.finished(blocks, last=True)
        source.engine.flush()
        while not (destination.view[:, 0, 0].any() or target.over):
            destination.engine.poll()
        if not target.over:
            return push, target
        source.until(_is_over(push))


@pytest.mark.parametrize("begin", [in_flight, pytest.param(push_in_flight, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_no_late_byte_lands_in_blocks_that_came_back(sides: Sides, peer: Side, mode: str, begin: Begin) -> None:
    side = sides(mode, *SLOW)
    cached, blocks = side.fill(CACHED, seed=5), list(range(100))
    peer.view[:, blocks] = 0xAA
    many = tokens(1600)
    check_serves(side, peer)
    sending, receiving = begin(peer, side, blocks, many)
    assert not side.view[:, blocks].all(), "most of it is to come"
    replaced(side, receiving)
    side.view[:, blocks] = 0x55
    sending.cancel()
    peer.until(lambda _: sending.over)
    check_serves(side, peer)
    wanted = sorted({*blocks} - {40, 41, 42, 50, 51, 52})
    assert (side.view[:, wanted] == 0x55).all()
    assert np.array_equal(side.read(CACHED), cached)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Side]:
    """Yields a peer that writes what it pushes, slowly."""
    flags = ("--data-paths", "nixl", "--source-writes", *SLOW)
    lead = Lead(tmp_path_factory.mktemp("writer"), "W", *flags, settings=SETTINGS).wait_ready()
    side = shared(Engine.attach(lead.socket_path, pool=LAYOUT))
    yield side
    side.close()
    lead.close()


@pytest.mark.parametrize(
    "private", [pytest.param(False, id="shared"), pytest.param(True, id="private", marks=pytest.mark.slow)]
)
def test_memory_that_a_peer_may_still_write_keeps_its_engine_from_coming_back(writer: Side, private: bool) -> None:
    """The peer's process writes by CMA and needs nothing of this process, so a death here proves nothing."""
    side = launched("nixl", private=private)
    try:
        push, target = begun(writer, side, TARGET, PROMPT)
        push.finished(SOURCE, last=True)
        writer.engine.flush()
        events = side.until(lambda _: target.over)
        assert isinstance(events[-1], Received)
        writer.until(lambda _: push.over)
        replaced(side)  # proves that the earlier writes are over
        writer.fill(SOURCE, seed=10)
        side.view[:, TARGET] = 0
        push, target = begun(writer, side, TARGET, PROMPT)
        push.finished(SOURCE, last=True)
        writer.engine.flush()
        wait_until(lambda: bool(side.view[:, TARGET].any()))
        kill(side)
        told: list[Event] = []
        with pytest.raises(LeadDied, match="not proved to be at rest"):
            poll_on(side.engine, told)
        assert not target.over
        push.cancel()
        writer.until(lambda _: push.over)
    finally:
        side.engine.close()
        with suppress(InternalError):
            side.rank.close()


@pytest.mark.slow
def test_what_an_engine_writes_itself_is_its_own_again_only_when_no_posting_reads_it_any_more(peer: Side) -> None:
    """The lead dies during the engine's write. Over CMA, only the end of the writing process proves to the destination
    that no write follows, so an operator releases the destination's blocks.
    """
    side = launched("nixl", "--source-writes", *SLOW)
    try:
        blocks, spare = list(range(100)), [110, 111, 112]
        made = side.fill(blocks, seed=12)
        peer.view[:, blocks] = 0
        push, target = begun(side, peer, blocks, tokens(1600))
        push.finished(blocks, last=True)
        side.engine.flush()
        wait_until(lambda: bool(peer.view[:, blocks].any()))
        assert not peer.view[:, blocks].all(), "most of it is to come"
        replaced(side, push)
        side.view[:, blocks] = 0x55
        move(side, peer, spare, spare)  # the transfer belongs to a new life, so the last life is over
        peer.until(lambda _: target.failed)
        assert not target.over
        word = admin_pb2.ReleaseQuarantineRequest(force=True, message="its worker has closed its data paths")
        with closing(Api(peer.engine.address)) as api:
            assert api.admin.ReleaseQuarantine(word).released_block_count == len(blocks)
        peer.until(lambda _: target.over)
        found = peer.read(blocks)
        assert ((found == made) | (found == 0)).all()
    finally:
        side.close()
