"""Engines of two programs that exchange KV: a vLLM server, which prefills and decodes, and SGLang's servers."""

import json
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgrpc.client import connect_sync
from tests.sglang.servers import HELD, LOOK_S, POOL_TOKENS, ROOT, START_S, Server, asked, free_port, sampled
from tests.vllm.processes import end, tree_of

VLLM = Path(os.environ.get("VLLM_VENV") or ROOT / ".venv-vllm") / "bin" / "python"
"""Python of vLLM's own environment."""
DTYPE = "float32"
"""Type in which roundings of two programs change no token."""
WEIGHTS = "tiny@1"
ACROSS = {"SGLANG_KVGRPC_ACROSS_ENGINES": "1", "SGLANG_KVGRPC_WEIGHTS_REVISION": WEIGHTS}
BLOCK_TOKENS, BLOCKS = 32, 200
NAME = "tiny"
"""Name under which requests ask for the model."""


class VLLMServer:
    """One vLLM engine with its HTTP server."""

    def __init__(self, folder: Path, **options: Any) -> None:
        """`options`: further settings of the connector."""
        self._folder, self._options = folder, options
        self.port, self.lead_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server, which is not ready yet."""
        extra = {
            "listen": f"127.0.0.1:{self.lead_port}", "across_engines": True, "weights_revision": WEIGHTS,
            "on_loss": "fail", **self._options,
        }  # fmt: skip
        transfer = {
            "kv_connector": "KVGrpcConnector", "kv_connector_module_path": "kvgrpc.integrations.vllm",
            "kv_role": "kv_both", "engine_id": "vllm", "kv_connector_extra_config": extra,
        }  # fmt: skip
        command = [
            str(VLLM), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._folder / "model"),
            "--served-model-name", NAME, "--skip-tokenizer-init", "--enforce-eager", "--dtype", DTYPE,
            "--host", "127.0.0.1", "--port", str(self.port), "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", str(POOL_TOKENS),
            "--max-num-batched-tokens", "256", "--no-enable-prefix-caching", "--kv-transfer-config",
            json.dumps(transfer),
        ]  # fmt: skip
        environment = {
            "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        }  # fmt: skip
        with (self._folder / "vllm.log").open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )

    @property
    def log(self) -> str:
        return (self._folder / "vllm.log").read_text(errors="replace")

    def wait(self) -> None:
        """Waits until the server answers."""
        deadline = time.monotonic() + START_S
        while not self._get("/health"):
            assert self._process is not None, "it was started"
            assert self._process.poll() is None, self.log[-4000:]
            assert time.monotonic() < deadline, self.log[-4000:]
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return f"ok {answer.read().decode()}"
        except OSError:
            return ""

    def received_tokens(self) -> int:
        """Returns the number of tokens whose KV came from elsewhere."""
        lines = self._get("/metrics").splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:kvgrpc_received_tokens_t")))

    def held(self) -> dict[str, int]:
        """Returns what its lead holds."""
        with connect_sync(f"127.0.0.1:{self.lead_port}") as lead:
            counts = lead.status().counts
        return {name: getattr(counts, name) for name in HELD if getattr(counts, name)}

    def signal(self, number: int) -> None:
        for pid in tree_of(self._process.pid) if self._process is not None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """Kills the server and what it started."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            end(tree_of(self._process.pid))
            self._process.wait()
            self._process = None

    def ask(self, prompt: Sequence[int], tokens: int, params: object = None, timeout_s: float = 90.0) -> dict[str, Any]:
        """Returns the answer, or the reason why there is none under `error`."""
        body = {
            "model": NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **({"kv_transfer_params": params} if params else {}),
        }  # fmt: skip
        return asked(self.port, "/v1/completions", body, timeout_s)

    def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Returns the tokens of this engine without any other."""
        return tokens_of(self.ask(prompt, tokens))


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """Returns the tokens of vLLM's answer. An answer without them is shown."""
    assert "choices" in answer, answer
    return list(answer["choices"][0]["token_ids"])


@dataclass(frozen=True)
class Programs:
    """A vLLM engine, SGLang's prefill and decode, and, where a test compares with it, one SGLang engine for both."""

    vllm: VLLMServer
    prefill: Server
    decode: Server
    one: Server | None = None

    def at_rest(self) -> bool:
        return not (self.vllm.held() or self.prefill.held() or self.decode.held())

    def all_held(self) -> list[dict[str, int]]:
        return [self.vllm.held(), self.prefill.held(), self.decode.held()]


def vllm_to_sglang(programs: Programs, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """Returns the answer of SGLang's decode to a prompt that vLLM prefills, both asked at once."""
    room = random.getrandbits(63)
    params = {"do_remote_decode": True, "do_remote_prefill": False, "bootstrap_room": room}
    to_d = {
        "input_ids": prompt, "bootstrap_host": "127.0.0.1", "bootstrap_port": programs.vllm.lead_port,
        "bootstrap_room": room, **sampled(tokens), **more,
    }  # fmt: skip
    with ThreadPoolExecutor(2) as threads:
        at_d = threads.submit(programs.decode.ask, "/generate", to_d)
        tokens_of(threads.submit(programs.vllm.ask, prompt, 1, params).result())
        return at_d.result()


def sglang_to_vllm(programs: Programs, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Returns vLLM's answer to a prompt that SGLang prefills, both asked at once."""
    room = random.getrandbits(63)
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": programs.prefill.lead_port, "bootstrap_room": room}
    params = {"do_remote_decode": False, "do_remote_prefill": True, **place}
    with ThreadPoolExecutor(2) as threads:
        at_p = threads.submit(programs.prefill.ask, "/generate", {"input_ids": prompt, **place, **sampled(1)})
        found = threads.submit(programs.vllm.ask, prompt, tokens, params).result()
        at_p.result()
        return found
