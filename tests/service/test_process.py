"""`kvgrpc serve` as a process: its start, its end, and its errors."""

import json
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import common_pb2, handshake_pb2, lease_pb2, transfer_pb2
from tests.service.conftest import Start
from tests.service.consumer import Consumer
from tests.service.engines import SMALL_POOL, SUCCEEDED, Engine, ServeProcess, wait_until
from tests.service.values import dur, prompt

Serve = Callable[..., ServeProcess]
TOKENS = prompt(16)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts processes that may end by themselves."""
    numbers = count()
    with ExitStack() as stack:

        def begin(*flags: str, settings: str = "", stale_ready_file: bool = False) -> ServeProcess:
            folder = tmp_path / f"process-{next(numbers)}"
            folder.mkdir()
            if stale_ready_file:
                (folder / "ready.json").write_text('{"address": "127.0.0.1:1"}')
            process = ServeProcess(folder, *flags, settings=settings, fresh=True)
            stack.callback(process.end)
            return process

        yield begin


@pytest.fixture
def taken() -> Iterator[str]:
    """Yields an address on which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_that_is_taken_ends_it_with_3(serve: Serve, taken: str) -> None:
    process = serve("--listen", taken, *SMALL_POOL)
    assert process.wait_exit() == 3
    assert taken in process.log
    assert not process.ready_file.exists()


def test_two_servers_never_share_a_port(source: Engine, serve: Serve) -> None:
    process = serve("--listen", source.address, *SMALL_POOL)
    assert process.wait_exit() == 3
    source.check_alive()


# One case for each way that a wrong value takes; tests/test_config.py has the values.
BAD_CONFIGURATIONS = {
    "no TOML": ((), "listen = \n", "config"),
    "in the file": ((), "engine_id = 5\n", "engine_id"),
    "a flag": (("--data-paths", "pigeon"), "", "data_paths"),
    "a flag of the pool": (("--blocks", "0"), "", "pool.blocks"),
    "found at the start": (("--listen", "0.0.0.0:0", "--insecure"), "", "advertise"),
    "a limit": (("--limit", "lease_ttl_s=-1"), "", "limits.lease_ttl_s"),
    "an unknown limit": (("--limit", "lease_tll_s=1"), "", "KVGRPC_LIMITS_LEASE_TTL_S"),
    "no limit": (("--limit", "lease_ttl_s"), "", "limit"),
    "log level": (("--log-level", "loud"), "", "log"),
}


@pytest.mark.parametrize("case", BAD_CONFIGURATIONS)
def test_a_configuration_that_cannot_be_ends_it_with_2_and_names_the_setting(serve: Serve, case: str) -> None:
    flags, settings, named = BAD_CONFIGURATIONS[case]
    process = serve("--listen", "127.0.0.1:0", *flags, settings=settings)
    assert process.wait_exit() == 2, process.log
    assert named in process.log
    assert "Traceback" not in process.log


def test_a_pool_that_does_not_fit_into_memory_ends_it_with_4(serve: Serve) -> None:
    process = serve("--listen", "127.0.0.1:0", "--blocks", "100000000")
    assert process.wait_exit() == 4
    assert "does not fit" in process.log


def test_a_readiness_file_of_an_earlier_life_ends_at_the_next_start(serve: Serve, taken: str) -> None:
    process = serve("--listen", taken, *SMALL_POOL, stale_ready_file=True)
    assert process.wait_exit() == 3
    assert not process.ready_file.exists()


def says_where_it_serves(engine: Engine) -> bool:
    return f"kvgrpc serving {engine.address} engine {engine.engine_id}" in engine.process.log


def test_port_0_takes_a_free_port_and_says_which(source: Engine, destination: Engine) -> None:
    assert source.address != destination.address
    for engine in (source, destination):
        assert not engine.address.endswith(":0")
        wait_until(partial(says_where_it_serves, engine))  # written after the readiness file


def test_a_signal_ends_it_in_order_though_clients_watch_and_wait(start: Start) -> None:
    engines = start((), ())
    for engine, number in zip(engines, (signal.SIGTERM, signal.SIGINT), strict=True):
        ready = json.loads(engine.process.ready_file.read_text())
        assert ready == {
            "address": engine.address,
            "engine_id": engine.engine_id,
            "pid": engine.process.pid,
        }
        handed = engine.hand_over(TOKENS)
        watch = engine.api.transfers.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=60)
        next(watch)
        keep = engine.api.leases.KeepAlive(iter([lease_pb2.KeepAliveRequest()]), timeout=60)
        next(keep)
        waiting = engine.api.transfers.WaitTransfer.future(
            transfer_pb2.WaitTransferRequest(transfer_id=handed.transfer.transfer_id, timeout=dur(60)), timeout=60
        )
        engine.process.signal(number)
        assert engine.process.wait_exit() == 0
        assert not engine.process.ready_file.exists()
        with pytest.raises(grpc.RpcError):
            list(watch)
        assert waiting.exception() is not None or waiting.result().transfer.failure.message


