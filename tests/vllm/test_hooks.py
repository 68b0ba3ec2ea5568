"""The connector's messages to vLLM, and the blocks that vLLM may use; see tests/vllm/cores.py."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from kvgrpc.core.policy.values import OnLoss
from kvgrpc.integrations.params import answered_push
from kvgrpc.integrations.vllm.block_tables import blocks_of
from tests.vllm.cores import PROMPT, Core, Cores, request_of, scheduled
from tests.vllm.engines import PREFILL, pushed, wait_until
from tests.vllm.processes import runs

MODE_PUSH = {"kvgrpc_intent": {"mode": "TRANSFER_MODE_PUSH"}}


def test_a_load_is_told_once_and_what_was_given_comes_back(cores: Cores) -> None:
    p, d = cores
    request = request_of("d", p.prefilled("p"))
    assert p.used() == 3
    blocks = d.begin(request)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    assert all(torch.all(layer[blocks] == 7 + number) for number, layer in enumerate(d.memory.values()))
    d.hooks.allocated(request, (blocks,), 0)  # vLLM calls it again when it goes on with the request
    assert d.hooks.finished(request, (blocks,)) == (False, None)
    wait_until(lambda: p.step() and p.used() == 0)
    d.step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_worker_reports_steps_that_something_may_wait_for(overlap: bool) -> None:
    p = Core("P", overlap=overlap)
    assert p.hooks.step(scheduled()).report is overlap
    request = request_of("p", {**PREFILL, "transfer_id": "1" * 16, **MODE_PUSH})
    p.hooks.arrived(request)
    assert p.hooks.step(scheduled()).report
    p.hooks.finished(request, ([],))
    assert p.hooks.step(scheduled()).report is overlap
    p.close()


def test_a_request_that_leaves_while_it_waits_is_told_once_all_the_same(cores: Cores) -> None:
    p, d = cores
    request = request_of("d", p.prefilled("p"))
    os.kill(p.side.engine.lead_pid, signal.SIGSTOP)
    d.begin(request)
    d.step()
    assert d.hooks.finished(request, ([1, 2, 3],)) == (False, None)
    os.kill(p.side.engine.lead_pid, signal.SIGCONT)
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    d.step()


def test_a_load_whose_source_died_fails_once(cores: Cores) -> None:
    p, d = cores
    request = request_of("d", p.prefilled("p"))
    os.kill(p.side.engine.lead_pid, signal.SIGSTOP)
    blocks = d.begin(request)
    d.step()
    os.kill(p.side.engine.lead_pid, signal.SIGKILL)
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    assert d.hooks.finished(request, (blocks,)) == (False, None)
    d.free(blocks)
    d.step()
    assert d.used() == 0
    wait_until(lambda: p.step() and p.used() == 0)  # P's next lead is there


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


def test_beside_other_connectors_a_loss_is_a_load_of_nothing_and_its_request_begins_anew() -> None:
    """vLLM's policy for failed loads then applies to all connectors."""
    p, d = Core("P"), Core("D", OnLoss.RECOMPUTE, alone=False)
    request = request_of("d", p.prefilled("p"))
    request.num_computed_tokens = len(PROMPT)
    os.kill(p.side.engine.lead_pid, signal.SIGSTOP)
    d.begin(request)
    d.step()
    os.kill(p.side.engine.lead_pid, signal.SIGKILL)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert (d.told.failed, d.anew, request.num_computed_tokens) == (set(), ["d"], 0)
    for core in (p, d):
        core.close()


@pytest.mark.parametrize("more", [{"prompt_embeds": 1}, {"prompt_token_ids": None}])
def test_a_prompt_with_more_than_token_ids_is_neither_given_nor_taken(cores: Cores, more: dict[str, Any]) -> None:
    p, d = cores
    params = p.prefilled("p")
    given, taken = request_of("q", PREFILL), request_of("d", params)
    for request in (given, taken):
        vars(request).update(more)
    p.hooks.arrived(given)
    given.status, given.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
    assert p.hooks.finished(given, (p.allocate(),)) == (False, None)
    d.hooks.arrived(taken)
    d.hooks.allocated(taken, (d.allocate(),), d.hooks.match(taken, 0) or 0)
    d.step()
    assert d.told.failed == d.told.loaded == {"d"}


def image(name: str = "cat", offset: int = 4) -> Any:
    """Returns an image in a prompt, as vLLM has it."""
    return SimpleNamespace(modality="image", identifier=name, mm_position=SimpleNamespace(offset=offset, length=20))


