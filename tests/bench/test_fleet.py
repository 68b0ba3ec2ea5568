"""`make fleet` with a few engines: its result has every figure, from a real etcd and a real `kvgrpc fleet`."""

import json
import subprocess
import sys

from tests.docs.pages import ROOT
from tests.registry.etcds import needs_etcd

SMALL = (
    "--engines", "8", "--ttl-s", "3", "--publishers", "1", "--rest-s", "0.2", "--restart-s", "0.5", "--picks", "10",
    "--parts", "fleet,peers", "--peers", "6",
)  # fmt: skip
TIMES = {"median", "p99", "max"}
KEYS = {
    "ttl_s": None,
    "registered_s": TIMES,
    "healthy_s": TIMES,
    "drain_seen_s": TIMES,
    "watch_core_percent": {
        "with_checks", "without_checks", "with_checks_at_restart", "without_checks_at_restart",
    },
    "etcd_core_percent": {"resting", "at_restart"},
    "bytes_per_engine": {"with_checks", "without_checks", "router"},
    "pick_ms_p99": {"clock", "processor"},
    "pick_ms_median": {"clock", "processor"},
    "failed_after_death_s": {"first", "last"},
    "evicted_after_kill_s": {"first", "last"},
    "peers": {"peers", "handshake_s", "bytes_per_peer", "idle_core_percent", "pull_ms", "pull_processor_ms"},
}  # fmt: skip


@needs_etcd
def test_a_small_fleet_gives_every_figure_and_leaves_by_itself() -> None:
    command = [sys.executable, "-m", "bench.fleet", "--json", *SMALL]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    figures = {name: value for name, value in found.items() if name not in {"machine", "versions", "options"}}
    assert {name: set(value) if isinstance(value, dict) else None for name, value in figures.items()} == KEYS
