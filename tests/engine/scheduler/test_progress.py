"""Engines hand over to each other, all at once and with too few blocks, and every request gets its answer."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from kvgrpc.engine import BlocksReturned, Event, Failed, HandOver, Pull, Received, content
from kvgrpc.errors import NextStep, Reason
from tests.engine.made import layout, made_bytes
from tests.engine.support import Lead, Side, new_key, tokens
from tests.service.engines import wait_until

SETTINGS = """
[limits]
lease_ttl_s = 300.0
firm_ttl_s = 0.2
"""
BLOCKS = 12
NEEDED = 3
"""Blocks of a request. Four requests fill a pool."""
PROMPT = 40
REQUESTS = 6
"""Number of requests of each engine."""
WITHIN_S = 60.0
"""Time limit, in seconds. All answers take about one second; the lease of a stuck request lasts 300 s or longer."""


@dataclass(eq=False)
class Request:
    """A request that is prefilled at one engine and answered by the next one."""

    number: int
    source: "Scheduler"
    destination: "Scheduler"
    began_us: int = 0
    took: Pull | None = None
    """The pull from its source, if one is in flight."""
    blocks: list[int] = field(default_factory=list)
    """Its blocks at the destination."""
    answered: bool = False
    computed: bool = False
    """True if the destination computed the KV itself."""

    @property
    def name(self) -> str:
        return f"request {self.number}"

    @property
    def prompt(self) -> list[int]:
        return tokens(PROMPT, self.number)


class Scheduler:
    """An engine that serves its queue in order of arrival, and knows the oldest request in it."""

    def __init__(self, side: Side, *, orders: bool = True) -> None:
        """Makes a scheduler of an engine. With `orders`, its reclaims give the time of its oldest request."""
        self.side = side
        self.free = list(range(BLOCKS))
        self.queue: list[Request] = []
        self._orders = orders
        self._lent: dict[HandOver | Pull, list[int]] = {}
        self._taking: dict[Pull, Request] = {}

    def begin(self, request: Request) -> None:
        request.began_us = time.time_ns() // 1000
        self.queue.append(request)

    def step(self) -> None:
        for event in self.side.engine.poll(0.005):
            self._hear(event)
        while self.queue and len(self.free) >= NEEDED:
            request = self.queue.pop(0)
            blocks = [self.free.pop() for _ in range(NEEDED)]
            if self is request.source:
                self._prefill(request, blocks)
            else:
                self._decode(request, blocks)
        if self.queue:
            oldest = min(self.queue, key=lambda waiting: waiting.began_us)
            began_us = oldest.began_us if self._orders else 0
            self.side.engine.reclaim(NEEDED - len(self.free), request_time_us=began_us, request_id=oldest.name)

    def _prefill(self, request: Request, blocks: list[int]) -> None:
        self.side.fill(blocks, request.number)
        named, began_us = content(request.prompt), request.began_us
        made = self.side.engine.finished_blocks(
            blocks, named, transfer_key=new_key(), request_id=request.name, ttl_s=300.0, request_time_us=began_us
        )
        self._lent[made] = blocks
        self.side.engine.flush()
        request.destination.take(request, made.grant)

    def take(self, request: Request, grant: bytes) -> None:
        """Queues a prefilled request. It gets its blocks in its turn."""
        request.took = self.side.engine.pull(grant, content(request.prompt), request_id=request.name)
        self._taking[request.took] = request
        self.queue.append(request)

    def _decode(self, request: Request, blocks: list[int]) -> None:
        request.blocks = blocks
        if request.took is None:
            self._compute(request)
        else:
            request.took.start(blocks)

    def _compute(self, request: Request) -> None:
        self.side.fill(request.blocks, request.number)
        request.computed = True
        self._answer(request)

    def _answer(self, request: Request) -> None:
        assert (self.side.read(request.blocks) == made_bytes(request.blocks, request.number)).all()
        self.free += request.blocks
        request.answered = True

    def _hear(self, event: Event) -> None:
        match event:
            case BlocksReturned(transfer) if transfer in self._lent:
                self.free += self._lent.pop(transfer)
            case Received(transfer):
                assert isinstance(transfer, Pull)
                self._answer(self._taking.pop(transfer))
            case Failed(transfer) if transfer in self._taking:
                assert (event.reason, event.next) == (Reason.LEASE_RECLAIMED, NextStep.RECOMPUTE)
            case BlocksReturned(transfer) if transfer in self._taking:
                request = self._taking.pop(transfer)
                request.took = None
                if request.blocks:
                    self._compute(request)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Lead]]:
    folder = tmp_path_factory.mktemp("ring")
    with ExitStack() as stack:
        leads = [Lead(folder, name, settings=SETTINGS) for name in "ABC"]
        for lead in leads:
            stack.callback(lead.close)
        yield [lead.wait_ready() for lead in leads]


def play(
    leads: list[Lead], within_s: float, *, orders: bool = True, then: Callable[[list[Scheduler]], object] = len
) -> list[Request]:
    """Plays all requests at once, from each engine to the next one. `then` inspects the end state."""
    with ExitStack() as stack:
        engines = []
        for lead in leads:
            side = Side(lead, pool=layout(BLOCKS))
            stack.callback(side.close)
            engines.append(Scheduler(side, orders=orders))
        count = len(engines)
        requests = [
            Request(number, engines[number % count], engines[(number + 1) % count])
            for number in range(count * REQUESTS)
        ]
        for request in requests:
            request.source.begin(request)
        deadline = time.monotonic() + within_s
        while not all(request.answered for request in requests) and time.monotonic() < deadline:
            for engine in engines:
                engine.step()
        then(engines)
        return requests


@pytest.mark.parametrize("count", [2, 3])
def test_engines_that_wait_for_each_other_answer_all_requests(ring: list[Lead], count: int) -> None:
    requests = play(ring[:count], WITHIN_S)
    assert [request.name for request in requests if not request.answered] == []
    assert any(request.computed for request in requests)
    assert not all(request.computed for request in requests)


def test_engines_that_do_not_say_for_whom_they_need_blocks_wait_for_each_other(ring: list[Lead]) -> None:
    def look(engines: list[Scheduler]) -> None:
        first, second = engines
        wait_until(lambda: first.side.lead.status().waiting_reader_count == BLOCKS // NEEDED)
        first.side.engine.reclaim(NEEDED, request_time_us=time.time_ns() // 1000, request_id="the youngest")
        status = first.side.lead.status()
        (lacking,) = status.lacking_requests
        assert (lacking.request_id, lacking.group_block_counts[0].block_count) == ("the youngest", NEEDED)
        waiting = status.waiting_readers
        assert len(waiting) == status.waiting_reader_count == BLOCKS // NEEDED
        assert {(row.engine_id, row.block_count) for row in waiting} == {(second.side.engine.engine_id, NEEDED)}
        assert {row.request_id for row in waiting} <= {request.name for request in second.queue}

    requests = play(ring[:2], 2.0, orders=False, then=look)
    assert not any(request.answered for request in requests)
    assert any(request.took is not None for request in requests)
