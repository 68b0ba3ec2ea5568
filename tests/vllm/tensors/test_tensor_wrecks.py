"""Processes die: the survivors go on with the right tokens and without tensors of the dead process."""

import os
import signal

from tests.vllm.engines import LEAD, WORKER, prompt_of, wait_until
from tests.vllm.tensors.pairs import LONG, TensorPair, stored


def test_decode_learns_at_once_that_prefill_died_in_the_middle(pair: TensorPair) -> None:
    prompt = prompt_of(LONG, seed=110)
    pair.expected(prompt)
    legs = pair.begin_both(prompt)
    wait_until(lambda: stored(pair.d)["tensors"] > 0)
    os.kill(pair.p.tree(WORKER)[0], signal.SIGSTOP)
    pair.p.kill()
    assert pair.lost(pair.d.answer(legs["D"]), prompt)


def test_an_engine_whose_store_died_goes_on_alone(shared_tensor_pair: TensorPair) -> None:
    """This is the last test of these engines: P is dead already."""
    d, prompt = shared_tensor_pair.d, prompt_of(100, seed=111)
    expected = d.ask(prompt).tokens
    (lead,) = d.tree(LEAD)
    os.kill(lead, signal.SIGKILL)
    wait_until(lambda: not d.tree(LEAD))
    for _ in range(2):
        answer = d.ask(prompt, {"do_remote_prefill": True, **shared_tensor_pair.intent(os.urandom(16), d)})
        assert answer.failed if shared_tensor_pair.on_loss["D"] == "fail" else answer.tokens == expected
    assert d.ask(prompt).tokens == expected
    assert "kvgrpc is over" in d.log()
