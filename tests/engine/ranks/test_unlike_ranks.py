"""Engines whose ranks, heads, blocks and orders differ exchange KV over real data paths, between processes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest

from kvgrpc.core.values.bridge import Bridge
from kvgrpc.engine import Engine, content
from kvgrpc.v1 import transfer_pb2
from tests.core.split_kv import SplitKV, made_split
from tests.engine.conftest import Leads
from tests.engine.support import Asked, Lead, Side, Workers, new_key, received, tokens

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two to two": ({"ranks": 2}, {"ranks": 2}),
    "one to two": ({"ranks": 1}, {"ranks": 2}),
    "two to one": ({"ranks": 2}, {"ranks": 1}),
    "two to four": ({"ranks": 2}, {"ranks": 4}),
    "two to three": ({"ranks": 2, "total": 6}, {"ranks": 3, "total": 6}),
    "fewer heads than ranks": ({"ranks": 4, "total": 2}, {"ranks": 1, "total": 2}),
    "latents": ({"ranks": 2, "latent": True}, {"ranks": 1, "latent": True}),
    "smaller blocks": ({"tokens": 32}, {"tokens": 16}),
    "larger blocks, fewer ranks": ({"ranks": 2, "tokens": 16}, {"tokens": 48}),
    "another order": ({}, {"order": "token_major"}),
    "two stages": ({"stages": 2}, {"stages": 2}),
    "two stages to one": ({"stages": 2}, {}),
    "one stage to two": ({}, {"stages": 2}),
    "stages to shares of heads": ({"stages": 2}, {"ranks": 2}),
    "shares of heads to stages of them": ({"ranks": 2}, {"stages": 2, "ranks": 2, "tokens": 32}),
    "keys and values apart": ({"apart": True}, {"ranks": 2}),
    "keys and values together": ({"ranks": 2}, {"apart": True, "tokens": 32}),
    "all of it": ({"tokens": 32}, {"ranks": 2, "order": "token_major"}),
}
ALL = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
LONG_AND_SHORT = pytest.mark.parametrize("dim", [16, 256], ids=["short runs", "long runs"])
PROMPT = tokens(90)


class SharedSide(Side):
    """An engine whose lead has the memory of all ranks and moves the bytes."""

    def __init__(self, lead: Lead, split: dict[str, Any]) -> None:
        self.kv = made_split(**split)
        super().__init__(lead, pool=self.kv.side.pool, world_size=self.kv.side.ranks)
        for rank, mine in enumerate(self.ranks):
            self.kv.memories[rank] = mine.memory
        self.kv.clear()

    def fill_kv(self, blocks: Sequence[int]) -> None:
        self.kv.fill(blocks)

    def check_kv(self, blocks: Sequence[int], begin: int, end: int) -> None:
        self.kv.check(blocks, range(begin, end), begin)


class WorkersSide(SharedSide):
    """An engine whose workers have memory of their own and move the bytes."""

    def __init__(self, lead: Lead, split: dict[str, Any], workers: Sequence[Asked], data_path: str) -> None:
        self.lead, self.kv, self.ranks = lead, made_split(**split), []
        ranks = self.kv.side.ranks
        self.engine = Engine.attach(lead.socket_path, pool=self.kv.side.pool, private_memory=True, world_size=ranks)
        self.workers = workers[:ranks]
        ticket = self.engine.ticket
        for rank, worker in enumerate(self.workers):
            row = asdict(ticket) | {"secret": ticket.secret.hex()}
            worker.send(op="attach", ticket=row, rank=rank, data_paths=[data_path], split=split)
        assert [worker.answer() for worker in self.workers] == ["attached"] * ranks

    def fill_kv(self, blocks: Sequence[int]) -> None:
        for worker in self.workers:
            assert worker.ask(op="fill", blocks=blocks, begin=0) == "filled"

    def check_kv(self, blocks: Sequence[int], begin: int, end: int) -> None:
        for worker in self.workers:
            assert not worker.ask(op="check", blocks=blocks, begin=begin, tokens=[begin, end])

    def close(self) -> None:
        self.engine.close()
        for worker in self.workers:
            assert worker.ask(op="detach") == "detached"


Both = tuple[SharedSide, SharedSide]


@pytest.fixture(scope="module")
def split_workers() -> Iterator[list[Asked]]:
    made = Workers("tests.engine.split_workers")
    yield [made.make() for _ in range(8)]
    made.close()


@pytest.fixture
def shared(leads: Leads, kinds: Any, dim: int) -> Iterator[Both]:
    with ExitStack() as stack:
        sides = [SharedSide(lead, split | {"dim": dim}) for lead, split in zip(leads, kinds, strict=True)]
        for side in sides:
            stack.callback(side.close)
        yield sides[0], sides[1]


@pytest.fixture(params=["cma", "nixl"])
def private(leads: Leads, kinds: Any, split_workers: list[Asked], request: pytest.FixtureRequest) -> Iterator[Both]:
    halves = split_workers[:4], split_workers[4:]
    with ExitStack() as stack:
        sides = []
        for lead, split, workers in zip(leads, kinds, halves, strict=True):
            sides.append(WorkersSide(lead, split, workers, request.param))
            stack.callback(sides[-1].close)
        yield sides[0], sides[1]


def blocks_of(kv: SplitKV, count: int, have: int = 0) -> list[int]:
    """Returns scattered blocks for the tokens that are missing."""
    each = kv.group.block_tokens
    return [(7 * i + 5) % kv.group.blocks for i in range(-(-count // each) - have // each)]


def pulled(both: Both, have: int = 0) -> transfer_pb2.Transfer:
    """Pulls, and checks every byte of every rank of the destination. Returns the destination's transfer."""
    source, destination = both
    given, taken = blocks_of(source.kv, len(PROMPT)), blocks_of(destination.kv, len(PROMPT), have)
    source.fill_kv(given)
    handover = source.hand_over(given, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(taken, have_tokens=have)
    received(destination.finish(pull))
    source.finish(handover)
    each = destination.kv.group.block_tokens
    begin = have // each * each
    end = min(len(given) * source.kv.group.block_tokens, begin + len(taken) * each)
    destination.check_kv(taken, begin, end)
    return destination.lead.transfer(pull.transfer_id)


@LONG_AND_SHORT
@ALL
def test_a_pull_over_shared_memory_brings_each_rank_its_heads(shared: Both) -> None:
    moved = pulled(shared)
    pairs = Bridge(shared[0].kv.side, shared[1].kv.side).pairs
    assert [(path.rank, path.peer_rank) for path in moved.paths] == list(map(tuple, pairs))
    assert sum(path.moved_bytes for path in moved.paths) == moved.moved_bytes


@pytest.mark.parametrize("dim", [16])
@ALL
def test_only_what_the_destination_does_not_have_is_moved(shared: Both) -> None:
    pulled(shared, have=48)


@ALL
def test_a_pull_between_workers_brings_each_rank_its_heads(private: Both) -> None:
    pulled(private)


@pytest.mark.parametrize("dim", [16, 256])
@pytest.mark.parametrize("kinds", [KINDS["one to two"], KINDS["all of it"]], ids=["one to two", "all of it"])
def test_a_push_in_parts_brings_each_rank_its_heads(shared: Both) -> None:
    source, destination = shared
    given, taken = blocks_of(source.kv, len(PROMPT)), blocks_of(destination.kv, len(PROMPT))
    source.fill_kv(given)
    key = new_key()
    reservation = destination.engine.reserve(taken, content(PROMPT), transfer_key=key)
    destination.poll_until(lambda _: bool(reservation.grant))
    push = source.engine.push(content(PROMPT), transfer_key=key)
    push.register(reservation.grant)
    half = len(given) // 2
    push.finished(given[:half])
    push.finished(given[half:], last=True)
    source.engine.flush()
    received(destination.poll_until(lambda _: reservation.over))
    each = destination.kv.group.block_tokens
    end = min(len(given) * source.kv.group.block_tokens, len(taken) * each)
    destination.check_kv(taken, 0, end)
