"""An engine in which nothing moves, although requests ask for it, logs once why."""

import logging

import pytest

from kvgrpc.core.policy.values import ModeChoice, OnLoss
from kvgrpc.integrations.vllm.silence import SILENT_S, Silence
from tests.vllm.cores import BLOCKS, Core, Cores, request_of
from tests.vllm.engines import PREFILL, pushed, wait_until

KEY = b"k" * 16


class Clock:
    """A clock that stands still."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_after_a_minute_without_a_move_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    silence = Silence(clock)
    silence.in_vain("the first")
    clock.now += SILENT_S - 1
    silence.in_vain("a second")
    assert not caplog.messages
    clock.now += 1
    for _ in range(3):
        silence.in_vain("LEASE_EXPIRED: nobody came")
    (line,) = caplog.messages
    assert line == (
        "kvgrpc has moved nothing for 60 s, in which 3 requests asked for it; of the last one: LEASE_EXPIRED: nobody "
        "came"
    )


def test_what_moves_in_between_begins_the_minute_anew(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    silence = Silence(clock)
    for _ in range(4):
        silence.in_vain("why")
        clock.now += SILENT_S
        silence.moved()
    assert not caplog.messages


def test_a_request_alone_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    silence = Silence(clock)
    silence.in_vain("why")
    clock.now += 10 * SILENT_S
    assert not caplog.messages


@pytest.mark.parametrize("mode", ModeChoice)
def test_a_request_of_which_vllm_says_nothing_more_is_over_and_is_the_cause(
    mode: ModeChoice, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens when another connector stands between and does not call all hooks."""
    p, d = Core("P", mode=mode), Core("D", OnLoss.RECOMPUTE)
    clock = Clock()
    p.side.stats._silence = Silence(clock)
    with caplog.at_level(logging.WARNING):
        for name in ("one", "two"):
            p.hooks.arrived(request_of(name, {**PREFILL, "transfer_id": name}))
            p.step(ended=[name])
            clock.now += SILENT_S
    (line,) = (said for said in caplog.messages if "moved nothing" in said)
    assert "vLLM does not call request_finished_all_groups or request_finished" in line
    wait_until(lambda: p.step() and not p.side.scheduler.busy)
    assert p.pool.get_num_free_blocks() == BLOCKS - 1
    for core in (p, d):
        core.close()


def test_decode_hears_at_once_of_a_push_that_vllm_says_nothing_more_of(cores: Cores) -> None:
    p, d = cores
    d.begin(request_of("d", {"do_remote_prefill": True, **pushed(KEY, p.side.engine.address)}))
    p.hooks.arrived(request_of("p", {**PREFILL, **pushed(KEY)}))
    p.step(ended=["p"])
    wait_until(lambda: p.step() and d.step() and d.told.failed == {"d"})


def test_a_decode_that_is_computed_without_a_word_lets_its_source_go(cores: Cores) -> None:
    p, d = cores
    request = request_of("d", p.prefilled("p"))
    d.hooks.arrived(request)
    d.step({"d": 8})
    wait_until(lambda: p.step() and p.used() == 0)
    d.step({"d": 8})
    d.hooks.finished(request, ([],))


def test_a_request_that_has_the_id_of_one_that_just_left_is_another_one(cores: Cores) -> None:
    p, d = cores
    first = request_of("same", {"do_remote_prefill": True, "kvgrpc_grant": "nonsense"})
    d.hooks.arrived(first)
    d.hooks.finished(first, ([],))
    d.begin(request_of("same", p.prefilled("p")))
    d.step(ended=["same"])
    wait_until(lambda: p.step() and d.step() and d.told.loaded == {"same"})
    assert not d.told.failed
