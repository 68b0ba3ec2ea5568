"""Transfers: which state and which disposition may follow which, the log of changes, and the bounded history."""

from dataclasses import replace
from hashlib import sha256
from itertools import islice

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.tables.transfers import (
    DISPOSITIONS,
    ENDED,
    STATES,
    Direction,
    Disposition,
    Phase,
    State,
    Transfer,
    pair_id,
)
from kvgrpc.core.values.ids import mint_id
from kvgrpc.errors import NextStep, NotFound
from tests.core.counted import steps
from tests.core.nodes import check_table, snapshot


def make(table: TransferTable, now: float = 0.0, key: bytes = b"k") -> Transfer:
    return table.create(now, direction=Direction.SEND, key=key, owner="engine")


def end(table: TransferTable, transfer: Transfer, state: State) -> None:
    table.change(transfer.id, state=state, memory=Disposition.RETURNED)


def test_states_follow_their_table() -> None:
    def move(before: State, after: State) -> State:
        table = TransferTable(1, 10)
        transfer = make(table)
        if before is not State.PENDING:
            table.change(transfer.id, state=before)
        known = snapshot(table)
        try:
            return table.change(transfer.id, state=after).state
        except AssertionError:
            assert snapshot(table) == known
            raise

    check_table(STATES, move)


def test_dispositions_follow_their_table() -> None:
    def move(before: Disposition, after: Disposition) -> Disposition:
        table = TransferTable(1, 10)
        transfer = make(table)
        if before is not Disposition.HELD:
            table.change(transfer.id, memory=before)
        return table.change(transfer.id, memory=after).memory

    check_table(DISPOSITIONS, move)


def test_an_end_is_for_ever() -> None:
    assert all(not STATES[state] for state in ENDED)
    assert not DISPOSITIONS[Disposition.RETURNED]


def test_over_and_settled_are_two_answers() -> None:
    table = TransferTable(1, 10)
    transfer = make(table)
    assert not transfer.over
    transfer = table.change(transfer.id, state=State.FAILED, memory=Disposition.QUARANTINED)
    assert transfer.over
    assert not transfer.settled
    assert table.change(transfer.id, memory=Disposition.RETURNED).settled


def test_the_newest_transfers_cost_their_number_not_the_history() -> None:
    def first_ten(ended: int) -> int:
        table = TransferTable(1, 4_096)
        for number in range(ended):
            made = make(table, float(number))
            end(table, made, State.FAILED if number % 2 else State.SUCCEEDED)
            assert table.archive(made.id)
        found: list[Transfer] = []
        taken = steps(lambda: found.extend(islice(table, 10)))
        assert [transfer.created for transfer in found] == [float(ended - number) for number in range(1, 11)]
        return taken

    assert first_ten(4_096) == first_ten(16)


def test_ids_contain_the_incarnation_and_numbers_grow_with_every_change() -> None:
    table = TransferTable(0xAB, 10)
    first, second = make(table), make(table)
    assert first.id != second.id
    assert "00000000000000ab" in first.id
    changed = table.change(first.id, waiting_for="x")
    assert [first.seq, second.seq, changed.seq, table.seq] == [1, 2, 3, 3]


def test_a_new_transfer_holds_nothing_but_what_was_stated() -> None:
    made = TransferTable(0xAB, 10).create(5.0, direction=Direction.RECEIVE, key=b"k", owner="engine", request_id="r")
    stated = Transfer(made.id, Direction.RECEIVE, 5.0, b"k", "engine", request_id="r", seq=1)
    assert made == replace(stated, pair_id=pair_id(b"k"))
    numbers = (made.peer_incarnation, made.use_tokens, made.blocks, made.nbytes, made.nbytes_done, made.priority)
    assert set(numbers) == {0}
    assert (made.consumers, made.consumers_done, made.failure, made.ended) == (0, 0, None, None)


def test_both_sides_know_their_transfers_of_a_key_by_one_digest_of_it() -> None:
    key = b"key of a request"
    first, second = (make(TransferTable(life, 10), key=key) for life in (1, 2))
    digest = sha256(b"kvgrpc pair" + key).hexdigest()
    assert first.pair_id == second.pair_id == digest[:32]
    assert make(TransferTable(1, 10), key=b"another key here").pair_id != digest[:32]


def test_nothing_is_remembered_of_a_key_whose_transfers_are_in_the_history() -> None:
    table = TransferTable(1, 10)
    for _ in range(2):
        transfer = make(table)
        end(table, transfer, State.SUCCEEDED)
        table.archive(transfer.id)
    assert table._by_key == {}


