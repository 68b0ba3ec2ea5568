"""The simulator's checks of quarantine and of recycled memory."""

from dataclasses import replace

import numpy as np
import pytest

from kvgrpc.core.actions import AwaitEnd, UnmapPeer
from kvgrpc.core.events import Event, ProcessEnded
from kvgrpc.core.tables.transfers import Direction, Disposition, State, Transfer
from kvgrpc.core.values.block_ids import Blocks
from sim import Violated
from sim.checks.writers import WriterAudit
from sim.world.memory import KvStore, Memory, Prompt, layout
from sim.world.process_ends import Ends
from tests.sim.checks.waiting_pulls import HANDSHAKE, receive

ACCESS = b"a" * 16
LIFE = "D@0000000000000001"


# -- quarantine


QUARANTINED = receive((HANDSHAKE,), state=State.FAILED, memory=Disposition.QUARANTINED)
WRITES = frozenset({f"w-{ACCESS.hex()}"})


def written() -> WriterAudit:
    proven = WriterAudit()
    proven.granted(ACCESS, "t", LIFE)
    return proven


def test_blocks_that_a_peer_may_still_write_stay_in_quarantine() -> None:
    proven = written()
    proven.process_ended(ProcessEnded(0, LIFE, drained=True), 2)
    proven.process_ended(ProcessEnded(1, LIFE, drained=False), 2)
    proven.check([QUARANTINED], WRITES)


def test_blocks_whose_writers_are_known_to_be_gone_do_not_stay_in_quarantine() -> None:
    proven = written()
    proven.process_ended(ProcessEnded(0, LIFE, drained=True), 1)
    proven.check_heeded(frozenset())
    with pytest.raises(Violated, match="their writers are known to be gone"):
        proven.check_heeded(WRITES)
    with pytest.raises(Violated, match="their writers are known to be gone"):
        proven.check([QUARANTINED], WRITES)


@pytest.mark.parametrize("transfer", [QUARANTINED, replace(QUARANTINED, direction=Direction.SEND)])
def test_blocks_without_writers_do_not_stay_in_quarantine(transfer: Transfer) -> None:
    with pytest.raises(Violated, match="all its postings have ended"):
        WriterAudit().check([transfer], frozenset())


def nothing(_: str) -> bool:
    return False


def test_a_source_that_is_at_rest_says_so_where_it_can() -> None:
    proven = written()
    proven.granted(b"b" * 16, "u", "E@0000000000000001")
    proven.check_told(WRITES, lambda life, _: life != LIFE, nothing)
    proven.check_told(frozenset(), lambda _, __: True, nothing)
    with pytest.raises(Violated, match=f"{LIFE} does not say that it writes no more under w-{ACCESS.hex()}, of t"):
        proven.check_told(WRITES, lambda life, transfer_id: (life, transfer_id) == (LIFE, "t"), nothing)


def seen() -> tuple[Ends, list[Event]]:
    """Returns what the two ranks of an engine see of ended processes; only the first rank reaches a peer."""
    events: list[Event] = []
    return Ends(2, lambda rank, _: [0] if rank == 0 else [], events.append), events


@pytest.mark.parametrize("first", ["looks", "ends"])
def test_a_rank_sees_the_end_of_a_process_for_which_it_was_asked_to_look(first: str) -> None:
    ends, events = seen()
    ends.look(AwaitEnd(1, LIFE))
    if first == "looks":
        ends.look(AwaitEnd(0, LIFE))
    ends.ended(LIFE, drained=False)
    assert ends.missed(LIFE) is (first == "ends")
    ends.look(AwaitEnd(0, LIFE))
    assert events == [ProcessEnded(0, LIFE, drained=False)]
    ends.ended(LIFE, drained=True)
    assert events[1:] == [ProcessEnded(0, LIFE, drained=True)]
    assert not ends.missed(LIFE)


def test_a_rank_that_forgot_a_process_sees_no_end() -> None:
    ends, events = seen()
    ends.look(AwaitEnd(0, LIFE))
    ends.unmap(UnmapPeer(0, LIFE, watch=True))
    ends.unmap(UnmapPeer(0, LIFE))
    ends.ended(LIFE, drained=True)
    assert events == []
    assert ends.missed(LIFE)


def test_a_rank_that_does_not_reach_a_peer_knows_no_process_of_it() -> None:
    ends, events = seen()
    ends.look(AwaitEnd(0, LIFE))
    ends.look(AwaitEnd(1, LIFE))
    ends.ended(LIFE, drained=True)
    assert events == [ProcessEnded(0, LIFE, drained=True)]
    assert not ends.missed(LIFE)


def test_the_end_of_a_peer_that_may_write_is_looked_for() -> None:
    proven = written()
    assert proven.may_write(LIFE, WRITES)
    assert not proven.may_write(LIFE, frozenset())
    proven.check_told(WRITES, lambda _, __: False, nothing)
    with pytest.raises(Violated, match=f"no rank looks for the end of {LIFE}, which may write under w-{ACCESS.hex()}"):
        proven.check_told(WRITES, lambda _, __: False, lambda life: life == LIFE)


# -- memory


def blocks(*ids: int) -> Blocks:
    return np.array(ids, dtype=np.int64), np.array([], dtype=np.int64)


def pushing() -> Memory:
    memory = Memory(layout(4), 0, KvStore())
    memory.read([1], "t#1/0")
    return memory


def test_what_a_posting_of_its_own_reads_is_not_recycled() -> None:
    memory = pushing()
    memory.scrub(blocks(0))
    with pytest.raises(Violated, match="cell 1 is freed while posting t#1/0 reads it"):
        memory.scrub(blocks(0, 1))
    with pytest.raises(Violated, match="cell 1 is used while posting t#1/0 reads it"):
        memory.compute(blocks(1), Prompt((1,)))
    memory.let_go([1], "t#1/0")
    memory.scrub(blocks(1))


def test_what_is_taken_back_with_the_void_flag_is_recycled_while_a_peer_reads_it() -> None:
    memory = pushing()
    memory.void(blocks(1))
    memory.read([1], "t#1/1")
    memory.scrub(blocks(1))
    memory.void_known(blocks(1))
    memory.scrub(blocks(1))
    memory.read([1], "t#2/0")
    with pytest.raises(Violated):
        memory.scrub(blocks(1))
