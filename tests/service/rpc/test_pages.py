"""Pages of a list: a row that stays is seen once, and a token is valid for its own list and life only."""

import base64
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvgrpc.config import Config, PoolConfig
from kvgrpc.core.events import LifeBegan
from kvgrpc.errors import Aborted, InvalidRequest, Reason
from kvgrpc.server import Server
from kvgrpc.service.lead import Lead
from kvgrpc.service.rpc.pages import PAGE_BYTES_MAX, Page, page
from kvgrpc.v1.admin_pb2 import ListPinsRequest, Pin
from kvgrpc.v1.transfer_pb2 import ListTransfersRequest
from tests.service.values import dur, seconds

CONFIG = Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1))

Row = tuple[float, str]
ROWS = st.frozensets(
    st.tuples(st.sampled_from([-2.5, -1.0, 0.0, 0.1, 7.0]), st.sampled_from(["a", "b 1", "b 2", "\N{SNOWMAN}", ""])),
    max_size=12,
)


@pytest.fixture
async def lead() -> AsyncIterator[Lead]:
    server = Server(CONFIG)
    await server.start()
    yield server._lead
    await server.stop()


def made(row: Row) -> Pin:
    """Returns a row as a message."""
    return Pin(owner=row[1], age=dur(row[0]))


def listed(
    lead: Lead, rows: Any, size: int, token: str = "", make: Callable[[Row], Pin] = made, *, ordered: bool = False
) -> Page[Pin]:
    request = ListTransfersRequest(page_size=size, page_token=token)
    return page(lead, request, rows, lambda row: row, make, ordered=ordered)


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_row_that_is_there_all_the_while_is_seen_once_whatever_comes_and_goes(
    lead: Lead, ordered: bool
) -> None:
    @given(st.lists(ROWS, min_size=1, max_size=30), ROWS, st.integers(1, 4))
    def check(moments: list[frozenset[Row]], lasting: frozenset[Row], size: int) -> None:
        seen: list[Row] = []
        token, moment = "", 0
        while token or not moment:
            there: Any = moments[min(moment, len(moments) - 1)] | lasting
            if ordered:  # by time alone
                there = sorted(there, key=lambda row: row[0])
            found = listed(lead, there, size, token, ordered=ordered)
            seen += [(seconds(pin.age), pin.owner) for pin in found.rows]
            token, moment = found.next_page_token, moment + 1
        assert sorted(set(seen)) == seen
        assert lasting <= set(seen)

    check()


async def test_every_page_has_the_event_number_of_the_first(lead: Lead) -> None:
    rows = [(0.0, name) for name in "abc"]
    first = listed(lead, rows, 1)
    lead.runner.node.state.transfers.seq += 5
    second = listed(lead, rows, 1, first.next_page_token)
    third = listed(lead, rows, 1, second.next_page_token)
    assert first.header == second.header == third.header
    assert listed(lead, rows, 1).header.event_seq == first.header.event_seq + 5


async def test_a_page_of_a_table_in_order_looks_at_no_row_behind_its_own_and_those_of_the_same_time(lead: Lead) -> None:
    rows = [(float(number // 3), f"{number % 3}") for number in range(999)]
    looked: list[Row] = []

    def looking() -> Iterator[Row]:
        for row in rows:
            looked.append(row)
            yield row

    first = listed(lead, looking(), 10, ordered=True)
    assert [(seconds(pin.age), pin.owner) for pin in first.rows] == rows[:10]
    assert looked == rows[:13]  # one more for the token, the others of its time, and the one that ends them
    looked.clear()
    listed(lead, looking(), 10, first.next_page_token, ordered=True)
    assert len(looked) == 22


async def test_a_page_of_long_rows_ends_before_it_is_too_long_a_message(lead: Lead) -> None:
    def long(row: Row) -> Pin:
        return Pin(owner=row[1], missing_proof="x" * (PAGE_BYTES_MAX // 4))

    rows = [(float(i), str(i)) for i in range(10)]
    seen: list[str] = []
    token, pages = "", 0
    while token or not pages:
        found = listed(lead, rows, 0, token, long)
        assert sum(pin.ByteSize() for pin in found.rows) < 2 * PAGE_BYTES_MAX
        seen += [pin.owner for pin in found.rows]
        token, pages = found.next_page_token, pages + 1
    assert seen == [name for _, name in rows]
    assert pages == 3


async def test_a_row_that_is_too_long_for_a_page_has_one_of_its_own(lead: Lead) -> None:
    found = listed(lead, [(0.0, "a"), (1.0, "b")], 0, "", lambda row: Pin(owner=row[1] * 2 * PAGE_BYTES_MAX))
    assert len(found.rows) == 1
    assert found.next_page_token


async def test_a_token_of_another_list_is_refused(lead: Lead) -> None:
    token = listed(lead, [(0.0, "a"), (1.0, "b")], 1).next_page_token
    with pytest.raises(InvalidRequest) as caught:
        page(lead, ListPinsRequest(page_token=token), [(0.0, "a")], lambda row: row, made)
    assert [violation.field for violation in caught.value.violations] == ["page_token"]


async def test_a_token_of_an_earlier_life_says_to_start_over(lead: Lead) -> None:
    token = listed(lead, [(0.0, "a"), (1.0, "b")], 1).next_page_token
    lead.runner.feed(LifeBegan(lead.runner.node.state.life.incarnation + 1, b"", None))
    with pytest.raises(Aborted) as caught:
        listed(lead, [(0.0, "a")], 1, token)
    assert caught.value.reason is Reason.INCARNATION_CHANGED


async def test_a_token_that_was_made_up_is_refused(lead: Lead, subtests: pytest.Subtests) -> None:
    made_up = ["x", "-1", "1e3", "999999999999999999999", "\N{SUPERSCRIPT TWO}", " ", "0\n"]
    for at, seq in itertools.product(["nan", "inf", "1", "0x1p0", "0x1p9999999", "x"], ["0", "-1", "99", "x"]):
        parts = ("ListTransfersRequest", str(lead.runner.node.state.life.incarnation), seq, at, "a")
        made_up.append(base64.urlsafe_b64encode(" ".join(parts).encode()).decode())
    for token in made_up:
        with subtests.test(token), pytest.raises(InvalidRequest):
            listed(lead, [(0.0, "a")], 1, token)
