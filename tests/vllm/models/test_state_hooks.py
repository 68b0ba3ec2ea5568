"""Hooks for requests whose layers have states, and what peers learn of the states; see tests/vllm/cores.py."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.request import Request, RequestStatus

from kvgrpc.integrations.vllm.identity import kernels_of
from tests.vllm.cores import PROMPT, Core, Cores, request_of
from tests.vllm.engines import PREFILL, wait_until


@pytest.fixture
def states() -> Iterator[Cores]:
    p, d = (Core(name, overlap=False, states=True) for name in "PD")
    yield p, d
    p.close()
    d.close()


def requested() -> Request:
    """Returns a prefill of vLLM's own request class."""
    wanted = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": PREFILL})
    return Request("p", list(PROMPT), wanted, None)


def prefilling(p: Core) -> tuple[Request, list[int]]:
    """Returns a request, and the block of its state, after everything that P computes of it."""
    request = requested()
    p.hooks.arrived(request)
    blocks = p.allocate(1)
    p.hooks.allocated(request, (blocks,), 0)
    request.num_computed_tokens, request.status = request.num_tokens, RequestStatus.FINISHED_LENGTH_CAPPED
    return request, blocks


def test_prefill_computes_no_more_than_the_state_that_decode_goes_on_from(states: Cores) -> None:
    p, d = states
    request, given = prefilling(p)
    shown = request.num_tokens, request.num_prompt_tokens, len(request.prompt_token_ids or ()), request.max_tokens
    assert shown == (len(PROMPT) - 1,) * 3 + (1,)
    assert list(request.all_token_ids) == request.prompt_token_ids == PROMPT[:-1]
    for number, layer in enumerate(p.memory.values()):
        layer[given] = 7 + number
    _, params = p.hooks.finished(request, (given,))
    p.free(given)
    taking = request_of("d", params)
    d.hooks.arrived(taking)
    assert d.hooks.match(taking, 0) == len(PROMPT) - 1
    taken = d.allocate(1)
    d.hooks.allocated(taking, (taken,), len(PROMPT) - 1)
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    assert all(torch.all(layer[taken] == 7 + number) for number, layer in enumerate(d.memory.values()))
    wait_until(lambda: p.step() and p.used() == 0)


def test_a_prompt_without_token_ids_is_computed_as_it_is(states: Cores) -> None:
    p, _ = states
    request = requested()
    request.prompt_embeds = torch.zeros(len(PROMPT), 8)
    p.hooks.arrived(request)
    assert request.num_tokens == request.num_prompt_tokens == len(PROMPT)


def test_a_state_that_steps_in_flight_change_is_not_handed_over(states: Cores) -> None:
    """This happens when an answer stops after vLLM has scheduled its next token."""
    p, _ = states
    request, blocks = prefilling(p)
    request.num_output_placeholders = 1
    assert p.hooks.finished(request, (blocks,)) == (False, None)
    p.free(blocks)
    assert p.used() == 0


class Layer(MambaBase):
    """One layer with states."""

    mamba_type = MambaAttentionBackendEnum.GDN_ATTN

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def get_state_shape(self) -> Any:
        raise AssertionError("the layout of the pool has it")

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return torch.bfloat16, self._dtype


@pytest.fixture(params=["SD", "DS"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Sets which dimension comes first. vLLM reads it once in a process."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield request.param
    get_conv_state_layout.cache_clear()


def test_of_states_peers_know_the_types_and_which_dimension_comes_first(order: str) -> None:
    layers = {"a": Layer(torch.float32), "b": Layer(torch.float16)}
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert kernels_of(config, list(layers)) == [
        ["GDN_ATTN", order, "torch.bfloat16", "torch.float32"],
        ["GDN_ATTN", order, "torch.bfloat16", "torch.float16"],
    ]