def test_a_server_that_stops_ends_the_streams_of_its_peers_in_order(start: Start) -> None:
    (engine,) = start(())
    consumer = Consumer(engine)
    consumer.handshake()
    silence = threading.Event()

    def rows(*first: peer_pb2.KeepLivenessRequest) -> Iterator[Any]:
        yield from first
        silence.wait()

    beats = engine.api.peer.KeepLiveness(rows(peer_pb2.KeepLivenessRequest(caller=consumer.caller)), timeout=60)
    next(beats)
    conversation = engine.api.peer.Converse(rows(), timeout=60)
    conversation.initial_metadata()
    try:
        engine.process.signal(signal.SIGTERM)
        assert [call.code() for call in (beats, conversation)] == [grpc.StatusCode.OK] * 2
        engine.process.wait_exit()
    finally:
        silence.set()


def test_while_it_drains_it_takes_no_new_work_and_serves_the_old(start: Start) -> None:
    source, destination = start(("--drain-s", "30"), ())
    handed = source.hand_over(TOKENS)
    blocks = source.allocate(1)
    source.process.signal(signal.SIGTERM)
    wait_until(lambda: refusal_of_new_work(source, blocks) == ("FAILED_PRECONDITION", "DRAINING"))
    pulled = destination.pull(handed.grant, TOKENS, destination.allocate(1))
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    assert source.process.wait_exit() == 0


def refusal_of_new_work(engine: Engine, blocks: list[int]) -> tuple[str, str]:
    try:
        handed = engine.hand_over(TOKENS, blocks)
    except grpc.RpcError:
        refusal = engine.api.refusal(lambda: engine.hand_over(TOKENS, blocks))
        return refusal.code, refusal.reason
    engine.release(handed.lease.lease_id)
    return "", ""


def test_a_drain_has_an_end(start: Start) -> None:
    (engine,) = start(("--drain-s", "0.3"))
    engine.hand_over(TOKENS)
    engine.process.signal(signal.SIGTERM)
    assert engine.process.wait_exit() == 0


def test_it_leaves_no_file_behind_when_it_is_killed(start: Start, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    (engine,) = start(())
    engine.process.kill()
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"kvgrpc.toml", "log", "ready.json"}
    assert set(Path("/dev/shm").iterdir()) <= before


def hidden_nixl(tmp_path: Path) -> str:
    """Returns a PYTHONPATH under which no variant of NIXL can be imported."""
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        package = tmp_path / "hidden" / name
        package.mkdir(parents=True)
        lines = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        (package / "__init__.py").write_text(lines)
    return os.pathsep.join([str(tmp_path / "hidden"), str(Path(__file__).parent.parent.parent)])


def test_without_nixl_it_says_so_and_the_other_paths_work(start: Start, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": hidden_nixl(tmp_path)}
    flags = ("--data-paths", "nixl,shm")
    source, destination = start(flags, flags, **environment)
    capabilities = source.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest())
    paths = {path.data_path: path for path in capabilities.data_paths}
    assert not paths[common_pb2.DATA_PATH_NIXL].available
    assert paths[common_pb2.DATA_PATH_NIXL].why.startswith("NIXL is not installed: install kvgrpc")
    assert paths[common_pb2.DATA_PATH_SHM].available
    blocks, target = source.allocate(1), destination.allocate(1)
    written = source.write(blocks, seed=4)
    pulled = destination.pull(source.hand_over(TOKENS, blocks).grant, TOKENS, target)
    assert destination.wait(pulled.transfer_id).state == SUCCEEDED
    assert destination.read(target) == written


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_server_costs_nothing_and_does_without_torch(start: Start) -> None:
    """An idle server, also one with a peer, may use 10 % of a core. A busy loop would use 100 %."""
    source, destination = start(("--data-paths", "nixl,shm,cma"), ("--data-paths", "nixl"))
    pulled = destination.pull(source.hand_over(TOKENS).grant, TOKENS, destination.allocate(1))
    destination.wait(pulled.transfer_id)
    pids = [source.process.pid, destination.process.pid]
    used, since = [processor_s(pid) for pid in pids], time.monotonic()
    wait_until(lambda: time.monotonic() - since >= 1.5)
    share = [(processor_s(pid) - before) / (time.monotonic() - since) for pid, before in zip(pids, used, strict=True)]
    assert max(share) <= 0.1
    assert all("libtorch" not in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def test_no_process_maps_the_pool_of_a_server_anew_to_write_into_it(source: Engine) -> None:
    """This includes processes of the same user, which may open every descriptor of the server and change its mode."""
    folder = Path(f"/proc/{source.process.pid}/fd")
    pools = [fd for fd in folder.iterdir() if "memfd:kvgrpc-pool" in str(fd.readlink())]
    pool = next(fd for fd in pools if fd.lstat().st_mode & 0o200)  # descriptors of peers' pools are read-only
    mode = pool.stat().st_mode
    pool.chmod(0o600)
    try:
        with pool.open("r+b") as file:
            with pytest.raises(PermissionError):
                mmap.mmap(file.fileno(), mmap.PAGESIZE)
            with pytest.raises(PermissionError):
                os.write(file.fileno(), b"x")
            mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ).close()
    finally:
        pool.chmod(mode)
