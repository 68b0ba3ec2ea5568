"""vLLM without free blocks takes back hand-overs that nobody came for."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.integrations.vllm.pressure import LONGEST_S
from kvgrpc.v1.lease_pb2 import Lease
from tests.vllm.cores import BLOCKS, Core, request_of
from tests.vllm.engines import BLOCK_TOKENS, DATA_PATHS, Engines, Pair, prompt_of, wait_until

TTL_S = 600.0
"""TTL in seconds, far longer than any wait here."""
HELD_UP_S = 2.0
"""Maximum delay of steps in seconds: far more than steps take, and far less than calls to a lead may."""
SMALL_POOL = 24
LONG = 10 * BLOCK_TOKENS
"""Tokens of a prompt; two such prompts leave too few blocks for a third."""


@pytest.fixture
def core() -> Iterator[Core]:
    made = Core("P", OnLoss.FAIL, firm_ttl_s=0.0)
    yield made
    made.close()


def full(core: Core) -> None:
    """Fills all blocks with hand-overs that nobody comes for."""
    for number in range((BLOCKS - 1) // 3):
        core.prefilled(f"left-{number}")
    core.step()
    assert core.used() == BLOCKS - 1


def test_a_request_that_waits_for_blocks_gets_them_from_the_oldest_hand_over(core: Core) -> None:
    full(core)
    core.hooks.match(request_of("new", None), 0)
    core.step()
    assert core.used() == BLOCKS - 1 - 3
    core.hooks.match(again := request_of("new", None), 0)
    core.hooks.allocated(again, (core.allocate(3),), 0)
    core.step()
    assert core.used() == BLOCKS - 1
    taken = core.side.stats.take()
    assert taken is not None
    assert (taken.data["reclaimed"], taken.data["unsent"]) == (1, 1)


def test_a_request_whose_last_block_is_full_gets_the_next_one_before_it_is_preempted(core: Core) -> None:
    full(core)
    core.step({"running": 15})
    assert core.used() == BLOCKS - 1
    core.step({"running": 16})
    assert core.used() == BLOCKS - 1 - 3


def test_a_request_with_a_long_id_gets_blocks_too(core: Core) -> None:
    full(core)
    core.hooks.arrived(long := request_of("r" * 300, None))
    core.hooks.match(long, 0)
    core.step()
    assert core.used() == BLOCKS - 1 - 3
    assert not core.side._over


def test_an_engine_whose_lead_refuses_to_take_blocks_back_goes_on_with_kvgrpc(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    full(core)
    core.pool.num_gpu_blocks = 1000 * BLOCKS  # more than its lead knows
    for _ in range(2):
        core.hooks.match(request_of("new", None, num_tokens=500 * BLOCKS * BLOCK_TOKENS), 0)
        core.step()
        time.sleep(LONGEST_S)
    assert caplog.text.count("takes no blocks back") == 1
    assert core.used() == BLOCKS - 1
    assert not core.side._over


def test_where_there_are_blocks_nothing_is_taken_back(core: Core) -> None:
    core.prefilled("left")
    core.hooks.match(request_of("new", None), 0)
    core.step()
    assert core.used() == 3


def test_nothing_that_is_firm_is_taken_back() -> None:
    core = Core("P", firm_ttl_s=100.0)
    with closing(core):
        full(core)
        core.hooks.match(request_of("new", None), 0)
        core.step()
        assert core.used() == BLOCKS - 1


def test_a_lead_that_dies_while_blocks_lack_is_replaced_and_serves(core: Core) -> None:
    full(core)
    os.kill(core.side.engine.lead_pid, signal.SIGKILL)
    core.hooks.match(request_of("new", None), 0)
    core.step()
    wait_until(lambda: core.step() and core.used() == 0)
    assert core.prefilled("next").get("kvgrpc_grant"), "its next lead honours grants"


def test_a_lead_that_hangs_while_blocks_lack_holds_up_no_step(core: Core) -> None:
    """A lead that has not answered is not asked again, because it would then take back more than is needed."""
    full(core)
    lead = core.side.engine.lead_pid
    os.kill(lead, signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(3):
        core.hooks.match(request_of("new", None), 0)
        core.step()
        time.sleep(LONGEST_S)
    took = time.monotonic() - began - 3 * LONGEST_S
    os.kill(lead, signal.SIGCONT)
    assert took < HELD_UP_S
    wait_until(lambda: core.step() and core.used() < BLOCKS - 1)
    core.step()
    assert core.used() == BLOCKS - 1 - 3


# ---- with real engines


@pytest.fixture(scope="module", params=DATA_PATHS)
def small_engines(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    more = {"num_gpu_blocks_override": SMALL_POOL, "max_model_len": 512, "enable_prefix_caching": False}
    extra = {"ttl_s": TTL_S, "offer_ttl_s": TTL_S, "firm_ttl_s": 0.3}
    with closing(Pair(engines, more=more, data_paths=[request.param], **extra)) as pair:
        yield pair


@pytest.fixture
def small(small_engines: Pair) -> Iterator[Pair]:
    small_engines.start()
    yield small_engines
    small_engines.p.let_go()
    small_engines.d.let_go()
    small_engines.at_rest()


def test_clients_that_hang_up_keep_nobody_waiting(small: Pair) -> None:
    for seed in range(5):
        small.prefilled(prompt_of(LONG, seed=400 + seed))  # its client hangs up: nobody comes
    prompt = prompt_of(LONG, seed=410)
    answer = small.pull(prompt)
    assert not answer.failed
    small.p.let_go()  # unclaimed hand-overs, if any are left: P forgets nothing that is held
    assert answer.tokens == small.expected(prompt)


def test_a_hand_over_that_was_taken_back_fails_at_decode_or_is_computed(small: Pair) -> None:
    prompt = prompt_of(LONG, seed=420)
    params = small.prefilled(prompt)
    for seed in range(3):
        small.prefilled(prompt_of(LONG, seed=421 + seed))
    assert small.d.ask(prompt, params).failed


def test_requests_that_grow_take_blocks_back_and_are_not_preempted(small: Pair) -> None:
    before = small.p.counts().get("preempted", 0)
    small.prefilled(prompt_of(LONG, seed=430))
    wait_until(lambda: all(lease.soft_in.ToNanoseconds() == 0 for lease in leases(small)))
    answer = small.p.ask(prompt_of(20, seed=431), None, 400)
    assert len(answer.tokens) == 400
    assert small.p.counts().get("preempted", 0) == before
    assert not leases(small)


def leases(pair: Pair) -> list[Lease]:
    with pair.p.lead() as lead:
        return list(lead.list_leases().leases)


def test_what_decode_offers_for_a_turn_that_does_not_come_is_taken_back(small: Pair) -> None:
    for seed in range(4):
        prompt = prompt_of(LONG, seed=440 + seed)
        answer = small.pull(prompt)
        assert not answer.failed
        assert answer.params["do_remote_decode"] is True
