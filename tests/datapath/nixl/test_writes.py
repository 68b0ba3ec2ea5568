"""Proofs at the end of a write by data path `nixl`, or of the process at either side.

By CMA the source's process writes into the target's memory; by TCP the target's process writes what it received. The
proofs differ, and each test names its transport.
"""

from collections.abc import Callable

import pytest

from kvgrpc.datapath.base import PostingState
from tests.datapath.nixl.pair import Pair
from tests.datapath.nixl.peer import RUN, TCP

CMA: dict[str, str] = {}
BOTH = pytest.mark.parametrize("env", [CMA, TCP], ids=["cma", "tcp"])
DONE, FAILED, PENDING, UNPROVED = PostingState.DONE, PostingState.FAILED, PostingState.PENDING, PostingState.UNPROVED
TRIALS = 20


def assert_seen(trial: Callable[[Pair], bool], env: dict[str, str]) -> None:
    """Asserts that an event that no proof excludes happens in some trial; it depends on where a process was stopped."""
    for _ in range(TRIALS):
        with Pair(env) as pair:
            if trial(pair):
                return
    raise AssertionError(f"not in {TRIALS} trials")


def lands_later(pair: Pair) -> bool:
    """Tells whether bytes land in a stopped target once it goes on."""
    before = pair.landed()
    pair.target.go_on()
    pair.target.ask("turns")
    return pair.landed() > before


@BOTH
def test_done_means_that_all_bytes_are_in_the_peer_s_memory_already(env: dict[str, str]) -> None:
    with Pair(env) as pair:
        for _ in range(5):
            pair.write_all()
        assert (pair.source.end(), pair.target.end()) == (0, 0)


def test_by_cma_a_write_of_runs_of_any_length_into_a_stopped_peer_becomes_done() -> None:
    """`written_by_caller` relies on this: UCX leaves no run to its other lanes."""
    with Pair(CMA) as pair:
        pair.target.stop()
        for run in (1, 8, 100, 1 << 10, RUN, 9000, 64 << 10, 1 << 20):
            pair.memory[:] = 0
            pair.source.ask("write", run, 16 * run)
            assert pair.source.ask("finish") == (DONE, True)
            assert not pair.memory[16 * run :].any()


def test_by_tcp_a_write_into_a_stopped_peer_stays_pending_until_it_goes_on() -> None:
    with Pair(TCP) as pair:
        pair.stop_under_a_write(pair.target)
        assert pair.source.ask("state") is PENDING
        pair.target.go_on()
        assert pair.source.ask("finish") == (DONE, True)


# ---- the source ends


def test_by_cma_nothing_follows_the_end_of_the_source_s_process() -> None:
    with Pair(CMA) as pair:
        pair.begin()
        pair.source.kill()
        at_end = pair.memory.copy()
        pair.target.ask("turns")
        assert (pair.memory == at_end).all()
        assert pair.target.end() == 0


@pytest.mark.parametrize(("env", "is_enough"), [(CMA, True), (TCP, False)], ids=["cma", "tcp"])
def test_the_end_of_a_source_s_process_is_seen_and_is_a_proof_by_cma_only(env: dict[str, str], is_enough: bool) -> None:
    with Pair(env) as pair:
        pair.target.ask("hold", pair.source.endpoint)
        pair.begin()
        assert pair.target.ask("source_ended") == (False, is_enough)
        pair.source.stop()
        assert pair.target.ask("source_ended") == (False, is_enough)
        pair.source.kill()
        assert pair.target.ask("source_ended") == (True, is_enough)


@pytest.mark.parametrize(("env", "needs"), [(CMA, False), (TCP, True)], ids=["cma", "tcp"])
def test_a_target_knows_whether_what_peers_do_needs_its_turns(env: dict[str, str], needs: bool) -> None:
    with Pair(env) as pair:
        assert pair.target.ask("needs_turns") is needs
        pair.begin()
        assert pair.source.ask("finish") == (DONE, True)


@pytest.mark.parametrize("end", ["close", "rekey"])
def test_by_tcp_nothing_of_a_killed_source_follows_the_end_of_the_target_s_agent(end: str) -> None:
    with Pair(TCP) as pair:
        pair.stop_under_a_write(pair.target)
        pair.source.kill()
        pair.target.go_on()
        assert pair.target.ask("late_writes") == ""
        pair.target.ask(end)
        at_end = pair.memory.copy()
        pair.target.ask("turns")
        assert (pair.memory == at_end).all()
        assert pair.target.end() == 0


