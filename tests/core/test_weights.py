"""The ledger's weights of rows match their memory within a factor of two."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvgrpc.core import events
from kvgrpc.core.tables.accesses import AccessOpening
from kvgrpc.core.tables.ledger import RowKind
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE
from tests.core.nodes import Lead, access_id, answer_of, claim, content, describe, full, grant, lists

ROWS = 200
D = describe("d", 2)
BLOCKS = 4_096


class Weighed(Lead):
    """A lead that keeps no answer but the last one, and is not checked."""

    checked = False

    def feed(self, event: events.Event, after_s: float = 0.0) -> Any:
        done = super().feed(event, after_s)
        self._answers = dict(list(self._answers.items())[-1:])
        return done


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def weighed(pool_kind: PoolKind = PoolKind.ENGINE_MANAGED) -> Weighed:
    lead = Weighed(describe("p", 1, pool=full(BLOCKS), pool_kind=pool_kind), Limits(transfer_history=1))
    lead.admit(D)
    return lead


def one_lease(lead: Weighed, number: int, tokens: int = 512, **fields: Any) -> Any:
    fields.setdefault("key", key(number))
    named: dict[str, Any] = (
        {"key": str(number), "method": "GrantLease", "body": b"x" * 32} if fields.pop("named", False) else {}
    )
    blocks = lists([(number * 64 + 2 * i) % BLOCKS for i in range(tokens // 16)])
    return lead.call(
        lambda c: events.FinishedBlocks(c, blocks=blocks, content=content(tokens), ttl_s=600.0, **fields), **named
    )


def ended(lead: Weighed, number: int) -> None:
    made = one_lease(lead, number, transfer=False)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(made.lease.id)))


def past(lead: Weighed, number: int) -> None:
    made = one_lease(lead, number)
    lead.call(lambda c: events.ReleaseLease(c, events.LeaseRef(made.lease.id)))


def opened(lead: Weighed, number: int) -> None:
    made = one_lease(lead, number, transfer=False)
    lead.open(D, AccessOpening(access_id(number + 1), made.token, claim(512), "t-1", "r-1"))


def waiting(lead: Weighed, number: int) -> None:
    lead.open(D, AccessOpening(access_id(number + 1), grant(lead.me, lease_id=f"l-{number}"), claim(32), "t-1", "r-1"))


def pulling(lead: Weighed, number: int) -> None:
    lead.pull(grant(D, lease_id=f"l-{number}"), 32, range(2 * number, 2 * number + 2), number=number + 1)


def reserving(lead: Weighed, number: int) -> None:
    blocks = lists(range(16 * number, 16 * number + 16))
    lead.call(lambda c: events.ReserveBlocks(c, key(number), blocks, content(256)))


def pushing(lead: Weighed, number: int) -> None:
    for part in range(8):
        blocks = lists(range(part * 4, part * 4 + 4))
        lead.call(
            lambda c, part=part, blocks=blocks: events.FinishedBlocks(  # type: ignore[misc]
                c, key(number), blocks, content(4_096) if part == 0 else None, last=False,
                waits_for=events.WaitsFor.REGISTRATION,
            )
        )  # fmt: skip


def allocating(lead: Weighed, number: int) -> None:
    del number
    lead.call(lambda c: events.AllocateBlocks(c, ((0, 16),)))


def cancelling(lead: Weighed, number: int) -> None:
    lead.call(lambda c: events.CancelTransfer(c, key=key(number), message="the client went away"))


def closing(lead: Weighed, number: int) -> None:
    pull = lead.pull(grant(D, lease_id=f"l-{number}"), number=number + 1)
    lead.feed(events.AccessAnswered(access_id(number + 1), answer_of(D)))
    lead.call(lambda c: events.CancelTransfer(c, pull.id))
    lead.feed(events.CloseAnswered(access_id(number + 1), answered=False))


MADE: dict[str, Callable[[Weighed, int], object]] = {
    "leases": lambda lead, number: one_lease(lead, number, transfer=False),
    "leases of many blocks": lambda lead, number: one_lease(lead, number % 1, 16_000, key=key(number), transfer=False),
    "leases with transfers": one_lease,
    "leases with keys": lambda lead, number: one_lease(lead, number, named=True),
    "ended leases": ended,
    "past transfers": past,
    "accesses": opened,
    "accesses that wait": waiting,
    "pulls": pulling,
    "reservations": reserving,
    "pushes": pushing,
    "cancelled keys": cancelling,
    "unanswered closes": closing,
}


def kept_and_weighed(lead: Weighed, make: Callable[[Weighed, int], object], rows: int) -> tuple[int, int]:
    """Makes `rows` rows, and returns the bytes by which the ledger and the process grew."""
    make(lead, 0)
    gc.collect()
    tracemalloc.start()
    try:
        entered, taken = lead.state.ledger.total, tracemalloc.get_traced_memory()[0]
        for number in range(1, rows + 1):
            make(lead, number)
        gc.collect()
        return lead.state.ledger.total - entered, tracemalloc.get_traced_memory()[0] - taken
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", MADE)
def test_the_ledger_has_what_rows_weigh(name: str) -> None:
    entered, taken = kept_and_weighed(weighed(), MADE[name], ROWS if name != "leases of many blocks" else 20)
    assert entered / 2 < taken < entered * 2, f"{entered:,} bytes in the ledger, {taken:,} in memory"


def test_the_ledger_has_what_allocations_weigh() -> None:
    entered, taken = kept_and_weighed(weighed(PoolKind.SERVER_MANAGED), allocating, 200)
    assert entered / 2 < taken < entered * 2, f"{entered:,} bytes in the ledger, {taken:,} in memory"


def test_a_lease_of_one_run_keeps_no_list_of_ids() -> None:
    lead = Weighed(describe("p", 1, pool=full(65_536)))
    lead.begin(lead.me, attached=False)
    blocks = lists(range(65_536))
    opaque = ContentId(65_536 * 16, opaque=b"x" * 32)

    def make(lead: Weighed, number: int) -> None:
        lead.call(
            lambda c: events.FinishedBlocks(c, key(number), blocks, opaque), "anonymous",
            connection="ipv4:1", key=str(number), method="FinishedBlocks",
        )  # fmt: skip

    entered, taken = kept_and_weighed(lead, make, 50)
    assert taken < entered * 2
    assert entered < 50 * 20_000


def test_two_hundred_thousand_leases_of_an_engine_fit() -> None:
    """Each lease is of a prompt of 4,000 tokens, in ten runs."""
    lead = weighed()
    blocks = lists([i // 25 * 50 + i % 25 for i in range(250)])
    lead.call(lambda c: events.FinishedBlocks(c, key(1), blocks, content(4_000)), ENGINE)
    ledger = lead.state.ledger
    kept = ledger.by_kind[RowKind.LEASE] + ledger.by_kind[RowKind.TRANSFER]
    assert kept * Limits().leases < Limits().engine_kept_bytes
