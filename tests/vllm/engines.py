"""Two vLLM engines with a tiny random model, each on a processor of its own, and a router's use of them."""

import base64
import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgrpc.client import SyncClient, connect_sync
from tests.hosts.hosts import Host
from tests.vllm.processes import command_line, end, runs, tree_of

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
"""Timeout for a start, in seconds. On a processor of its own an engine imports for 20 s and starts for 20 s more."""
WAIT_S = 60.0
"""Timeout after which a test gives up, in seconds."""
BLOCK_TOKENS = 32
CHUNK_TOKENS = 256
"""Maximum number of tokens that one step computes; longer prefills take several steps."""
SEQUENCES = 16
"""Maximum number of requests that run at once; more wait."""
MAX_TOKENS = 12
VOCABULARY = 1024
DATA_PATHS = "cma", "nixl"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""Params that routers send to P."""
# Each engine has one processor. OpenMP counts them before it is bound to that one, and would spin with two threads.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "UCX_RCACHE_MAX_UNRELEASED": "1024"}
LEAD, WORKER = "kvgrpc\0serve", "VLLM::Worker"
"""Parts of command lines; see `Engine.tree`."""
_HELD = "pending_transfer active_transfer lease open_access pinned_block quarantined_block"
HELD = tuple([f"{name}_count" for name in _HELD.split()])
"""Counts of a lead that are 0 at rest."""

Params = Mapping[str, Any]
Adapter = tuple[int, str]
"""Number and folder of an adapter."""


def write_model(folder: Path, kv_heads: int = 4) -> None:
    """Writes a Llama of 7 MB. Its weights are large for its size, so that its tokens depend on the whole prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, initializer_range=0.08,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def prompt_of(count: int, seed: int) -> list[int]:
    """Returns `count` tokens, which differ for each seed."""
    return [(i * i * 31 + i * (7 + 2 * seed) + seed * 131) % (VOCABULARY - 3) + 3 for i in range(count)]


def free_port() -> int:
    """Returns a port that no outgoing connection can take before the engine binds it half a minute later."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, first_ephemeral)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def wait_until(condition: Callable[[], bool], what: Callable[[], object] = str, timeout_s: float = WAIT_S) -> None:
    """Waits until the condition holds, for events that no call waits for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come within {timeout_s} s: {what()}"
        time.sleep(0.01)


@dataclass
class Answer:
    """Answer to one request."""

    tokens: list[int]
    finish: str = ""
    params: Any = None
    cached: int = 0
    others: tuple[list[int], ...] = ()
    """Further answers, if several were asked for."""
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error) or self.finish == "error"


class Engines:
    """The process from which engines are forked."""

    def __init__(self, folder: Path, program: str = "tests/vllm/engine_process.py") -> None:
        self.folder = folder
        self._control, theirs = socket.socketpair()
        with (folder / "engines.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / program), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=(theirs.fileno(),),
                env=os.environ | ENVIRONMENT,
            )  # fmt: skip
        theirs.close()
        self._control.settimeout(START_S)

    def fork(self, request: Mapping[str, Any], lines: socket.socket, log: Path) -> int:
        with log.open("w") as out:
            socket.send_fds(self._control, [json.dumps(request).encode()], [lines.fileno(), out.fileno()])
        pid = self._control.recv(64)
        assert pid, (self.folder / "engines.log").read_text()
        return int(pid)

    def stop(self) -> None:
        self._control.close()
        self._process.wait(30)


