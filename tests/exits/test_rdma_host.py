"""Exit codes hold on hosts with RDMA adapters, where NIXL brings some libraries and finds others on the host.

For each kind of adapter UCX needs a library of the host, which brings the host's libnl; NIXL has a libnl as well.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import README, ROOT, code, section
from tests.service.engines import EXIT_S, SMALL_POOL, ServeProcess

Environment = dict[str, str]

_NETLINK = re.compile(r"/libnl-(route-)?3\b").search
_BINDING = re.compile(r"binding file (\S+) \[0\] to (\S+) \[0\]: normal symbol `(\w+)'")
BEGIN = {
    "nothing before": "",
    "the program has shown the host's libraries to all": """
import ctypes, os
ctypes.CDLL("libibverbs.so.1", mode=os.RTLD_GLOBAL)
""",
    "the program has loaded the host's libraries": """
import ctypes
ctypes.CDLL("libibverbs.so.1")
""",
}
AGENT = """
import numpy as np
from pathlib import Path
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.nixl.path import NixlPath

path = NixlPath(PrivateMemory.of(np.zeros(1 << 20, np.uint8)), "agent")
path.close()
maps = Path("/proc/self/maps").read_text().splitlines()
print(len({line.split()[-1] for line in maps if "libnl-route" in line}))
"""
WORKERS = """
import multiprocessing, sys
import numpy as np
from kvgrpc.engine import Engine, Rank
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, layout

def work(ticket, rank):
    with Rank(ticket, rank, [np.zeros((BLOCKS, LAYER_BYTES), np.uint8) for _ in range(LAYERS)]):
        pass

if __name__ == "__main__":
    with Engine.launch(pool=layout(), private_memory=True, world_size=2) as engine:
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=work, args=(engine.ticket, rank)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print([worker.exitcode for worker in workers])
"""


def run(program: list[str], environment: Environment) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        [sys.executable, *program], env=env, cwd=ROOT, capture_output=True, text=True, timeout=EXIT_S, check=False
    )


@pytest.mark.parametrize("before", BEGIN)
def test_a_process_that_made_an_agent_ends_with_0(rdma_host: Environment, before: str) -> None:
    done = run(["-c", BEGIN[before] + AGENT], rdma_host)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_each_libnl_is_bound_to_itself_and_drivers_of_the_host_to_nixl(rdma_host: Environment, tmp_path: Path) -> None:
    run(["-c", AGENT], {**rdma_host, "LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")})
    (log,) = tmp_path.glob("bindings.*")
    bound = _BINDING.findall(log.read_text())
    of_nixl = [("nixl" in user, "nixl" in used) for user, used, _ in bound if _NETLINK(user) and _NETLINK(used)]
    assert set(of_nixl) == {(True, True), (False, False)}
    (verbs,) = [used for user, used, symbol in bound if "libefa" in user and symbol == "verbs_register_driver_34"]
    assert "nixl" in verbs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_a_signal_stops_ends_with_0(
    rdma_host: Environment, tmp_path: Path, number: signal.Signals
) -> None:
    server = ServeProcess(tmp_path, "--listen", "127.0.0.1:0", *SMALL_POOL, environment=rdma_host, fresh=True)
    try:
        server.wait_ready()
        assert "libnl-route" in Path(f"/proc/{server.pid}/maps").read_text()
        server.signal(number)
        assert server.wait_exit() == 0
    finally:
        server.end()


@pytest.mark.parametrize("heading", ["## A session", "## Tensors by their names"])
def test_programs_of_the_readme_and_their_leads_end_in_order(rdma_host: Environment, heading: str) -> None:
    (program,), (expected,) = code(section(README, heading), "python"), code(section(README, heading), "text")
    done = run(["-c", program], rdma_host)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_workers_of_an_engine_end_in_order(rdma_host: Environment, tmp_path: Path) -> None:
    program = tmp_path / "workers.py"
    program.write_text(WORKERS)
    done = run([str(program)], rdma_host)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 0]\n", "")


def test_the_demo_and_its_processes_end_in_order(rdma_host: Environment) -> None:
    done = run(["-m", "examples.demo", "--json", "--datapath", "nixl"], rdma_host)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "stopping all processes"  # nothing after it