@pytest.mark.parametrize("other", [image("dog"), image(offset=5), None], ids=["image", "place", "none"])
def test_a_prompt_with_images_is_taken_with_the_same_at_the_same_places_only(cores: Cores, other: Any) -> None:
    """The token ids of all images are equal."""
    p, d = cores
    params = [p.prefilled(name, mm_features=[image()]) for name in ("same", "other")]
    d.begin(request_of("same", params[0], mm_features=[image()]))
    d.begin(request_of("other", params[1], mm_features=[other] if other else []))
    wait_until(lambda: d.step() and d.told.loaded == {"same", "other"})
    assert d.told.failed == {"other"}


NAMED = {**PREFILL, "transfer_id": "1" * 16}


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[::-1]], ids=["the same prompt", "another"])
@pytest.mark.parametrize("params", [None, PREFILL, NAMED], ids=["nothing", "a prefill", "one of the same name"])
def test_a_reused_request_id_leaves_the_blocks_of_the_first(cores: Cores, params: Any, prompt: list[int]) -> None:
    p, d = cores
    first = request_of("p", NAMED)
    p.tables["p"] = p.computing(first)
    given = p.left(first, p.tables["p"])
    again = request_of("p", params, prompt_token_ids=prompt, all_token_ids=prompt)
    p.hooks.arrived(again)
    assert p.hooks.match(again, 0) == 0
    p.tables["p"] = blocks = p.allocate()
    p.hooks.allocated(again, (blocks,), 0)
    p.step({"p": 32}, preempted={"p"})
    assert p.used() == 6
    assert p.left(again, blocks) == {}
    assert p.used() == 3, "those of the first one"
    request = request_of("d", given)
    d.begin(request)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    wait_until(lambda: p.step() and p.used() == 0)
    assert p.prefilled("p")