def test_transfers_of_a_key_come_oldest_first() -> None:
    table = TransferTable(1, 100)
    made = [make(table).id for _ in range(12)]
    make(table, key=b"other")
    assert [t.id for t in table.with_key(b"k")] == made
    end(table, table.get(made[3]), State.SUCCEEDED)
    assert table.archive(made[3])
    assert [t.id for t in table.with_key(b"k")] == made[:3] + made[4:]
    assert table.with_key(b"none") == []


def test_only_a_settled_transfer_moves_to_the_history_and_may_be_asked_to_again() -> None:
    table = TransferTable(1, 10)
    transfer = make(table)
    assert not table.archive(transfer.id)
    assert not table.archive("unknown")
    end(table, transfer, State.SUCCEEDED)
    assert table.live == 1
    assert table.archive(transfer.id)
    assert table.live == 0
    assert table.archive(transfer.id), "it is there already"
    assert table.live == 0
    assert table.get(transfer.id).state is State.SUCCEEDED
    assert table.with_key(b"k") == []


def test_an_unknown_transfer_reads_as_quarantined() -> None:
    with pytest.raises(NotFound, match=r"TRANSFER_NOT_FOUND.*quarantined") as caught:
        TransferTable(1, 10).get(mint_id(b"of another life", 2, "transfer", "lead", 1))
    assert caught.value.next is None


def test_what_no_engine_gives_out_as_an_id_is_a_wrong_request_and_no_quarantine() -> None:
    lease = mint_id(b"s", 1, "lease", "lead", 1)
    for name in ("t", "", "nope", lease, lease.replace("l-", "t-", 1)[:-1]):
        with pytest.raises(NotFound, match="TRANSFER_NOT_FOUND") as caught:
            TransferTable(1, 10).get(name)
        assert "quarantined" not in str(caught.value)
        assert caught.value.next is NextStep.FIX_REQUEST


def test_failures_stay_longest_in_the_history_and_the_newest_always() -> None:
    table = TransferTable(1, 3)
    made = []
    for state in (State.FAILED, State.SUCCEEDED, State.FAILED, State.CANCELLED):
        transfer = make(table)
        end(table, transfer, state)
        table.archive(transfer.id)
        made.append(transfer.id)
    assert [table.find(id_) is not None for id_ in made] == [True, False, True, True]
    for state in (State.FAILED, State.SUCCEEDED, State.FAILED, State.FAILED):
        transfer = make(table)
        end(table, transfer, state)
        table.archive(transfer.id)
        assert table.get(transfer.id).state is state
    kept = list(table)
    assert [t.state for t in kept] == [State.FAILED] * 3


def test_a_history_of_failures_keeps_the_newest_that_is_none() -> None:
    table = TransferTable(1, 2)
    for state in (State.FAILED, State.FAILED, State.SUCCEEDED):
        transfer = make(table)
        end(table, transfer, state)
        table.archive(transfer.id)
    assert sorted(t.state.value for t in table) == ["failed", "succeeded"]


def test_watches_resume_after_a_number_or_learn_that_they_cannot() -> None:
    table = TransferTable(1, 3)
    assert table.changes_after(0) == []
    transfer = make(table)
    for text in "abcd":
        table.change(transfer.id, waiting_for=text)
    changes = table.changes_after(3)
    assert changes is not None
    assert [change.waiting_for for change in changes] == ["c", "d"]
    assert table.changes_after(5) == []
    assert table.changes_after(99) == []
    assert table.changes_after(1) is None


def test_lists_are_newest_first_and_unfinished_oldest_first() -> None:
    table = TransferTable(1, 10)
    first, second, third = (make(table, now=float(i)) for i in range(3))
    end(table, second, State.FAILED)
    table.archive(second.id)
    assert [t.id for t in table] == [third.id, second.id, first.id]
    assert [t.id for t in table.unfinished()] == [first.id, third.id]


def test_counts_are_those_of_all_transfers_ever() -> None:
    table = TransferTable(1, 1)
    for _ in range(3):
        transfer = make(table)
        table.change(transfer.id, state=State.ACTIVE)
        end(table, transfer, State.SUCCEEDED)
        table.archive(transfer.id)
    make(table)
    assert (table.counts[State.SUCCEEDED], table.counts[State.PENDING], table.counts[State.ACTIVE]) == (3, 1, 0)


def test_a_phase_ends_when_the_next_begins() -> None:
    transfer = make(TransferTable(1, 1))
    assert transfer.phases_at(1.0) == ()
    one = transfer.phases_at(1.0, "open")
    assert one == (Phase("open", 1.0),)
    table = TransferTable(1, 1)
    made = make(table)
    made = table.change(made.id, phases=one)
    made = table.change(made.id, phases=made.phases_at(2.0, "wire"))
    assert made.phases == (Phase("open", 1.0, 2.0), Phase("wire", 2.0))
    made = table.change(made.id, phases=made.phases_at(3.0))
    assert made.phases_at(4.0) == (Phase("open", 1.0, 2.0), Phase("wire", 2.0, 3.0))


