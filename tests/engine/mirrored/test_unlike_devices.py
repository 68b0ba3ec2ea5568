"""Engines with different KV layouts: re-packed bytes go from the mirror to the device, and no other bytes do."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from kvgrpc.engine import Engine, Rank, content
from tests.core.split_kv import made_split
from tests.engine.conftest import Leads
from tests.engine.mirrored.fake_device import FakeDevice
from tests.engine.support import Lead, Side, received, tokens

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one to two": ({"ranks": 1}, {"ranks": 2}),
    "two to one": ({"ranks": 2}, {"ranks": 1}),
    "smaller blocks": ({"tokens": 32}, {"tokens": 16}),
    "two stages to one": ({"stages": 2}, {}),
    "another order": ({}, {"order": "token_major"}),
}
BLOCKS = 24
PROMPT = tokens(90)


class SplitSide(Side):
    """An engine whose ranks run in this process, with devices or with shared memory."""

    def __init__(self, lead: Lead, split: dict[str, Any], *, mirrored: bool) -> None:
        self.lead, self.kv, self.ranks = lead, made_split(**split, dim=16), []
        side = self.kv.side
        self.engine = Engine.attach(lead.socket_path, pool=side.pool, mirrored=mirrored, world_size=side.ranks)
        self.devices = [FakeDevice(nbytes=len(memory)) for memory in self.kv.memories if mirrored]
        for rank in range(side.ranks):
            device = self.devices[rank] if mirrored else None
            self.ranks.append(Rank(self.engine.ticket, rank, device=device))
            if device is None:
                self.kv.memories[rank] = self.ranks[rank].memory
        self.kv.clear()

    def fill_kv(self, blocks: Sequence[int]) -> None:
        self.kv.fill(blocks)
        self.write_all()

    def write_all(self) -> None:
        for device, memory in zip(self.devices, self.kv.memories, strict=False):
            device.write_all(memory)

    def check_kv(self, blocks: Sequence[int], begin: int, end: int) -> None:
        for rank, device in enumerate(self.devices):
            self.kv.memories[rank] = device.read_all()
        self.kv.check(blocks, range(begin, end), begin)


@pytest.fixture(params=[True, False], ids=["device to shared", "shared to device"])
def both(leads: Leads, kinds: Any, request: pytest.FixtureRequest) -> Iterator[tuple[SplitSide, SplitSide]]:
    with ExitStack() as stack:
        sides = []
        for lead, split, mirrored in zip(leads, kinds, (request.param, not request.param), strict=True):
            sides.append(SplitSide(lead, split, mirrored=mirrored))
            stack.callback(sides[-1].close)
        yield sides[0], sides[1]


@pytest.mark.parametrize("have", [0, 32])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_each_rank_has_its_heads_and_nothing_else_was_written(both: tuple[SplitSide, SplitSide], have: int) -> None:
    source, destination = both
    counts = [-(-len(PROMPT) // side.kv.group.block_tokens) for side in both]
    begin = have // destination.kv.group.block_tokens
    given, taken = ([(7 * i + 5) % BLOCKS for i in range(count)] for count in (counts[0], counts[1] - begin))
    source.fill_kv(given)
    destination.write_all()
    handover = source.hand_over(given, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(taken, have_tokens=have)
    received(destination.finish(pull))
    source.finish(handover)
    first = begin * destination.kv.group.block_tokens
    moved = min(len(given) * source.kv.group.block_tokens, first + len(taken) * destination.kv.group.block_tokens)
    destination.check_kv(taken, first, moved)
