"""Workers must be on the host of their scheduler, for any executor."""

from pathlib import Path

import pytest

from kvgrpc.config import PoolConfig
from kvgrpc.integrations.vllm.meeting import WorkerGreeting, check_here

POOL = PoolConfig().layout()


def test_a_worker_on_another_host_stops_the_start_and_is_named(tmp_path: Path) -> None:
    """Ray may place a worker elsewhere, and vLLM's configuration does not say so."""
    here, elsewhere = (
        WorkerGreeting(str(tmp_path), [], POOL, "here"),
        WorkerGreeting(str(tmp_path / "none"), [], POOL, "gpu-7"),
    )
    check_here([[here, here], [here, here]])
    what = r"rank 1 of stage 1 is on gpu-7, and .*/none is not on .*\. To do: keep all workers of an engine on one host"
    with pytest.raises(ValueError, match=what):
        check_here([[here, here], [here, elsewhere]])
