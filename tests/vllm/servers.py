"""vLLM's own HTTP servers, each on a processor of its own, and the usual routers of vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgrpc.client import connect_sync
from tests.vllm.engines import HELD, ROOT, free_port, wait_until
from tests.vllm.processes import command_line, tree_of

BIN = Path(sys.executable).parent
MODEL = "tiny"
"""Name under which requests ask for the model."""


@dataclass(frozen=True)
class Server:
    """An engine with its HTTP server and, if the connector is ours, its lead."""

    name: str
    port: int
    lead: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def held(self) -> dict[str, int]:
        with connect_sync(self.lead) as lead:
            counts = lead.status().counts
        return {name: getattr(counts, name) for name in HELD if getattr(counts, name)}

    def counted(self, metric: str, **labels: str) -> float:
        """Returns one of its metrics, summed over all labels except the stated ones."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        stated = [f'{name}="{value}"' for name, value in labels.items()]
        found = (line for line in lines if line.startswith(f"{metric}{{") and all(text in line for text in stated))
        return sum(float(line.split()[-1]) for line in found)

    def tree(self, named: str = "") -> list[int]:
        """Returns its processes, including its lead, or those with this command line."""
        (root, *_) = (pid for pid in tree_of(os.getpid()) if f"--port\0{self.port}" in command_line(pid))
        return [pid for pid in tree_of(root) if named in command_line(pid)]


@contextmanager
def running(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process tree, and ends it afterwards."""
    whole = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=whole, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def new_server(name: str) -> Server:
    """Returns a server with free addresses."""
    return Server(name, free_port(), f"127.0.0.1:{free_port()}")


def ours(server: Server, **extra: Any) -> dict[str, Any]:
    """Returns the configuration of our connector."""
    connector = {"kv_connector": "KVGrpcConnector", "kv_connector_module_path": "kvgrpc.integrations.vllm"}
    more = {"listen": server.lead, **extra}
    return {**connector, "kv_role": "kv_both", "engine_id": server.name, "kv_connector_extra_config": more}


@contextmanager
def serving(
    server: Server, core: int, folder: Path, transfer: Mapping[str, Any], flags: Sequence[str], **environment: str
) -> Iterator[Server]:
    """Starts vLLM's own server with its whole tree on one processor. The server is not ready yet."""
    # `vllm serve` asks for the version of a package that has another name for processors, so its module runs directly.
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    bound = ["taskset", "-c", str(core % (os.cpu_count() or 1))]
    command = [*bound, *program, *arguments(server, folder, transfer, flags)]
    with running(command, folder / f"http-{server.name}.log", **bound_to(core), **environment):
        yield server


def arguments(server: Server, folder: Path, transfer: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """Returns the arguments of vLLM's server. An empty `transfer` means no connector."""
    connector = ("--kv-transfer-config", json.dumps(transfer)) if transfer else ()
    model = ("--model", str(folder / "model"), "--served-model-name", MODEL, "--dtype", "bfloat16")
    place = ("--host", "127.0.0.1", "--port", str(server.port))
    return [*model, "--skip-tokenizer-init", "--enforce-eager", *place, *connector, *flags]


def bound_to(core: int) -> dict[str, str]:
    """Returns the environment that binds vLLM to its processor."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def usual_router(p: Server, d: Server, log: Path) -> Iterator[str]:
    """Runs vllm-router, as for vLLM's own connector."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        str(BIN / "vllm-router"), "--vllm-pd-disaggregation", "--prefill", p.url, "--decode", d.url,
        "--kv-connector", "nixl", "--host", "127.0.0.1", "--port", url.rpartition(":")[2],
        "--prometheus-port", str(free_port()), "--policy", "round_robin",
    ]  # fmt: skip
    with running(command, log):
        wait_until(lambda: healthy(url))
        yield url


@contextmanager
def example_router(p: Server, d: Server, log: Path, mode: str) -> Iterator[str]:
    """Runs examples/router, which knows both leads. `mode` is pull or push."""
    port = free_port()
    command = [sys.executable, str(ROOT / "examples/router/router.py"), "--prefill", p.url, "--prefill-lead", p.lead]
    command += ["--decode", d.url, "--decode-lead", d.lead, "--port", str(port), "--mode", mode]
    with running(command, log):
        wait_until(lambda: listens(port))
        yield f"http://127.0.0.1:{port}"


def healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@contextmanager
def waiting_client(url: str, body: bytes) -> Iterator[None]:
    """Sends a request as a client that leaves at the end without its answer."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        yield
