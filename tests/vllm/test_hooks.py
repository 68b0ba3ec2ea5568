"""Both sides of the connector without an engine around them: what vLLM is told, and which blocks it may use.

vLLM's own block pool is there; its requests and steps are stand-ins with the fields that are read.
"""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from kvgrpc.core.layout import Group, GroupKind, uniform_layout
from kvgrpc.core.policy_values import OnLoss
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.hooks import Hooks
from kvgrpc.integrations.vllm.meeting import Step
from kvgrpc.integrations.vllm.options import Options
from kvgrpc.integrations.vllm.scheduling import SchedulerSide
from kvgrpc.integrations.vllm.working import WorkerSide
from tests.vllm.engines import PREFILL, wait_until

LAYERS, BLOCK_TOKENS, BLOCKS = 2, 16, 16
PROMPT = list(range(40))
MODE_PUSH = {"kvgrpc_intent": {"mode": "TRANSFER_MODE_PUSH"}}
NOTHING = SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={}, total_num_scheduled_tokens=0)


class Core:
    """One engine's two sides."""

    def __init__(self, name: str, on_loss: OnLoss = OnLoss.FAIL, *, overlap: bool = True) -> None:
        options = Options(Defaults(), on_loss, data_paths=("cma",))
        group = Group("full", GroupKind.FULL_ATTENTION, LAYERS, BLOCK_TOKENS, BLOCKS, 1, 8, "float16")
        layout = uniform_layout(group, layer_bytes := 2 * BLOCK_TOKENS * 8 * 2)
        self.memory = {str(layer): torch.zeros(BLOCKS, layer_bytes, dtype=torch.uint8) for layer in range(LAYERS)}
        self.worker = WorkerSide(options, layout)
        self.worker.register(self.memory)
        self.side = SchedulerSide(name, options, layout, "weights", overlap=overlap)
        self.side.meet(self.worker.folder)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.side.blocks = SimpleNamespace(block_pool=self.pool)
        self.hooks = Hooks(self.side, on_loss)
        self.told = Step()

    def close(self) -> None:
        self.hooks.close()
        self.worker.close()

    def step(self) -> bool:
        step = self.hooks.step(NOTHING)
        assert not step.loaded & self.told.loaded, "told twice"
        self.told.loaded |= step.loaded
        self.told.failed |= step.failed
        self.worker.step_done(step)
        return True

    def allocate(self, count: int = 3) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def used(self) -> int:
        free: int = self.pool.get_num_free_blocks()
        return BLOCKS - 1 - free  # the first is vLLM's null block

    def free(self, blocks: list[int]) -> None:
        """What vLLM does when a request left."""
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(blocks)])

    def prefilled(self, name: str) -> dict[str, Any]:
        """A prompt that was computed, and left."""
        request = request_of(name, PREFILL)
        self.hooks.arrived(request)
        blocks = self.allocate()
        self.hooks.allocated(request, (blocks,), 0)
        for number, layer in enumerate(self.memory.values()):
            layer[blocks] = 7 + number
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
        keep, params = self.hooks.finished(request, (blocks,))
        assert not keep
        self.free(blocks)
        return params or {}

    def begin(self, request: Any) -> list[int]:
        """A request that waits for its KV, and its blocks."""
        self.hooks.arrived(request)
        tokens = self.hooks.match(request, 0)
        assert tokens == len(PROMPT)
        blocks = self.allocate()
        self.hooks.allocated(request, (blocks,), tokens)
        return blocks


def request_of(name: str, params: Any) -> Any:
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, prompt_token_ids=PROMPT, all_token_ids=PROMPT, lora_request=None,
        cache_salt=None, sampling_params=None, num_tokens=len(PROMPT), num_computed_tokens=0, max_tokens=1,
        status=RequestStatus.FINISHED_ABORTED, abort_immediately=False, prompt_embeds=None, mm_features=[],
    )  # fmt: skip


@pytest.fixture(params=[True, False], ids=["overlap", "in-order"])
def cores(request: pytest.FixtureRequest) -> Iterator[tuple[Core, Core]]:
    """Of engines that run steps while hooks are called, or one after the other."""
    p, d = Core("P", overlap=request.param), Core("D", overlap=request.param)
    yield p, d
    p.close()
    d.close()


def test_a_load_is_told_once_and_what_was_given_comes_back(cores: tuple[Core, Core]) -> None:
    p, d = cores
    request = request_of("d", p.prefilled("p"))
    assert p.used() == 3
    blocks = d.begin(request)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    assert all(torch.all(layer[blocks] == 7 + number) for number, layer in enumerate(d.memory.values()))
    d.hooks.allocated(request, (blocks,), 0)  # as vLLM does when it goes on with the request
    assert d.hooks.finished(request, (blocks,)) == (False, None)
    wait_until(lambda: p.step() and p.used() == 0)
    d.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_worker_reports_steps_that_something_may_wait_for(overlap: bool) -> None:
    p = Core("P", overlap=overlap)
    assert p.hooks.step(NOTHING).report is overlap
    request = request_of("p", {**PREFILL, "transfer_id": "1" * 16, **MODE_PUSH})
    p.hooks.arrived(request)
    assert p.hooks.step(NOTHING).report
    p.hooks.finished(request, ([],))
    assert p.hooks.step(NOTHING).report is overlap
    p.close()