@pytest.mark.slow  # about NIXL: the reason for not claiming more
def test_by_tcp_bytes_of_a_killed_source_land_while_the_target_s_agent_lives() -> None:
    def trial(pair: Pair) -> bool:
        pair.stop_under_a_write(pair.target)
        pair.source.ask("state")  # fills the buffers between the two
        pair.source.kill()
        return lands_later(pair)

    assert_seen(trial, TCP)


@pytest.mark.parametrize("end", ["close", "rekey"])
def test_by_tcp_nothing_of_a_stopped_source_follows_the_end_of_the_target_s_agent(end: str) -> None:
    with Pair(TCP) as pair:
        pair.stop_under_a_write(pair.source)
        assert pair.target.ask("late_writes") == ""
        pair.target.ask(end)
        at_end = pair.memory.copy()
        pair.source.go_on()
        state, _ = pair.source.ask("finish")
        assert state is UNPROVED
        pair.target.ask("turns")
        assert (pair.memory == at_end).all()
        assert pair.source.ask("write")
        assert (pair.source.end(), pair.target.end()) == (0, 0)


@pytest.mark.slow  # about NIXL: the reason for not claiming more
def test_by_cma_a_stopped_source_goes_on_after_the_end_of_the_target_s_agent_which_claims_no_proof() -> None:
    def trial(pair: Pair) -> bool:
        pair.stop_under_a_write(pair.source)
        assert "cma" in pair.target.ask("late_writes")
        pair.target.ask("close")
        before = pair.landed()
        pair.source.go_on()
        pair.source.ask("state")
        return pair.landed() > before

    assert_seen(trial, CMA)


def test_a_target_without_writers_is_at_rest() -> None:
    with Pair(CMA) as pair:
        pair.target.ask("rekey")
        assert pair.target.ask("late_writes") == ""


@BOTH
def test_after_a_rekey_the_same_memory_is_written_under_the_new_offer(env: dict[str, str]) -> None:
    with Pair(env) as pair:
        before, offer = pair.target.endpoint, pair.target.ask("rekey")
        assert before.nixl
        assert offer.nixl.segments == before.nixl.segments
        assert offer.nixl.agent != before.nixl.agent
        pair.source.ask("connect", offer)
        pair.write_all()
        assert (pair.source.end(), pair.target.end()) == (0, 0)


# ---- the target ends, or the connection


@pytest.mark.parametrize(("env", "end"), [(CMA, FAILED), (TCP, UNPROVED)], ids=["cma", "tcp"])
def test_a_killed_target_ends_a_write_and_never_harms_the_source(env: dict[str, str], end: PostingState) -> None:
    with Pair(env) as pair:
        pair.begin()
        pair.target.kill()
        state, complete = pair.source.ask("finish")
        # A write that was over before the source noticed counts.
        assert state is end or (state is DONE and complete)
        at_end = pair.memory.copy()
        pair.source.ask("write")
        pair.source.ask("state")
        assert (pair.memory == at_end).all()
        assert "broke before" in pair.source.ask("write")
        assert pair.source.end() == 0


@pytest.mark.slow  # about NIXL: the reason for not claiming more
def test_by_tcp_a_write_that_is_closed_proves_nothing_for_bytes_land_in_a_stopped_target_later() -> None:
    def trial(pair: Pair) -> bool:
        pair.stop_under_a_write(pair.target)
        assert pair.source.ask("state") is PENDING
        assert pair.source.ask("close") is UNPROVED
        return lands_later(pair)

    assert_seen(trial, TCP)


@pytest.mark.slow  # about NIXL: the reason for not claiming more
def test_by_tcp_an_error_proves_nothing_for_bytes_land_in_a_stopped_target_later() -> None:
    def trial(pair: Pair) -> bool:
        pair.stop_under_a_write(pair.target)
        assert pair.source.ask("state") is PENDING
        pair.source.ask("cut")
        assert pair.source.ask("finish") == (UNPROVED, False)
        return lands_later(pair)

    assert_seen(trial, TCP)


def test_by_cma_an_error_proves_that_nothing_follows() -> None:
    with Pair(CMA) as pair:
        pair.stop_under_a_write(pair.target)
        pair.source.ask("cut")
        state, complete = pair.source.ask("finish")
        assert state is FAILED or (state is DONE and complete)
        at_end = pair.memory.copy()
        pair.target.go_on()
        pair.target.ask("turns")
        pair.source.ask("state")
        assert (pair.memory == at_end).all()
