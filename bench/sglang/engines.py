"""SGLang's servers for a run: pairs by back end, an engine without disaggregation, and their requests."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.sglang.servers import NO_TOKENIZER, ROOT, STAND_IN, Pair, Server, ids_of, sampled

KVGRPC, OWN = "kvgrpc", "mooncake_tcp"
SITE = Path(__file__).parent / "site"
LIBRARIES = ROOT / ".tools" / "mooncake"
"""Folder with the libraries of Debian that SGLang's own back end links, though TCP needs none of them."""
PAGE_TOKENS = 16


def environment_of(backend: str, times: Path | None = None) -> dict[str, str]:
    """Returns the environment of a server with this back end. `times`: see `site/kvgrpc_bench.py`."""
    found = {"OMP_NUM_THREADS": "1", "SGLANG_HOST_IP": "127.0.0.1"}
    found["PYTHONPATH"] = os.pathsep.join(map(str, (STAND_IN, ROOT, SITE)))
    if backend == OWN:
        folders = [str(LIBRARIES / part / "x86_64-linux-gnu") for part in ("usr/lib", "lib")]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    if times is not None:
        np.zeros(2).tofile(times)
        found["BENCH_KVGRPC_TIMES"] = str(times)
    return found


def server(
    name: str, folder: Path, mode: str, backend: str = KVGRPC, times: Path | None = None, **environment: str
) -> Server:
    """Returns a server that is not started yet."""
    flags = (*NO_TOKENIZER, *(("--disaggregation-transfer-backend", backend) if mode else ()))
    return Server(name, folder, mode, PAGE_TOKENS, flags, **environment_of(backend, times), **environment)


class Startable(Protocol):
    """A server of either program."""

    def start(self) -> None: ...
    def wait(self) -> None: ...
    def stop(self) -> None: ...


@contextmanager
def started(servers: Sequence[Startable]) -> Iterator[None]:
    """Runs servers, and kills them afterwards."""
    with ExitStack() as stack:
        for one in servers:
            stack.callback(one.stop)
            one.start()
        for one in servers:
            one.wait()
        yield


def first_token_s(pair: Pair, prompt: Sequence[int], room: int) -> tuple[float, list[int]]:
    """Returns the time from sending both legs of a request to decode's first token, and the token."""
    body = pair.body(prompt, 1, room)
    began = time.perf_counter()
    _, answer = pair.ask_both(body, body)
    return time.perf_counter() - began, ids_of(answer)


def first_token_alone_s(one: Server, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Returns the same of an engine that does both."""
    body: dict[str, Any] = {"input_ids": list(prompt), **sampled(1)}
    began = time.perf_counter()
    answer = one.ask("/generate", body)
    return time.perf_counter() - began, ids_of(answer)


def hook_us(times: Path) -> float:
    """Returns the time in kvgrpc's calls, per step of SGLang that had some, in microseconds."""
    seconds, steps = np.fromfile(times)
    return float(seconds / steps * 1e6) if steps else 0.0
