"""After a reset, for example for new weights, nothing that was computed before it is offered or taken."""

import os
import signal

import pytest
import torch

from tests.vllm.cores import PROMPT, Cores, request_of, scheduled
from tests.vllm.engines import CHUNK_TOKENS, PREFILL, Pair, prompt_of, pushed, wait_until

KEY = b"k" * 16


def test_a_reset_ends_what_was_handed_over_and_frees_it_without_another_step(cores: Cores) -> None:
    p, d = cores
    params = p.prefilled("p")
    assert p.used() == 3
    assert p.hooks.reset()
    assert p.used() == 0
    d.begin(request_of("d", params))
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    assert not any(torch.any(layer) for layer in d.memory.values())
    again = request_of("e", p.prefilled("q"))
    d.begin(again)
    wait_until(lambda: d.step() and "e" in d.told.loaded - d.told.failed)


def test_a_reset_cancels_loads_which_fail_once(cores: Cores) -> None:
    p, d = cores
    waiting, queued = request_of("d", p.prefilled("p")), request_of("e", p.prefilled("q"))
    os.kill(p.side.engine.lead_pid, signal.SIGSTOP)
    try:
        d.begin(waiting)
        d.hooks.arrived(queued)
        d.step()
        assert d.hooks.reset()
    finally:
        os.kill(p.side.engine.lead_pid, signal.SIGCONT)
    d.step()
    assert d.told.failed == {"d"}
    d.hooks.allocated(queued, (d.allocate(),), d.hooks.match(queued, 0) or 0)
    d.step()
    assert d.told.failed == {"d", "e"}
    wait_until(lambda: p.step() and p.used() == 0)


def test_what_is_being_computed_at_a_reset_is_not_handed_over(cores: Cores) -> None:
    """Its first chunk was computed with the old weights."""
    p, _ = cores
    request = request_of("p", PREFILL)
    blocks = p.computing(request)
    assert p.hooks.reset()
    assert p.left(request, blocks) == {}
    assert p.used() == 0


def test_a_push_that_has_begun_ends_with_a_reset_for_its_destination_too(cores: Cores) -> None:
    p, d = cores
    source = request_of("p", {**PREFILL, **pushed(KEY)})
    p.tables["p"] = p.computing(source)
    p.step({"p": 16})
    target = request_of("d", {"do_remote_prefill": True, **pushed(KEY, p.side.engine.address)})
    d.begin(target)
    d.step()
    assert p.hooks.reset()
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    source.num_computed_tokens = len(PROMPT)
    assert p.left(source, p.tables["p"]) == {}
    wait_until(lambda: p.step() and p.used() == 0)


def test_a_reset_of_an_engine_without_kvgrpc_frees_what_is_held(cores: Cores) -> None:
    p, _ = cores
    assert p.prefilled("p")
    p.hooks.step(scheduled(preempted=7))  # no step has that: kvgrpc is over
    assert p.hooks.reset()
    assert p.used() == 0


@pytest.mark.parametrize("push", [True, False])
def test_a_reset_ends_what_is_offered_and_vllm_forgets_at_the_second_call(pair: Pair, *, push: bool) -> None:
    """The first call meets held blocks, and releases them."""
    prompt = prompt_of(CHUNK_TOKENS + 50, seed=210 + push)
    expected = pair.expected(prompt)
    answer = pair.p.ask(prompt, {**PREFILL, **(pushed(os.urandom(16)) if push else {})}, 1)
    assert pair.p.held()
    assert not pair.p.forgets(connector=True)
    assert pair.p.forgets(connector=True)
    assert pair.p.held() == {}
    if not push:
        assert pair.d.ask(prompt, answer.params).failed
    assert pair.pull(prompt).tokens == expected