class Engine:
    """A process tree with one engine."""

    def __init__(
        self, name: str, core: int, engines: Engines, *, extra: Mapping[str, Any], on_loss: str,
        more: Mapping[str, Any], host: Host | None = None,
    ) -> None:  # fmt: skip
        """`extra` configures the connector, `more` vLLM. `host`: another one than this (see tests/vllm/hosts)."""
        self.name = name
        self.address = f"{host.address if host else '127.0.0.1'}:{free_port()}"
        self._log = engines.folder / f"{name}-{self.address.rpartition(':')[2]}.log"
        self._answers: dict[int, dict[str, Any]] = {}
        self._last_id = 0
        self._unread = b""
        self._socket, theirs = socket.socketpair()
        arguments = {
            "model": str(engines.folder / "model"), "skip_tokenizer_init": True, "enforce_eager": True,
            "dtype": "bfloat16", "max_model_len": 2048, "block_size": BLOCK_TOKENS, "num_gpu_blocks_override": 400,
            "max_num_batched_tokens": CHUNK_TOKENS, "max_num_seqs": SEQUENCES,
            "kv_transfer_config": {
                "kv_connector": "KVGrpcConnector", "kv_connector_module_path": "kvgrpc.integrations.vllm",
                "kv_role": "kv_both", "engine_id": name,
                "kv_connector_extra_config": {"listen": self.address, "on_loss": on_loss, **extra},
            },
            **more,
        }  # fmt: skip
        workers = math.prod(more.get(f"{split}_parallel_size", 1) for split in ("tensor", "pipeline", "data"))
        workers //= more.get("nnodes", 1)
        cores = [(core + worker) % (os.cpu_count() or 1) for worker in range(workers)]
        bound = "|".join(map(str, cores))
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_NO_USAGE_STATS": "1"}
        # Each rank has one processor: two engines whose threads share both processors take many times as long.
        request = {"arguments": arguments, "environment": environment, "cores": cores}
        if host is not None:
            environment |= {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": host.device}
            request["host"] = {"name": host.name, "folder": tempfile.mkdtemp(dir=engines.folder)}
        self._pid = engines.fork(request, theirs, self._log)
        theirs.close()

    # -- life

    def ready(self) -> None:
        self._read(0, START_S)

    @property
    def alive(self) -> bool:
        return runs(self._pid)

    def tree(self, named: str = "") -> list[int]:
        """Returns all processes of the engine, including its lead, or those with this command line."""
        return [pid for pid in tree_of(self._pid) if not named or named in command_line(pid)]

    def signal(self, number: int) -> None:
        for pid in self.tree():
            os.kill(pid, number)

    def kill(self) -> None:
        """Kills the engine and all processes that it started, at once."""
        tree = self.tree()
        self.signal(signal.SIGKILL)
        self._gone(tree)

    def stop(self) -> None:
        if not self.alive:
            return
        tree = self.tree()
        self._socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.alive, timeout_s=30)
        end(tree)
        self._gone(tree)

    def _gone(self, tree: list[int]) -> None:
        wait_until(lambda: not any(map(runs, tree)))
        self._socket.close()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    # -- requests

    def begin(
        self, prompt: Sequence[int], params: Params | None = None, max_tokens: int = MAX_TOKENS, **more: Any
    ) -> int:
        """Begins a request; see `answer`. `more` are further fields of its line, see `engine_process`."""
        return self._write(op="generate", prompt=list(prompt), params=params, max_tokens=max_tokens, **more)

    def answer(self, line_id: int) -> Answer:
        return Answer(**{"tokens": [], **self._read(line_id)})

    def answered(self, line_id: int) -> bool:
        """Checks that `answer` would return at once."""
        if line_id not in self._answers:
            self._hear(0.01)
        return line_id in self._answers

    def ask(
        self, prompt: Sequence[int], params: Params | None = None, max_tokens: int = MAX_TOKENS, **more: Any
    ) -> Answer:
        return self.answer(self.begin(prompt, params, max_tokens, **more))

    def begin_load(self, adapter: Adapter) -> int:
        """Begins to load an adapter in place of the one with its number."""
        line_id = self._write(op="load", adapter=adapter)
        self.counts()  # lines are begun in order
        return line_id

    def abort(self, line_id: int) -> None:
        self._read(self._write(op="abort", of=line_id))

    # -- state

    def counts(self) -> dict[str, int]:
        return self._read(self._write(op="counts"))

    def rests(self) -> bool:
        """Checks that no block is in use. An idle vLLM hears by itself which blocks came back."""
        return self.forgets()

    def forgets(self, *, connector: bool = False) -> bool:
        """Empties the prefix cache, unless a block is in use. `connector`: also what the connector has, used or not."""
        return bool(self._read(self._write(op="reset", connector=connector))["free"])

    def lead(self) -> SyncClient:
        """Connects to its lead; the caller closes the client."""
        return connect_sync(self.address)

    def held(self) -> dict[str, int]:
        """Returns the non-zero counts of its lead; empty at rest."""
        with self.lead() as lead:
            counts = lead.status().counts
        return {name: getattr(counts, name) for name in HELD if getattr(counts, name)}

    def let_go(self) -> None:
        """Releases all its leases, like a router that no longer needs them."""
        with self.lead() as lead:
            for lease in lead.list_leases().leases:
                lead.release_lease(lease.lease_id)

    # -- lines

    def _write(self, **line: Any) -> int:
        self._last_id += 1
        self._socket.sendall(json.dumps({"id": self._last_id, **line}).encode() + b"\n")
        return self._last_id

    def _read(self, line_id: int, timeout_s: float = WAIT_S) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while line_id not in self._answers:
            if not self._hear(max(0.001, deadline - time.monotonic())):
                raise AssertionError(f"engine {self.name} was silent for {timeout_s} s\n{self.log()[-4000:]}")
        return self._answers.pop(line_id)

    def _hear(self, timeout_s: float) -> bool:
        """Keeps the answers that arrive. Returns False if none arrives in time."""
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(2**20)
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(None)
        assert data, f"engine {self.name} died\n{self.log()[-6000:]}"
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._answers[answer.pop("id")] = answer
        return True


