"""An engine of vLLM whose two ranks are on two hosts, each a node of vLLM's own, and an engine on a third host."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import hosts
from tests.hosts.switched import Network, switched
from tests.vllm.counts import received
from tests.vllm.engines import (
    CHUNK_TOKENS,
    PREFILL,
    START_S,
    WORKER,
    Engine,
    Engines,
    Pair,
    free_port,
    prompt_of,
    wait_until,
)

pytestmark = pytest.mark.timeout(2 * START_S)

PROMPTS = {length: prompt_of(length, seed=3) for length in (20, 200, 2 * CHUNK_TOKENS + 77)}
GRACE_S = 10.0
"""Time after which a silent rank is lost, in seconds: short, and long enough for a busy machine."""
LINK = "kvgrpc.rank_link"
"""Part of the command line of the process that links a rank to its lead on another host."""


class Apart(Pair):
    """P on two hosts, whose second node has a rank alone, and D on a third one. They do not share memory or files."""

    def __init__(self, engines: Engines, network: Network, stack: ExitStack) -> None:
        """Starts them in float32: bfloat16 would round differently on two ranks and give other tokens."""
        super().__init__(engines)
        self.network = network
        first, second, third = network.hosts
        flags = ["--insecure", "--dial-allow", f"{hosts.NETWORK}.0/24"]
        extra = {"data_paths": ["collective"], "serve_flags": flags, "limits": {"peer_grace_s": GRACE_S}}
        start: dict[str, Any] = {"extra": extra, "on_loss": "fail"}
        split = {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"}
        split |= {"dtype": "float32", "master_addr": first.address, "master_port": free_port()}
        self._engines["P"] = Engine("P", 0, engines, **start, more={**split, "node_rank": 0}, host=first)
        stack.callback(self.p.stop)
        self.far = Engine("P", 1, engines, **start, more={**split, "node_rank": 1}, host=second)
        stack.callback(self.far.kill)
        self._engines["D"] = Engine("D", 1, engines, **start, more={"dtype": "float32"}, host=third)
        stack.callback(self.d.stop)
        for engine in (self.p, self.d):
            engine.ready()
            first_one = engine.begin(prompt_of(8, seed=9))  # kernels are compiled for it
            wait_until(lambda: engine.answered(first_one), engine.log, START_S)  # noqa: B023 - waited for here
            assert not engine.answer(first_one).failed
            assert engine.forgets()

    def expected(self, prompt: Any) -> list[int]:
        """Returns the tokens of D alone, which then forgets the prompt."""
        tokens = self.d.ask(prompt).tokens
        assert self.d.forgets()
        return tokens


@pytest.fixture(scope="module")
def apart(model_folder: Path) -> Iterator[Apart]:
    with ExitStack() as stack:
        network = stack.enter_context(switched(3))
        if isinstance(network, str):
            pytest.skip(network)
        engines = Engines(model_folder, "tests/vllm/hosts/host_process.py")
        stack.callback(engines.stop)
        yield Apart(engines, network, stack)


def test_only_the_rank_on_the_other_host_attaches_over_the_network(apart: Apart) -> None:
    assert [len(engine.tree(WORKER)) for engine in (apart.p, apart.far)] == [1, 1]
    assert [len(engine.tree(LINK)) for engine in (apart.p, apart.far, apart.d)] == [0, 1, 0]


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_an_engine_on_two_hosts_gives_the_tokens_of_one_engine(apart: Apart, mode: str, length: int) -> None:
    expected, before = apart.expected(PROMPTS[length]), received(apart.d)
    answer = apart.pull(PROMPTS[length]) if mode == "pull" else apart.push(PROMPTS[length])
    assert answer.tokens == expected, answer
    assert received(apart.d) - before == length
    apart.at_rest()


def test_every_rank_of_an_engine_on_two_hosts_takes_its_share(apart: Apart) -> None:
    prompt = PROMPTS[200]
    expected, before = apart.expected(prompt), received(apart.p)
    given = apart.d.ask(prompt, PREFILL, 1)
    answer = apart.p.ask(prompt, given.params)
    assert answer.tokens == expected, answer
    assert received(apart.p) - before == 200
    apart.at_rest()


def test_a_rank_whose_host_is_cut_off_fails_what_others_take_and_its_engine_goes_on_alone(apart: Apart) -> None:
    prompt = PROMPTS[200]
    expected, params = apart.expected(prompt), apart.prefilled(prompt)
    apart.network.set(cut=apart.network.links_of(apart.network.hosts[1]))
    assert apart.d.ask(prompt, params).failed
    apart.network.set()
    assert apart.p.ask(prompt).tokens == expected
    wait_until(lambda: apart.d.held() == {}, apart.d.held)
    for engine in (apart.p, apart.d):
        wait_until(engine.rests, engine.log)
