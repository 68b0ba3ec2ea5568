"""Routers before two vLLM servers that tests share, beside those of `tests.vllm.servers`."""

import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.vllm.engines import ROOT, free_port, wait_until
from tests.vllm.servers import BIN, Server, listens, running

GO = shutil.which("go")


@contextmanager
def go_router(p: Server, d: Server, folder: Path, mode: str, *flags: str) -> Iterator[str]:
    """Runs examples/router-go, built in `folder` once, which relays and watches both leads. `mode` is pull or push."""
    binary, url = folder / "router-go", f"http://127.0.0.1:{free_port()}"
    if not binary.exists():
        subprocess.run([str(GO), "build", "-o", binary, "."], cwd=ROOT / "examples" / "router-go", check=True)
    command = [str(binary), "-listen", url.removeprefix("http://"), "-mode", mode, *flags]
    command += ["-prefill", f"relay,{p.url},{p.lead}", "-decode", f"relay,{d.url},{d.lead}"]
    with running(command, folder / f"router-go-{mode}.log"):
        wait_until(lambda: _takes_work(url))
        yield url


def _takes_work(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@contextmanager
def discovering_router(discovery_port: int, log: Path) -> Iterator[str]:
    """Runs vllm-router, with which both engines register at this port."""
    port = free_port()
    command = [
        str(BIN / "vllm-router"), "--vllm-pd-disaggregation", "--vllm-discovery-address", f"127.0.0.1:{discovery_port}",
        "--kv-connector", "nixl", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
        "--policy", "round_robin",
    ]  # fmt: skip
    with running(command, log):
        wait_until(lambda: listens(port))
        wait_until(lambda: all(word in log.read_text() for word in ("Add Prefill", "Add Decode")), log.read_text)
        yield f"http://127.0.0.1:{port}"
