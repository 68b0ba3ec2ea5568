"""The ledger of kept rows: shares of callers, sums, and refusals."""

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.tables.ledger import Ledger, LedgerShare, RowKind, share_of
from kvgrpc.core.values.call import Call
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.owners import ENGINE, PEER
from kvgrpc.errors import Exhausted, Reason
from tests.core.nodes import refused

SMALL = Limits(kept_bytes=100, kept_bytes_per_caller=40, engine_kept_bytes=70, remembered_bytes=3_200)


def filled(**callers: int) -> Ledger:
    ledger = Ledger(SMALL)
    for number, (payer, nbytes) in enumerate(callers.items()):
        ledger.enter(RowKind.LEASE, number, payer, nbytes)
    return ledger


def test_who_is_in_which_share() -> None:
    assert [share_of(payer) for payer in (ENGINE, f"{PEER}d@1", "x")] == [
        LedgerShare.ENGINE,
        LedgerShare.PEERS,
        LedgerShare.CALLERS,
    ]


@pytest.mark.parametrize(
    ("call", "payer"),
    [
        (Call(1, ENGINE), ENGINE),
        (Call(1, "anonymous", connection="ipv4:1"), "ipv4:1"),
        (Call(1, "anonymous"), "anonymous"),
        (Call(1, "router-7", connection="ipv4:1"), "router-7"),
        (Call(1, "anonymous", on_behalf_of="ipv4:2"), "ipv4:2"),
    ],
)
def test_a_call_is_paid_for_by_its_principal_or_where_that_is_anybody_by_its_connection(call: Call, payer: str) -> None:
    assert call.payer == payer


def test_one_caller_has_no_more_than_a_part() -> None:
    ledger = filled(a=30)
    with pytest.raises(Exhausted) as caught:
        ledger.check("a", 11)
    error = caught.value
    assert error.reason is Reason.LIMIT_EXCEEDED
    assert error.retry_delay_s == 1.0
    assert error.metadata == {"limit": "40", "kept_bytes": "30"}
    assert "this caller" in error.message
    ledger.check("a", 10)
    ledger.check("b", 40)


def test_all_callers_have_no_more_than_all_of_it() -> None:
    ledger = filled(a=40, b=40)
    with pytest.raises(Exhausted, match="all callers"):
        ledger.check("c", 21)
    ledger.check("c", 20)


def test_what_strangers_fill_leaves_the_shares_of_peers_and_of_the_engine() -> None:
    ledger = filled(a=40, b=40, c=20)
    ledger.check(ENGINE, 70)
    ledger.check(f"{PEER}d@1", 40)
    with pytest.raises(Exhausted, match="this peer"):
        ledger.check(f"{PEER}d@1", 41)
    with pytest.raises(Exhausted, match="the attached engine"):
        ledger.check(ENGINE, 71)


def test_a_row_that_is_dropped_makes_room() -> None:
    ledger = filled(a=40)
    ledger.drop(RowKind.LEASE, 0)
    ledger.drop(RowKind.LEASE, 0)
    assert (ledger.total, ledger.by_payer, ledger.by_share[LedgerShare.CALLERS]) == (0, {}, 0)
    ledger.check("a", 40)


def test_the_largest_callers_come_first() -> None:
    ledger = filled(a=10, b=30, c=20)
    assert list(ledger.largest(2)) == [("b", 30), ("c", 20)]


Step = tuple[str, RowKind, int, str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "weigh", "drop"]), st.sampled_from([RowKind.LEASE, RowKind.KEY]), st.integers(0, 3),
        st.sampled_from(["a", ENGINE, f"{PEER}d@1"]), st.integers(0, 50),
    )
)  # fmt: skip


@given(STEPS)
def test_sums_are_those_of_the_rows(steps: list[Step]) -> None:
    ledger, rows = Ledger(), dict[tuple[RowKind, int], int]()
    for what, kind, name, payer, nbytes in steps:
        if what == "keep":
            ledger.keep(kind, name, payer, nbytes)
            rows[kind, name] = nbytes
        elif what == "drop":
            ledger.drop(kind, name)
            rows.pop((kind, name), None)
        elif (kind, name) in rows:
            ledger.weigh(kind, name, nbytes)
            rows[kind, name] = nbytes
        ledger.check_sums()
        assert ledger.total == sum(rows.values())
        assert ledger.nbytes(kind, name) == rows.get((kind, name), 0)


def test_rows_about_ended_things_are_in_no_share() -> None:
    ledger = filled(a=10)
    ledger.remember(RowKind.TOMBSTONE, 500)
    assert (ledger.total, ledger.by_share[LedgerShare.CALLERS]) == (510, 10)
    ledger.remember(RowKind.TOMBSTONE, -500)
    assert ledger.total == 10
    ledger.check_sums()


def test_a_refusal_says_when_to_come_back() -> None:
    ledger = filled(a=40)
    with refused(Reason.LIMIT_EXCEEDED, Exhausted):
        ledger.enter(RowKind.LEASE, "another", "a", 1)
    assert ledger.rows(RowKind.LEASE) == {0: 40}
