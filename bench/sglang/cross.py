"""Prompts that an engine of one program prefills for an engine of another one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.sglang.engines import PAGE_TOKENS, environment_of, started
from tests.sglang.programs import ACROSS, DTYPE, VLLM, Programs, VLLMServer, sglang_to_vllm, tokens_of, vllm_to_sglang
from tests.sglang.servers import Server, ids_of, prompt_of

LENGTHS = (16, 33, 300, 700)
TOKENS = 10


def measured(folder: Path, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns, for each direction, whether all tokens are those of one engine."""
    if not VLLM.exists():
        tell(f"cross: SKIP: no vLLM at {VLLM}: make vllm, or VLLM_VENV")
        return []
    flags, more = ("--dtype", DTYPE), {**environment_of("kvgrpc"), **ACROSS}
    p = Server("across-P", folder, "prefill", PAGE_TOKENS, flags, **more)
    d = Server("across-D", folder, "decode", PAGE_TOKENS, flags, **more)
    programs = Programs(VLLMServer(folder), p, d)
    with started([programs.vllm, programs.prefill, programs.decode]):
        equal = {"vllm": True, "sglang": True}
        for length in LENGTHS:
            prompt = prompt_of(length, seed=length)
            expected = programs.vllm.alone(prompt, TOKENS)
            equal["vllm"] &= ids_of(vllm_to_sglang(programs, prompt, TOKENS)) == expected
            equal["sglang"] &= tokens_of(sglang_to_vllm(programs, prompt, TOKENS)) == expected
        return [
            {"prefill": "vllm", "decode": "sglang", "prompts": len(LENGTHS), "tokens_equal": equal["vllm"]},
            {"prefill": "sglang", "decode": "vllm", "prompts": len(LENGTHS), "tokens_equal": equal["sglang"]},
        ]
