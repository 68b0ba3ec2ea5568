"""Random pairs of engines over real data paths: planned and posted runs bring every byte to its place.

As in a lead, the plan goes to movers as postings, which read, write and re-pack. Each test checks every byte of every
rank of both engines.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kvgrpc.core.actions import Operation, Post
from kvgrpc.core.values.chunks import Size
from kvgrpc.core.values.plans import PairRuns
from kvgrpc.core.values.slices import batches, slices_of
from tests.core.random_layouts import Move, moves
from tests.core.split_kv import CANARY, SplitKV
from tests.datapath.many_ranks import NBYTES, PEER, Asked, engines
from tests.datapath.nixl.peer import TCP
from tests.datapath.peers import BY_MOVERS, SENT, Bytes, Case


class Way(NamedTuple):
    """One data path, the number of random pairs of engines to try, and the environment of their processes."""

    case: Case
    examples: int
    environment: Mapping[str, str] = {}


WAYS = {
    name: Way(case, examples, environment)
    for name, path, examples, environment in [
        ("loopback", "loopback", 400, {}),
        ("shm", "shm", 40, {}),
        ("cma", "cma", 40, {}),
        ("nixl", "nixl", 25, {}),
        ("nixl-tcp", "nixl", 25, TCP),
        ("collective", "collective", 40, {}),
    ]
    for case in [*BY_MOVERS, SENT]
    if case.name == path
}


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def both(way: Way) -> Iterator[tuple[Asked, Asked]]:
    with engines(way.case, way.environment) as made:
        yield made


def planned(made: Move, run_bytes_min: int, most: int) -> list[PairRuns]:
    """Plans all runs, in postings of at most `most` bytes or one block."""
    bridge, size = made.bridge(run_bytes_min), Size(most, 1 << 10, 1 << 10)
    parts = slices_of([made.chunk], bridge, size)
    return [row for batch in batches(parts, bridge, size) for row in bridge.plan(batch)]


def posts_of(rows: Sequence[PairRuns], *, written: bool) -> tuple[list[Post], list[Post]]:
    """Returns the postings of the source, if it may write, and those of the destination."""
    source, destination = [], []
    for i, row in enumerate(rows):
        read = Post(row.pair.rank, str(i), PEER, row.runs, "t", peer_rank=row.pair.source_rank, repack=row.repack)
        if written and row.repack is None:
            source.append(replace(read, rank=row.pair.source_rank, peer_rank=row.pair.rank, operation=Operation.WRITE))
        else:
            destination.append(read)
    return source, destination


def look(kv: SplitKV, memories: Sequence[Bytes]) -> None:
    """Takes over the memories of an engine's ranks; asserts that nothing was written behind them."""
    for rank, memory in enumerate(memories):
        used = len(kv.memories[rank])
        kv.memories[rank] = memory[:used]
        assert (memory[used:] == CANARY).all()


def test_every_byte_arrives_where_it_belongs_and_no_other_changes(way: Way, both: tuple[Asked, Asked]) -> None:
    source, destination = both
    posted = {Operation.READ: 0, Operation.WRITE: 0}

    @settings(max_examples=way.examples)
    @given(moves(), st.sampled_from([1, 1, 64, 1024]), st.sampled_from([600, NBYTES]), st.booleans())
    def moved(made: Move, run_bytes_min: int, most: int, written: bool) -> None:
        made.fill()
        rows = planned(made, run_bytes_min, most)
        writes, reads = posts_of(rows, written=written and way.case.writes)
        given = [memory.copy() for memory in made.source.memories]
        here = source.ask("begin", made.source.memories)
        there = destination.ask("begin", made.destination.memories)
        nbytes = source.ask("move", there, writes) + destination.ask("move", here, reads)
        assert nbytes == sum(row.total_bytes for row in rows)
        look(made.source, source.ask("end"))
        look(made.destination, destination.ask("end"))
        made.check()
        assert all(map(np.array_equal, made.source.memories, given))
        posted[Operation.READ] += len(reads)
        posted[Operation.WRITE] += len(writes)

    moved()
    assert posted[Operation.READ]
    assert bool(posted[Operation.WRITE]) is way.case.writes
