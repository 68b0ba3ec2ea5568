"""Measures the time that a connector's hooks take of an engine's step without anything to move, in microseconds.

    python -m bench.hooks FOLDER '{"kv_connector": ...}'

An engine in one process, its scheduler and its worker in one thread, decodes one plain request. Each hook that vLLM
calls in every step is timed, and the times are added up for the step. The answer is a line of JSON.
"""

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvgrpc.datapath.nixl import load

STEPS = 400
WARM_STEPS = 50
"""Number of first steps that are not counted: they also warm up Python and the processor."""
FIRST = "build_connector_meta"
"""The hook with which a step begins."""
SCHEDULER = (FIRST, "update_connector_output", "take_events", "has_pending_push_work", "has_pending_block_frees")
WORKER = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip
BOTH = ("get_kv_connector_stats",)


class Timed:
    """The hooks of a class, with a clock around each."""

    def __init__(self, connector: type) -> None:
        self._steps: list[Counter[str]] = []
        for side, names in (("scheduler", SCHEDULER), ("worker", WORKER), ("both", BOTH)):
            for name in names:
                setattr(connector, name, self._timed(getattr(connector, name), side, first=name == FIRST))

    def _timed(self, hook: Callable[..., Any], side: str, *, first: bool) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if first:
                self._steps.append(Counter())
            began = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                if self._steps:
                    self._steps[-1][side] += time.perf_counter() - began  # type: ignore[assignment]

        return timed

    def us_p50(self) -> dict[str, float]:
        steps = self._steps[WARM_STEPS:]
        found = {"steps": float(len(steps)), "all": statistics.median(step.total() for step in steps) * 1e6}
        return found | {side: statistics.median(step[side] for step in steps) * 1e6 for side in ("scheduler", "worker")}


def main() -> None:
    """Runs one engine with one request."""
    folder, transfer = sys.argv[1], json.loads(sys.argv[2])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if transfer["kv_connector"] == "NixlConnector":
        load.nixl()  # otherwise vLLM's own agent ends its process with SIGSEGV on hosts with rdma-core
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(**transfer)
    timed = Timed(KVConnectorFactory.get_connector_class(config))
    llm = LLM(
        f"{folder}/model", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=2048,
        num_gpu_blocks_override=100, distributed_executor_backend="uni", kv_transfer_config=config,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=STEPS, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate({"prompt_token_ids": list(range(3, 103))}, sampling, use_tqdm=False)
    print(json.dumps(timed.us_p50()), flush=True)


if __name__ == "__main__":
    main()
