"""Engines on hosts with RDMA adapters, whose libraries NIXL finds beside its own, end with 0."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.engines import ROOT

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE_S = 110.0
"""Timeout for an engine that starts, answers one request and ends, in seconds."""


@pytest.mark.parametrize(
    "connector",
    [
        {"kv_connector": "KVGrpcConnector", "kv_connector_module_path": "kvgrpc.integrations.vllm"},
        {"kv_connector": "NixlConnector"},
    ],
    ids=["ours", "vLLM's, in our bench"],
)
def test_an_engine_ends_with_0_beside_the_libraries_of_rdma_hosts(
    rdma_host: dict[str, str], model_folder: Path, connector: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "bench.hooks", str(model_folder), json.dumps(connector | {"kv_role": "kv_both"})]
    env = os.environ | rdma_host | ENVIRONMENT
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=ENGINE_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
