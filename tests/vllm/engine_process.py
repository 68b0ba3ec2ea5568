"""vLLM engines as processes, forked from one that has imported vLLM: that takes 20 s, and an engine has three of them.

The first argument is the number of a socket. It receives each engine's arguments as JSON with two descriptors: a socket
for JSON lines, and a log. The answer is the engine's process id.

    {"op": "generate", "prompt", "max_tokens", "params",
     "salt", "n", "adapter", "image", "replica"}           ->  {"tokens", "finish", "params", "cached", "others"}
    {"op": "load", "adapter"}                              ->  {}        the adapter, in place of one with its number
    {"op": "abort", "of"}                                  ->  {}        the request of that line's id
    {"op": "counts"}                                       ->  {...}     what vLLM counted since the start
    {"op": "reset", "connector"}                           ->  {"free"}  the prefix cache is empty: no block in use

An "adapter" is [number, folder], an "image" the seed of a random one, a "replica" the number of one of a data-parallel
engine. Each line has an "id", which its answer repeats; answers come in any order. A line that fails is answered with
{"error"}. The end of the input ends the engine.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.distributed import utils as vllm_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.utils import system_utils
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import multiproc_executor
from vllm.v1.metrics.loggers import StatLoggerBase

_COUNTS = "external_hits draft_tokens busy_steps preempted preempted_prefills new_tokens local_hits"
OWN_COUNTS = tuple(_COUNTS.split())
COUNTS: Counter[str] = Counter(dict.fromkeys(OWN_COUNTS, 0))
"""What vLLM counted, from 0 on, and what the connector counted, once it counts."""


class Counting(StatLoggerBase):
    """The counters of vLLM that tests read."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        pass

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None:
            return
        counts = (scheduler_stats.kv_connector_stats or {}).items()
        COUNTS.update({name: count for name, count in counts if isinstance(count, int)})
        hits = scheduler_stats.connector_prefix_cache_stats
        COUNTS["external_hits"] += hits.hits if hits is not None else 0
        drafts = scheduler_stats.spec_decoding_stats
        COUNTS["draft_tokens"] += drafts.num_draft_tokens if drafts is not None else 0
        COUNTS["busy_steps"] += scheduler_stats.num_running_reqs > 0
        if iteration_stats is not None:
            COUNTS["preempted"] += iteration_stats.num_preempted_reqs
            for left in iteration_stats.finished_requests:
                COUNTS["preempted_prefills"] += left.num_preemptions if left.max_tokens_param == 1 else 0
            COUNTS["new_tokens"] += iteration_stats.num_generation_tokens
        COUNTS["local_hits"] += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        pass


class Lines:
    """Runs one task for each line."""

    def __init__(self, engine: AsyncLLM, writer: asyncio.StreamWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, line: dict[str, Any]) -> None:
        self._tasks[line["id"]] = asyncio.create_task(self._serve(line))

    async def _serve(self, line: dict[str, Any]) -> None:
        try:
            answer = await getattr(self, line["op"])(line)
        except asyncio.CancelledError:
            answer = {"error": "aborted"}
        except Exception as error:  # noqa: BLE001 - the answer reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._writer.write(json.dumps({"id": line["id"], **answer}).encode() + b"\n")
        del self._tasks[line["id"]]

    async def generate(self, line: dict[str, Any]) -> dict[str, Any]:
        params, answers = line.get("params"), line.get("n", 1)
        sampling = SamplingParams(
            max_tokens=line["max_tokens"],
            temperature=1 if answers > 1 else 0,
            top_k=1,  # makes the same tokens; vLLM gives one answer only at temperature 0
            detokenize=False,
            ignore_eos=True,
            n=answers,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        prompt = {"prompt_token_ids": line["prompt"]} | ({"cache_salt": line["salt"]} if line.get("salt") else {})
        if "image" in line:
            prompt["multi_modal_data"] = {"image": _image(line["image"])}
        tokens: dict[int, list[int]] = {}
        finish: dict[int, str | None] = {}
        adapter = _adapter(*line["adapter"]) if "adapter" in line else None
        replica = line.get("replica")
        async for output in self._engine.generate(
            prompt, sampling, f"line-{line['id']}", lora_request=adapter, data_parallel_rank=replica
        ):
            for one in output.outputs:
                tokens[one.index], finish[one.index] = list(one.token_ids), one.finish_reason
        first, *others = [tokens[index] for index in sorted(tokens)]
        return {
            "tokens": first,
            "finish": "error" if "error" in finish.values() else finish[0],
            "params": output.kv_transfer_params,
            "cached": output.num_cached_tokens,
            "others": others,
        }

    async def load(self, line: dict[str, Any]) -> dict[str, Any]:
        assert await self._engine.add_lora(_adapter(*line["adapter"], load_inplace=True))
        return {}

    async def abort(self, line: dict[str, Any]) -> dict[str, Any]:
        """Aborts a request as if its client hung up."""
        task = self._tasks.get(line["of"])
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        return {}

    async def counts(self, _: dict[str, Any]) -> dict[str, Any]:
        return dict(COUNTS)

    async def reset(self, line: dict[str, Any]) -> dict[str, Any]:
        return {"free": await self._engine.reset_prefix_cache(reset_connector=line["connector"])}


def _image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (112, 112, 3), dtype=np.uint8))


def _adapter(number: int, folder: str, **more: Any) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, folder, **more)


async def serve(arguments: dict[str, Any], lines_socket: socket.socket) -> None:
    """Serves lines until the input ends."""
    reader, writer = await asyncio.open_connection(sock=lines_socket, limit=2**24)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Counting])
    lines = Lines(engine, writer)
    writer.write(b'{"id": 0}\n')
    while line := await reader.readline():
        lines.begin(json.loads(line))
    engine.shutdown()


def fork_only() -> None:
    """Makes vLLM fork. Its CPU platform spawns in case OpenMP has threads, but nothing has computed here yet."""
    context = multiprocessing.get_context("fork")
    for module in (system_utils, multiproc_executor, engine_utils):
        module.get_mp_context = lambda: context


def yield_nothing() -> None:
    """Stops vLLM from yielding while it waits for its workers. On Linux 6.18 a process that yields loses the time it is
    owed, so one of two engines on a processor may stand still for a minute.
    """
    vllm_utils.USE_SCHED_YIELD = False


def without_amx() -> None:
    """Turns AMX off: its bfloat16 products, and so the tokens, depend on how many requests are computed at once. Two
    libraries compute here: oneDNN reads an environment variable before its first product, and vLLM asks torch.
    """
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    torch.cpu._is_amx_tile_supported = lambda: False


def become_engine(request: dict[str, Any], lines_socket: socket.socket) -> None:
    """Runs an engine in the forked process until the process ends."""
    asyncio.run(serve(request["arguments"], lines_socket))


def fork_on_request(become: Callable[[dict[str, Any], socket.socket], None]) -> None:
    """Forks engines until the control socket closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    fork_only()
    yield_nothing()
    without_amx()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the engines
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 2**16, 2)
        if not request:
            os._exit(0)  # an ordered exit takes long on a busy machine
        lines_fd, log = descriptors
        pid = os.fork()
        if pid == 0:
            control.close()
            try:
                _set_up(json.loads(request), log)
                become(json.loads(request), socket.socket(fileno=lines_fd))
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(0)
        os.close(lines_fd)
        os.close(log)
        control.sendall(str(pid).encode())


def _set_up(request: dict[str, Any], log: int) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    os.sched_setaffinity(0, request["cores"])


if __name__ == "__main__":
    fork_on_request(become_engine)