def test_a_request_that_leaves_while_it_waits_is_told_once_all_the_same(cores: tuple[Core, Core]) -> None:
    p, d = cores
    request = request_of("d", p.prefilled("p"))
    os.kill(p.side.lead_pid, signal.SIGSTOP)
    d.begin(request)
    d.step()
    assert d.hooks.finished(request, ([1, 2, 3],)) == (False, None)
    os.kill(p.side.lead_pid, signal.SIGCONT)
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    d.step()


def test_a_load_whose_source_died_fails_once(cores: tuple[Core, Core]) -> None:
    p, d = cores
    request = request_of("d", p.prefilled("p"))
    os.kill(p.side.lead_pid, signal.SIGSTOP)
    blocks = d.begin(request)
    d.step()
    os.kill(p.side.lead_pid, signal.SIGKILL)
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    assert d.hooks.finished(request, (blocks,)) == (False, None)
    d.free(blocks)
    d.step()
    assert d.used() == 0
    wait_until(lambda: p.step() and p.used() == 0)  # its own next lead is there


@pytest.mark.parametrize("on_loss", OnLoss)
def test_what_cannot_come_fails_or_is_computed(on_loss: OnLoss) -> None:
    d = Core("D", on_loss)
    request = request_of("d", {"do_remote_prefill": True, "kvgrpc_grant": "nonsense"})
    d.hooks.arrived(request)
    if on_loss is OnLoss.RECOMPUTE:
        assert d.hooks.match(request, 0) == 0
    else:
        assert d.hooks.match(request, 16) == 24
        d.hooks.allocated(request, (d.allocate(),), 24)
        d.step()
        assert d.told.failed == d.told.loaded == {"d"}
    d.step()
    d.close()


@pytest.mark.parametrize("more", [{"prompt_embeds": 1}, {"mm_features": ["an image"]}, {"prompt_token_ids": None}])
def test_a_prompt_of_more_than_token_ids_is_computed_and_given_to_nobody_and_what_it_takes_fails(
    cores: tuple[Core, Core], more: dict[str, Any]
) -> None:
    p, d = cores
    params = p.prefilled("p")
    given, taken = request_of("q", PREFILL), request_of("d", params)
    for request in (given, taken):
        vars(request).update(more)
    p.hooks.arrived(given)
    given.status, given.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
    assert p.hooks.finished(given, (p.allocate(),)) == (False, None)
    d.hooks.arrived(taken)
    d.hooks.allocated(taken, (d.allocate(),), d.hooks.match(taken, 0))
    d.step()
    assert d.told.failed == d.told.loaded == {"d"}


def test_a_prefill_computes_one_token_whatever_it_asks_for(cores: tuple[Core, Core]) -> None:
    p, _ = cores
    prefill, other = request_of("p", PREFILL), request_of("q", None)
    for request in (prefill, other):
        request.max_tokens = 64
        p.hooks.arrived(request)
    assert (prefill.max_tokens, other.max_tokens) == (1, 64)


def test_when_the_session_is_over_loads_fail_once_in_blocks_that_stay_out_of_use(cores: tuple[Core, Core]) -> None:
    p, d = cores
    first, second = request_of("first", p.prefilled("p")), request_of("second", p.prefilled("q"))
    os.kill(p.side.lead_pid, signal.SIGSTOP)
    blocks = d.begin(first)
    d.hooks.arrived(second)
    d.worker.close()  # it ends the engine's life, as a worker's death does
    wait_until(lambda: d.step() and d.told.failed == {"first"})
    os.kill(p.side.lead_pid, signal.SIGCONT)
    assert d.hooks.finished(first, (blocks,)) == (False, None)
    d.free(blocks)
    assert d.used() == len(blocks)
    assert d.hooks.match(second, 0) == len(PROMPT)
    d.hooks.allocated(second, (d.allocate(),), len(PROMPT))
    d.step()
    assert d.told.failed == {"first", "second"}
    third = request_of("third", None)
    d.hooks.arrived(third)
    assert d.hooks.match(third, 0) == 0
    assert d.hooks.finished(third, ([],)) == (False, None)


def test_when_the_session_is_over_what_was_given_comes_back(cores: tuple[Core, Core]) -> None:
    p, _ = cores
    assert p.prefilled("p")
    p.worker.close()
    wait_until(lambda: p.step() and p.used() == 0)
    assert p.prefilled("q") == {}
    assert p.used() == 0


def test_a_hook_that_meets_a_defect_ends_kvgrpc_and_not_the_engine(cores: tuple[Core, Core]) -> None:
    p, d = cores
    blocks = d.begin(request_of("d", p.prefilled("p")))
    d.hooks.step(SimpleNamespace(preempted_req_ids=7))  # no step has that
    d.step()
    d.free(blocks)
    assert d.used() == len(blocks)
    assert d.hooks.match(request_of("d2", None), 0) == 0


def test_the_block_that_stands_for_those_that_are_not_there_is_never_read_or_written(cores: tuple[Core, Core]) -> None:
    p, d = cores
    null: list[int] = [p.pool.null_block.block_id]
    waiting = request_of("d", p.prefilled("p"))
    d.hooks.arrived(waiting)
    d.hooks.allocated(waiting, (null + d.allocate(2),), d.hooks.match(waiting, 0))
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    assert not any(torch.any(layer[null]) for layer in d.memory.values())
    given = request_of("q", PREFILL)
    p.hooks.arrived(given)
    given.status, given.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
    assert p.hooks.finished(given, (null + p.allocate(2),)) == (False, None)
