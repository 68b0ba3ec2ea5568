"""Commands longer than a frame go in several frames. Those that cannot be sent fail at once with a typed error."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest

from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, uniform_layout
from kvgrpc.engine import Engine, LeadDied, Rank, content
from kvgrpc.errors import OutOfRange, Reason
from kvgrpc.v1 import common_pb2, lease_pb2
from kvgrpc.wire import frames
from tests.engine.conftest import SETTINGS, Attach, Leads
from tests.engine.support import ROOT, Asked, Lead, Side, Workers, failure, new_key, received, refused, tokens
from tests.service.engines import SUCCEEDED, wait_until
from tests.service.values import named_blocks

BLOCKS = 65_536
"""The maximum number of blocks that one request may name."""
LAYERS = 128
SMALL = 3_000
"""Frame size of the lead with short frames, in bytes. A frame fits 300 blocks, but not 600 runs."""


def deep(layers: int = LAYERS, blocks: int = BLOCKS) -> PoolLayout:
    """Returns a pool of twice as many blocks, of 1 token and 8 bytes per layer. Every second block moves, and such
    neighbours are too far apart to move as one run.
    """
    return uniform_layout(Group("full", GroupKind.FULL_ATTENTION, layers, 1, 2 * blocks, 1, 1, "float32"), 8)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers("tests.engine.large_worker")
    yield made
    made.close()


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leads]:
    """Runs P and D for a transfer that takes seconds, or much longer on a busy machine."""
    folder = tmp_path_factory.mktemp("patient")
    settings = f"{SETTINGS}\ntransfer_timeout_s = 200.0\n"
    with ExitStack() as stack:
        p, d = (Lead(folder, name, settings=settings) for name in ("P", "D"))
        for lead in (p, d):
            stack.callback(lead.close)
        yield p.wait_ready(), d.wait_ready()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Yields a lead whose frames are short."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "sitecustomize.py").write_text(f"from kvgrpc.wire import frames\nframes.FRAME_BYTES_MAX = {SMALL}\n")
    lead = Lead(folder, "S", settings=SETTINGS, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    yield lead.wait_ready()
    lead.close()


class LargeSide(Side):
    """An engine with one worker, and a pool of that shape."""

    def __init__(self, lead: Lead, worker: Asked, pool: PoolLayout) -> None:
        self.lead, self.worker, self.ranks = lead, worker, []
        self.engine = Engine.attach(lead.socket_path, pool=pool, private_memory=True)
        ticket = self.engine.ticket
        asked = {"socket_path": ticket.socket_path, "secret": ticket.secret.hex(), "memory_bytes": ticket.memory_bytes}
        assert worker.ask(op="attach", **asked) == "attached"

    def close(self) -> None:
        self.engine.close()
        assert self.worker.ask(op="detach") == "detached"


def test_a_pull_of_the_most_blocks_and_layers_goes_in_several_frames(patient: Leads, workers: Workers) -> None:
    with ExitStack() as stack:
        source, destination = sides(stack, patient, workers, deep())
        source.worker.ask(op="fill", seed=1)
        handover = source.hand_over(range(0, 2 * BLOCKS, 2), tokens(BLOCKS))
        pull = destination.engine.pull(handover.grant, content(tokens(BLOCKS)))
        pull.start(range(1, 2 * BLOCKS, 2))
        wait_until(lambda: bool(destination.engine.poll(0.1)) and pull.over, 200.0)
        moved = destination.lead.transfer(pull.transfer_id)
        assert moved.state == SUCCEEDED, moved
        assert [path.descriptor_count for path in moved.paths] == [BLOCKS * LAYERS]
        assert destination.worker.ask(op="read")[1] == source.worker.ask(op="read")[0]


def test_a_posting_too_long_for_a_frame_fails_alone_and_at_once(leads: Leads, small: Lead, workers: Workers) -> None:
    with ExitStack() as stack:
        source, destination = sides(stack, (leads[0], small), workers, deep(2, 300))
        source.worker.ask(op="fill", seed=1)
        handover = source.hand_over(range(0, 600, 2), tokens(300), consumers=2)
        pull = destination.engine.pull(handover.grant, content(tokens(300)))
        pull.start(range(1, 600, 2))
        failed = failure(destination.finish(pull))
        assert failed.reason is Reason.DATA_PATH_FAILED
        assert "frame" in failed.message
        assert "LIMIT_EXCEEDED" in failed.message or f"limit is {SMALL}" in failed.message
        again = destination.engine.pull(source.hand_over(range(0, 8, 2), tokens(4)).grant, content(tokens(4)))
        again.start(range(1, 8, 2))
        received(destination.finish(again))


def test_a_call_too_long_for_a_frame_is_refused(leads: Leads, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    side = attach(leads[0])
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 1000)
    before, long, after = (
        side.engine.finished_blocks([i], content(tokens(size)), transfer_key=new_key())
        for i, size in enumerate((16, 4000, 16))
    )
    assert failure(side.finish(long)).reason is Reason.LIMIT_EXCEEDED
    assert side.known(before)
    assert side.known(after)
    with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
        side.engine.free(range(0, 2000, 2))


def test_events_too_many_for_a_frame_come_in_several(small: Lead, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Side(small, pool=deep(2, 300))) as side:
        made = [side.engine.finished_blocks([i], content(tokens(1)), transfer_key=new_key()) for i in range(60)]
        monkeypatch.setattr(frames, "FRAME_BYTES_MAX", SMALL)
        side.engine.flush()  # all at once, in frames as short as the lead's own
        side.poll_until(lambda _: all(handover.transfer_id for handover in made))
        assert len({handover.transfer_id for handover in made}) == len(made)


def test_an_engine_hears_why_it_ends_for_an_event_that_fits_into_no_frame(small: Lead) -> None:
    """The answer to a call, slightly longer than the call, is such an event."""
    runs = common_pb2.BlockRuns(starts=range(0, 1900, 2), counts=[1] * 950)
    held = common_pb2.Content(opaque_id=b"o" * 16, opaque_tokens=950)
    why = f"does not fit into a frame.* the limit is {SMALL}"
    with closing(Side(small, pool=deep(2, 1000))) as side:
        blocks = named_blocks(side.engine.incarnation, common_pb2.GroupBlocks(runs=runs))
        asked = lease_pb2.GrantLeaseRequest(blocks=blocks, content=held)
        with pytest.raises(LeadDied, match=why):
            side.engine._lives._session.wait(grant_lease=asked)
    with closing(Side(small, pool=deep(2, 300))) as side:
        assert side.known(side.engine.finished_blocks([1], content(tokens(1)), transfer_key=new_key()))


class InPieces(Side):
    """An engine whose only worker, in this process, has many tensors, and so a long endpoint."""

    def __init__(self, lead: Lead, pool: PoolLayout) -> None:
        self.lead, self.ranks = lead, []
        self.engine = Engine.attach(lead.socket_path, pool=pool, private_memory=True)
        tensors = list(np.zeros((800, pool.total_bytes // 400), dtype=np.uint8)[::2])  # not contiguous
        self.ranks.append(Rank(self.engine.ticket, 0, tensors, data_paths=("cma",)))


def test_an_endpoint_too_long_for_a_frame_fails_its_pulls(leads: Leads, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = deep(2, 300)
    with closing(InPieces(leads[0], pool)) as source, closing(Side(leads[1], pool=pool)) as destination:
        handover = source.hand_over([1, 2], tokens(2))
        pull = destination.engine.pull(handover.grant, content(tokens(2)))
        monkeypatch.setattr(frames, "FRAME_BYTES_MAX", SMALL)
        pull.start([3, 4])
        failed = failure(destination.finish(pull))
        assert (failed.reason, "cma" in failed.message) == (Reason.NO_DATA_PATH, True), failed
        assert source.known(source.hand_over([3], tokens(1)))


def sides(stack: ExitStack, leads: Leads, workers: Workers, pool: PoolLayout) -> tuple[LargeSide, LargeSide]:
    """Returns source and destination, which the stack closes."""
    source, destination = (LargeSide(lead, workers.make(), pool) for lead in leads)
    stack.callback(source.close)
    stack.callback(destination.close)
    return source, destination