def test_a_request_under_the_id_of_one_that_is_pushed_leaves_the_push_alone(cores: Cores) -> None:
    p, d = cores
    key = b"k" * 16
    first = request_of("p", {**PREFILL, **pushed(key)})
    p.tables["p"] = p.computing(first)
    p.step({"p": 32})
    assert p.left(first, p.tables["p"])["kvgrpc_intent"] == pushed(key, p.side.engine.address)["kvgrpc_intent"] | {
        "peer": {"address": p.side.engine.address, "engineId": "P"}
    }
    again = request_of("p", {**PREFILL, **pushed(key)}, prompt_token_ids=PROMPT[::-1])
    p.tables["p"] = p.computing(again)
    p.step({"p": 32}, preempted={"p"})
    assert p.left(again, p.tables["p"]) == {}
    d.begin(request_of("d", {"do_remote_prefill": True, **pushed(key, p.side.engine.address)}))
    wait_until(lambda: p.step() and d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    wait_until(lambda: p.step() and p.used() == 0)


def refused_by_the_api(name: str, params: Any) -> Any:
    """Returns a refused request as vLLM shows it: without its prompt, and aborted at once."""
    return request_of(name, params, abort_immediately=True, prompt_token_ids=[0], all_token_ids=[0], num_tokens=1)


def test_what_a_request_could_take_that_the_api_refused_comes_back_at_its_source(cores: Cores) -> None:
    p, d = cores
    for name in ("before they know each other", "after"):
        source = request_of(name, {**PREFILL, "kvgrpc_intent": {"ttl": "300s"}})
        request = refused_by_the_api("d", p.left(source, p.computing(source)))
        assert p.used() == 3
        d.hooks.arrived(request)
        assert d.hooks.finished(request, ([],)) == (False, None)
        wait_until(lambda: p.step() and p.used() == 0)


def test_a_push_to_a_request_that_the_api_refused_ends_at_its_source(cores: Cores) -> None:
    p, d = cores
    key = b"k" * 16
    source = request_of("p", {**PREFILL, **pushed(key)})
    p.tables["p"] = p.computing(source)
    p.step({"p": 32})
    d.hooks.arrived(refused_by_the_api("d", {"do_remote_prefill": True, **pushed(key, p.side.engine.address)}))
    p.left(source, p.tables["p"])
    wait_until(lambda: p.step() and d.step() and p.used() == 0)


def test_a_destination_learns_that_the_api_refused_its_prefill(cores: Cores) -> None:
    p, d = cores
    key = b"k" * 16
    p.hooks.arrived(refused_by_the_api("p", {**PREFILL, **pushed(key)}))
    d.begin(request_of("d", {"do_remote_prefill": True, **pushed(key, p.side.engine.address)}))
    wait_until(lambda: p.step() and d.step() and d.told.failed == {"d"})


def test_what_another_request_takes_is_not_let_go_with_one_that_the_api_refused(cores: Cores) -> None:
    p, d = cores
    params = p.prefilled("p")
    blocks = d.begin(request_of("d", params))
    d.hooks.arrived(refused_by_the_api("other", params))
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    assert blocks


def test_a_prefill_computes_one_token_whatever_it_asks_for(cores: Cores) -> None:
    p, _ = cores
    prefill, other = request_of("p", PREFILL), request_of("q", None)
    for request in (prefill, other):
        request.max_tokens = 64
        p.hooks.arrived(request)
    assert (prefill.max_tokens, other.max_tokens) == (1, 64)


def test_when_the_session_is_over_loads_fail_once_in_blocks_that_stay_out_of_use(cores: Cores) -> None:
    p, d = cores
    first, second = request_of("first", p.prefilled("p")), request_of("second", p.prefilled("q"))
    os.kill(p.side.engine.lead_pid, signal.SIGSTOP)
    blocks = d.begin(first)
    d.hooks.arrived(second)
    d.worker.close()  # ends the engine's life, like a worker's death
    wait_until(lambda: d.step() and d.told.failed == {"first"})
    os.kill(p.side.engine.lead_pid, signal.SIGCONT)
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


def test_when_the_session_is_over_what_was_given_comes_back(cores: Cores) -> None:
    p, _ = cores
    assert p.prefilled("p")
    p.worker.close()
    wait_until(lambda: p.step() and p.used() == 0)
    assert p.prefilled("q") == {}
    assert p.used() == 0


def test_idle_steps_notice_that_the_session_is_over(cores: Cores, caplog: pytest.LogCaptureFixture) -> None:
    p, _ = cores
    p.step()
    p.worker.close()
    wait_until(lambda: p.step() and "kvgrpc is over in this engine" in caplog.text)


def test_blocks_that_were_given_come_back_after_a_defect_only_once_the_lead_is_gone(cores: Cores) -> None:
    """This includes a defect in the engine's own blocks: the lead would keep vouching for what it gave."""
    p, d = cores
    assert p.prefilled("given")
    taken = request_of("taken", d.prefilled("q"))
    p.hooks.arrived(taken)
    p.hooks.allocated(taken, ([10**9],), p.hooks.match(taken, 0) or 0)  # no block pool has that
    pid = p.side.engine.lead_pid
    p.hooks.step(scheduled(preempted=7))  # no step has that
    assert not runs(pid)
    assert p.used() == 0


def test_a_hook_that_meets_a_defect_ends_kvgrpc_and_not_the_engine(cores: Cores) -> None:
    p, d = cores
    blocks = d.begin(request_of("d", p.prefilled("p")))
    d.hooks.step(scheduled(preempted=7))  # no step has that
    d.step()
    d.free(blocks)
    assert d.used() == len(blocks)
    assert d.hooks.match(request_of("d2", None), 0) == 0


def test_the_block_that_represents_missing_ones_is_never_read_or_written(cores: Cores) -> None:
    p, d = cores
    null: list[int] = [p.pool.null_block.block_id]
    waiting = request_of("d", p.prefilled("p"))
    d.hooks.arrived(waiting)
    d.hooks.allocated(waiting, (null + d.allocate(2),), d.hooks.match(waiting, 0) or 0)
    wait_until(lambda: d.step() and d.told.failed == {"d"})
    assert not any(torch.any(layer[null]) for layer in d.memory.values())
    given = request_of("q", PREFILL)
    p.hooks.arrived(given)
    given.status, given.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
    assert p.hooks.finished(given, (null + p.allocate(2),)) == (False, None)


def test_a_push_whose_prefill_is_preempted_brings_what_the_new_prefill_computed(cores: Cores) -> None:
    """The new prefill uses other blocks; another request uses the old ones at once."""
    p, d = cores
    key = b"k" * 16
    source = request_of("p", {**PREFILL, **pushed(key)})
    p.tables["p"] = old = p.computing(source)
    p.step({"p": 32})
    p.free(old)
    p.step(preempted={"p"})
    for layer in p.memory.values():
        layer[old] = 99
    p.tables["p"] = new = p.allocate(4)[1:]  # the last freed block is allocated first, so one block is the old one
    assert set(new) != set(old)
    for number, layer in enumerate(p.memory.values()):
        layer[new] = 40 + number
    blocks = d.begin(request_of("d", {"do_remote_prefill": True, **pushed(key, p.side.engine.address)}))
    d.step()
    source.num_computed_tokens = 0
    p.step({"p": 32})
    source.num_computed_tokens = 32
    p.step({"p": 8})
    source.status, source.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(PROMPT)
    assert p.hooks.finished(source, (new,)) == (False, answered_push(key, "P", p.side.address, len(PROMPT)))
    wait_until(lambda: p.step() and d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    assert all(torch.all(layer[blocks] == 40 + number) for number, layer in enumerate(d.memory.values()))


def test_vllms_null_block_stands_for_no_block_of_any_group() -> None:
    assert blocks_of(([0, 3], [0, 0, 4])) == [3, 4]
