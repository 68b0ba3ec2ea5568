"""Two vLLM servers that export their spans, and those of their leads, to a collector."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.otlp import Collector, collecting
from tests.vllm.engines import BLOCK_TOKENS, START_S, wait_until
from tests.vllm.servers import Server, healthy, new_server, ours, serving

FLAGS = ("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "400")
SOON_MS = "100"
"""Delay before spans are exported, in milliseconds."""
Servers = tuple[Server, Server]


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@contextmanager
def exporting(collector: Collector, folder: Path, **extra: Any) -> Iterator[Servers]:
    """Yields P and D. A lead has its server's service name, as if one variable served a whole container."""
    both = new_server("P"), new_server("D")
    flags = (*FLAGS, "--otlp-traces-endpoint", collector.endpoint.replace("http://", "grpc://"))
    with ExitStack() as stack:
        for core, server in enumerate(both):
            environment = {"OTEL_SERVICE_NAME": server.name, "OTEL_BSP_SCHEDULE_DELAY": SOON_MS}
            stack.enter_context(serving(server, core, folder, ours(server, **extra), flags, **environment))
        for server in both:
            wait_until(lambda s=server: healthy(s.url), timeout_s=START_S)  # type: ignore[misc]
        yield both


@pytest.fixture(scope="session")
def servers(collector: Collector, model_folder: Path) -> Iterator[Servers]:
    with exporting(collector, model_folder) as both:
        yield both
