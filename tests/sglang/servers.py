"""SGLang's own HTTP servers, and requests sent to both of a pair as SGLang's load balancer sends them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgrpc.client import connect_sync
from kvgrpc.errors import Unavailable
from tests.vllm.processes import end, tree_of

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
VOCABULARY, POOL_TOKENS = 1024, 4096
START_S, ANSWER_S = 600.0, 90.0
RANKS = int(os.environ.get("SGLANG_RANKS", "1"))
"""Tensor-parallel ranks of each engine."""
LOOK_S, SOON_S = 0.05, 30.0
HELD = (
    "pending_transfer_count", "active_transfer_count", "lease_count", "open_access_count", "pinned_block_count",
    "quarantined_block_count",
)  # fmt: skip
"""Counts of a lead that are 0 at rest."""
NO_TOKENIZER = ("--skip-tokenizer-init",)
FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.2", "--max-total-tokens",
    str(POOL_TOKENS), "--dtype", "bfloat16", "--grammar-backend", "none", "--skip-server-warmup", "--host", "127.0.0.1",
    "--chunked-prefill-size", "256", "--sleep-on-idle",
)  # fmt: skip
ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
DECODE_FLAGS = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
"""Without a GPU there is no pinned memory, which SGLang otherwise asks for."""


def write_model(path: Path) -> None:
    """Writes a tiny Llama with random weights, whose greedy tokens differ from prompt to prompt, and a tokenizer of
    words.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POOL_TOKENS, initializer_range=0.25, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2").save_pretrained(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """One engine with its HTTP server. `mode`: prefill, decode, or empty for an engine that does both."""

    def __init__(
        self, name: str, folder: Path, mode: str, page_tokens: int, flags: Sequence[str] = NO_TOKENIZER,
        **environment: str,
    ) -> None:  # fmt: skip
        """`flags` and `environment` come after those that all servers have."""
        self._flags, self._environment = flags, environment
        self._folder, self._name, self._mode, self._page_tokens = folder, name, mode, page_tokens
        self.port, self.lead_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._folder / f"{self._name}.log"

    @property
    def model(self) -> Path:
        return self._folder / "model"

    def start(self) -> None:
        """Starts the server, which is not ready yet."""
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(self._folder / "model"),
            "--port", str(self.port), "--page-size", str(self._page_tokens), *FLAGS,
        ]  # fmt: skip
        if self._mode:
            command += ["--disaggregation-mode", self._mode, "--disaggregation-transfer-backend", "kvgrpc"]
        if self._mode == "prefill":
            command += ["--disaggregation-bootstrap-port", str(self.lead_port)]
        path = os.pathsep.join((str(STAND_IN), str(ROOT)))
        environment = {**ON_CPU, "PYTHONPATH": path}
        if RANKS > 1:  # each on some processor, without NCCL
            command += ["--tp", str(RANKS)]
            processors = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(RANKS))
            environment |= {"SGLANG_CPU_OMP_THREADS_BIND": processors, "SGLANG_NCCL_SO_PATH": "/nonexistent"}
        if self._mode == "decode":
            command += DECODE_FLAGS
            environment["SGLANG_KVGRPC_LISTEN"] = f"127.0.0.1:{self.lead_port}"
        command += self._flags
        environment |= self._environment
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
            )

    def wait(self) -> None:
        """Waits until the server answers."""
        deadline = time.monotonic() + START_S
        while "error" in self.ask("/model_info", None, timeout_s=5.0):
            assert self._process is not None, "it was started"
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)

    def held(self) -> dict[str, int]:
        """Returns what its lead holds."""
        with connect_sync(f"127.0.0.1:{self.lead_port}") as lead:
            counts = lead.status().counts
        return {name: getattr(counts, name) for name in HELD if getattr(counts, name)}

    def attached(self) -> bool:
        """Returns whether a lead serves it; between two leads none does."""
        try:
            with connect_sync(f"127.0.0.1:{self.lead_port}") as lead:
                return lead.status().engine_attached
        except Unavailable:
            return False

    def processes(self) -> list[int]:
        """Returns its processes; a lead is one of them."""
        return tree_of(self._process.pid) if self._process is not None else []

    def kill_lead(self) -> None:
        """Kills its lead, which its scheduler replaces."""
        (lead,) = (pid for pid in self.processes() if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(lead, signal.SIGKILL)

    def signal(self, number: int) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """Kills the server and what it started."""
        if self._process is not None:
            end(self.processes())
            self._process.wait()
            self._process = None

    def ask(self, path: str, body: object, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Returns the answer, or the reason why there is none under `error`."""
        return asked(self.port, path, body, timeout_s)


def asked(port: int, path: str, body: object, timeout_s: float = ANSWER_S) -> dict[str, Any]:
    """Returns the answer of whoever serves at a port, or the reason why there is none under `error`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.loads(answer.read() or b"{}"))
    except urllib.error.HTTPError as error:
        return {"error": error.read().decode()}
    except (OSError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


@dataclass(frozen=True)
class Pair:
    """A pair of engines, and one that does both."""

    p: Server
    d: Server
    one: Server

    def __iter__(self) -> Iterator[Server]:
        yield from (self.p, self.d, self.one)

    def body(self, prompt: Sequence[int], tokens: int = 8, room: int | None = None, **more: Any) -> dict[str, Any]:
        """Returns a request with what the load balancer adds."""
        return {
            "input_ids": list(prompt), "bootstrap_host": "127.0.0.1", "bootstrap_port": self.p.lead_port,
            "bootstrap_room": random.getrandbits(63) if room is None else room, **sampled(tokens), **more,
        }  # fmt: skip

    def ask_both(self, to_p: dict[str, Any], to_d: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sends both legs of a request at once, and returns the answers of prefill and decode."""
        with ThreadPoolExecutor(2) as threads:
            legs = [threads.submit(server.ask, "/generate", body) for server, body in ((self.p, to_p), (self.d, to_d))]
            return legs[0].result(), legs[1].result()

    def generate(self, prompt: Sequence[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Returns decode's answer to a request."""
        body = self.body(prompt, tokens, **more)
        return self.ask_both(body, body)[1]

    def of_one(self, prompt: Sequence[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Returns the answer of the engine that does both."""
        return self.one.ask("/generate", {"input_ids": list(prompt), **sampled(tokens), **more})

    def check_whole_memory(self, seed: int) -> None:
        """Checks that the leads hold nothing, and that a prompt which needs nearly all pages is answered as by one."""
        wait_until(lambda: not self.p.held() and not self.d.held(), lambda: (self.p.held(), self.d.held()))
        prompt = prompt_of(POOL_TOKENS * 7 // 8, seed)
        assert ids_of(self.generate(prompt)) == ids_of(self.of_one(prompt))


def wait_until(condition: Callable[[], bool], what: Callable[[], object], timeout_s: float = SOON_S) -> None:
    """Waits until the condition holds, for events that no call waits for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come within {timeout_s} s: {what()}"
        time.sleep(LOOK_S)


def sampled(tokens: int) -> dict[str, Any]:
    return {"sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}


def prompt_of(tokens: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(tokens)]


def ids_of(answer: dict[str, Any]) -> list[int]:
    """Returns the answer's tokens. An answer without them is shown."""
    assert "output_ids" in answer, answer
    return list(answer["output_ids"])
