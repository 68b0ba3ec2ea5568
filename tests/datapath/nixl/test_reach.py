"""Shows what ends a peer's reach over NIXL: a registration does not, where UCX has no RDMA device.

docs/security.md tells operators so. A UCX that checks remote keys in software fails these tests, and that page and
the choice of the private window may then be looked at again.
"""

import pickle

import pytest

from tests.datapath.nixl.peer import run_python

SOURCE = """
    import pickle, subprocess, sys
    import numpy as np
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("source", nixl_agent_config(True, True, 0, backends=["UCX"]))
    memory = np.full(1 << 16, 7, dtype=np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    reader = subprocess.Popen(
        [sys.executable, "-c", pickle.loads(bytes.fromhex(sys.argv[1])), str(memory.ctypes.data)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )
    reader.stdin.write(agent.get_agent_metadata().hex().encode() + b"\\n")
    reader.stdin.flush()
    while b"registered" not in (line := reader.stdout.readline()):
        assert line, "the reader ended"
    agent.deregister_memory(registered)
    memory[:] = 9
    reader.stdin.write(b"go on\\n")
    reader.stdin.flush()
    print(reader.stdout.readline().decode().strip(), memory[0])
    reader.wait()
"""
READER = """
import sys, time
import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

agent = nixl_agent("reader", nixl_agent_config(True, True, 0, backends=["UCX"]))
memory = np.zeros(1 << 16, dtype=np.uint8)
agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
peer = agent.add_remote_agent(bytes.fromhex(sys.stdin.readline()))
there = agent.get_xfer_descs([(int(sys.argv[1]), memory.nbytes, 0)], "DRAM")
here = agent.get_xfer_descs([(memory.ctypes.data, memory.nbytes, 0)], "DRAM")

def move(operation):
    transfer = agent.initialize_xfer(operation, here, there, peer)
    state, deadline = agent.transfer(transfer), time.monotonic() + 5
    while state == "PROC" and time.monotonic() < deadline:
        state = agent.check_xfer_state(transfer)
    return state

print("registered", move("READ"), memory[0], flush=True)
sys.stdin.readline()
read = move("READ"), int(memory[0])
memory[:] = 5
print(*read, move("WRITE"), flush=True)
"""


@pytest.mark.parametrize("transports", ["tcp", "tcp,sm", "tcp,cma"])
def test_memory_is_read_and_written_after_its_registration_ended(transports: str) -> None:
    result = run_python(SOURCE, pickle.dumps(READER).hex(), {"UCX_TLS": transports, "PYTHONUNBUFFERED": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "DONE 9 DONE 5", result.stdout + result.stderr