def pushed(key: bytes, source: str = "") -> dict[str, Any]:
    """Returns the intent of a push. `source` is its source's address, for D."""
    intent: dict[str, Any] = {"transferKey": base64.b64encode(key).decode(), "mode": "TRANSFER_MODE_PUSH"}
    return {"kvgrpc_intent": intent | ({"peer": {"address": source}} if source else {})}


class Pair:
    """P and D. `start` replaces either one that is gone."""

    def __init__(self, engines: Engines, *, more: Any = None, each: Any = None, **extra: Any) -> None:
        """`more` are arguments of both engines, `each` those of P and of D alone."""
        self._forked_from, self._extra, self._more, self._each = engines, extra, more or {}, each or {}
        self.on_loss = {"P": "fail", "D": "fail"}
        """Policy for loads that fail, of P and of D when they next start."""
        self._engines: dict[str, Engine] = {}
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def start(self) -> None:
        """Starts missing engines at once. An engine that lost its lead in a failed test is replaced."""
        for engine in self._engines.values():
            if engine.alive and not engine.tree(LEAD):
                engine.kill()
        gone = [name for name in "PD" if name not in self._engines or not self._engines[name].alive]
        for name in gone:
            core, more = "PD".index(name) % (os.cpu_count() or 1), {**self._more, **self._each.get(name, {})}
            on_loss, forked_from = self.on_loss[name], self._forked_from
            self._engines[name] = Engine(name, core, forked_from, extra=self._extra, on_loss=on_loss, more=more)
        for name in gone:
            self._engines[name].ready()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.stop()

    @property
    def p(self) -> Engine:
        return self._engines["P"]

    @property
    def d(self) -> Engine:
        return self._engines["D"]

    # -- a router's calls

    def expected(self, prompt: Sequence[int]) -> list[int]:
        """Returns the tokens of P alone, which then forgets the prompt."""
        known = tuple(prompt)
        if known not in self._expected:
            self._expected[known] = self.p.ask(prompt).tokens
            assert self.p.forgets()
        return self._expected[known]

    def pull(self, prompt: Sequence[int], **more: Any) -> Answer:
        """Runs the prefill leg, then the decode leg."""
        return self.d.ask(prompt, {**self.prefilled(prompt), **more})

    def prefilled(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Returns the params that P's answer has for D."""
        answer = self.p.ask(prompt, PREFILL, 1, **more)
        assert not answer.failed, answer
        assert answer.params["do_remote_prefill"] is True
        return dict(answer.params)

    def push(self, prompt: Sequence[int], *, first: str = "D") -> Answer:
        """Runs both legs at once."""
        legs = self.begin_push(prompt, first=first)
        source, target = self.p.answer(legs["P"]), self.d.answer(legs["D"])
        assert not source.failed, source
        return target

    def begin_push(self, prompt: Sequence[int], *, first: str = "D", max_tokens: int = MAX_TOKENS) -> dict[str, int]:
        key, legs = os.urandom(16), {}
        for name in (first, "DP".replace(first, "")):
            if name == "D":
                legs["D"] = self.d.begin(prompt, {"do_remote_prefill": True, **pushed(key, self.p.address)}, max_tokens)
            else:
                legs["P"] = self.p.begin(prompt, {**PREFILL, **pushed(key)}, 1)
        return legs

    # -- leftovers

    def at_rest(self) -> None:
        """Waits until neither engine nor lead holds anything. Releases offers for a next turn, because none comes."""
        for engine in (self.p, self.d):
            if engine.alive:
                engine.let_go()
                wait_until(lambda e=engine: e.held() == {}, engine.held)  # type: ignore[misc]
                wait_until(engine.rests, lambda: "blocks of vLLM are still in use")