class Transfers(RuleBasedStateMachine):
    """Transfers are made, changed and archived at random, compared with plain lists."""

    HISTORY = 4

    def __init__(self) -> None:
        super().__init__()
        self.table = TransferTable(1, self.HISTORY)
        self.model: dict[str, tuple[State, Disposition]] = {}
        """All transfers ever, oldest first."""
        self.keys: dict[str, bytes] = {}
        self.archived: set[str] = set()
        self.history: list[str] = []
        """Archived transfers that are still known, in the order of archiving."""
        self.log: list[Transfer] = []

    @rule(key=st.sampled_from([b"a", b"b"]))
    def create(self, key: bytes) -> None:
        transfer = make(self.table, float(len(self.model)), key)
        assert transfer.id not in self.model
        self.model[transfer.id] = (State.PENDING, Disposition.HELD)
        self.keys[transfer.id] = key
        self.log.append(transfer)

    @rule(which=st.integers(0, 20), state=st.sampled_from(State), memory=st.sampled_from(Disposition))
    def change(self, which: int, state: State, memory: Disposition) -> None:
        live = [id_ for id_ in self.model if id_ not in self.archived]
        if not live:
            return
        id_ = live[which % len(live)]
        was_state, was_memory = self.model[id_]
        legal = (state is was_state or state in STATES[was_state]) and (
            memory is was_memory or memory in DISPOSITIONS[was_memory]
        )
        if legal:
            changed = self.table.change(id_, state=state, memory=memory)
            assert changed is self.table.get(id_)
            self.model[id_] = (state, memory)
            self.log.append(changed)
        else:
            with pytest.raises(AssertionError):
                self.table.change(id_, state=state, memory=memory)

    @rule(which=st.integers(0, 20), state=st.sampled_from(sorted(ENDED, key=lambda state: state.value)))
    def end_and_archive(self, which: int, state: State) -> None:
        unfinished = [id_ for id_, (was, _) in self.model.items() if was not in ENDED]
        if unfinished:
            id_ = unfinished[which % len(unfinished)]
            self.log.append(self.table.change(id_, state=state, memory=Disposition.RETURNED))
            self.model[id_] = (state, Disposition.RETURNED)
            self.keep(id_)

    @rule(which=st.integers(0, 20))
    def archive(self, which: int) -> None:
        if self.model:
            self.keep(list(self.model)[which % len(self.model)])

    def keep(self, id_: str) -> None:
        if id_ in self.archived:
            assert self.table.archive(id_) == (id_ in self.history)
            return
        state, memory = self.model[id_]
        settled = state in ENDED and memory is Disposition.RETURNED
        assert self.table.archive(id_) == settled
        if not settled:
            return
        self.archived.add(id_)
        if len(self.history) == self.HISTORY:
            no_failures = [other for other in self.history if self.model[other][0] is not State.FAILED]
            self.history.remove((no_failures or self.history)[0])
        self.history.append(id_)

    @invariant()
    def live_ones_and_history_are_known_and_nothing_else(self) -> None:
        live = [id_ for id_ in self.model if id_ not in self.archived]
        known = {id_: self.model[id_] for id_ in (*live, *self.history)}
        assert {t.id: (t.state, t.memory) for t in self.table} == known
        assert [t.id for t in self.table] == [id_ for id_ in reversed(self.model) if id_ in known]
        assert self.table.live == len(live)
        assert [t.id for t in self.table.unfinished()] == [id_ for id_ in live if self.model[id_][0] not in ENDED]
        for id_, (state, _) in self.model.items():
            found = self.table.find(id_)
            assert (found and found.state) == (state if id_ in known else None)
        for key in (b"a", b"b"):
            assert [t.id for t in self.table.with_key(key)] == [id_ for id_ in live if self.keys[id_] == key]

    @invariant()
    def counts_are_of_all_that_ever_were(self) -> None:
        for state in State:
            assert self.table.counts[state] == sum(s is state for s, _ in self.model.values())

    @invariant()
    def changes_are_numbered_and_the_latest_are_known(self) -> None:
        assert [change.seq for change in self.log] == list(range(1, self.table.seq + 1))
        forgotten = max(len(self.log) - self.HISTORY, 0)
        for seq in range(self.table.seq + 2):
            changes = self.table.changes_after(seq)
            assert changes == (None if seq < forgotten else self.log[seq:])


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(stateful_step_count=25)
