"""A server's own pool on a device: bytes move directly where a data path reaches the device, else through a mirror."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.config import DATA_PATHS, Config, PoolConfig
from kvgrpc.core.actions import CopyOut
from kvgrpc.core.node import Node
from kvgrpc.core.values.pieces import Pieces
from kvgrpc.datapath.cuda_vmm import libcuda
from kvgrpc.datapath.cuda_vmm.memory import VmmMemory
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.errors import PreconditionFailed, Reason
from kvgrpc.local_ranks import ALONE, RankMaker
from kvgrpc.server import Server
from kvgrpc.service.runner import Runner
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2
from tests.datapath.cuda_vmm.fake_driver import DRIVER
from tests.e2e.slow_pulls import LIMITS, SLOW, begin_slow_pull
from tests.engine.mirrored.fake_device import FakeDevice
from tests.service.conftest import SETTINGS, SHARED
from tests.service.device_pools import DeviceEngine, UnreachedMemory, environment
from tests.service.engines import FAILED, LAYERS, RETURNED, SUCCEEDED, Engine, ServeProcess, blocks_for
from tests.service.pushes import check_a_good_push
from tests.service.values import prompt

ON_DEVICE = ("--device", "cuda:0")
EXIT_CONFIG = 2
KINDS = {
    "a mirror by shm": (("--data-paths", "shm"), False),
    "a mirror by cma": (("--data-paths", "cma"), False),
    "a mirror by nixl, which refuses the device": (("--data-paths", "nixl"), False),
    "a mirror where no driver exports the device": (("--data-paths", "cuda_vmm,shm"), False),
    "a mirror with checksums": (("--data-paths", "shm,nixl", "--checksums"), False),
    "the device itself by nixl": (("--data-paths", "shm,nixl"), True),
    "a mirror for checksums though nixl reaches the device": (("--data-paths", "nixl", "--checksums"), True),
}
HAS_MIRROR = {name: not (reached and "--checksums" not in flags) for name, (flags, reached) in KINDS.items()}


class Pair:
    """A server with its pool on a device, and a server with its pool on the host."""

    def __init__(self, folder: Path, kind: str) -> None:
        flags, reached = KINDS[kind]
        made = environment("reached" if reached else "")
        self.processes = [
            ServeProcess(folder / "device", *SHARED, *flags, *ON_DEVICE, settings=SETTINGS, environment=made),
            ServeProcess(folder / "host", *SHARED, *flags, settings=SETTINGS),
        ]
        self.device, self.host = DeviceEngine(self.processes[0]), Engine(self.processes[1])

    def close(self) -> None:
        for engine in (self.device, self.host):
            engine.api.close()
        for process in self.processes:
            process.end()


@contextmanager
def on_one_gpu(
    folder: Path, settings: str = SETTINGS, slow: tuple[str, ...] = ()
) -> Iterator[tuple[DeviceEngine, DeviceEngine]]:
    """Runs two servers with pools on one GPU, whose only data path is by descriptors of its memory. `slow` holds more
    flags of the second one.
    """
    flags = (*SHARED, "--data-paths", "cuda_vmm", *ON_DEVICE)
    with ExitStack() as ends:
        engines = []
        for name, more in (("one", ()), ("other", slow)):
            made = environment("exported")
            process = ServeProcess(folder / name, *flags, *more, settings=settings, environment=made)
            ends.callback(process.end)
            engines.append(DeviceEngine(process))
            ends.callback(engines[-1].api.close)
        yield engines[0], engines[1]


@pytest.fixture
def exported(tmp_path: Path) -> Iterator[tuple[DeviceEngine, DeviceEngine]]:
    with on_one_gpu(tmp_path) as engines:
        yield engines


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, request.param)
    yield made
    made.close()


def pulled(source: Engine, destination: Engine, seed: int) -> tuple[list[int], list[bytes]]:
    """Pulls blocks. Returns the target blocks and the bytes that they must have."""
    tokens = prompt(40, seed)
    given, taken = source.allocate(blocks_for(40)), destination.allocate(blocks_for(40))
    written = source.write(given, seed)
    grant = source.hand_over(tokens, given).grant
    pull = destination.pull(grant, tokens, taken)
    ended = destination.wait(pull.transfer_id)
    assert ended.state == SUCCEEDED, ended
    return taken, written


def test_pulls_and_pushes_bring_the_bytes_of_the_device_and_to_it(pair: Pair) -> None:
    taken, written = pulled(pair.device, pair.host, seed=1)
    assert pair.host.read(taken) == written
    taken, written = pulled(pair.host, pair.device, seed=2)
    assert pair.device.on_device(taken, LAYERS) == written
    assert pair.device.read(taken) == written
    check_a_good_push(pair.device, pair.host, seed=3)
    check_a_good_push(pair.host, pair.device, seed=4)


def test_what_came_from_one_peer_goes_on_to_another(pair: Pair) -> None:
    taken, written = pulled(pair.host, pair.device, seed=5)
    tokens, target = prompt(40, 5), pair.host.allocate(blocks_for(40))
    pull = pair.host.pull(pair.device.hand_over(tokens, taken).grant, tokens, target)
    assert pair.host.wait(pull.transfer_id).state == SUCCEEDED
    assert pair.host.read(target) == written


def test_pulls_and_pushes_between_pools_of_one_gpu_go_by_descriptors(
    exported: tuple[DeviceEngine, DeviceEngine],
) -> None:
    one, other = exported
    taken, written = pulled(one, other, seed=6)
    assert other.on_device(taken, LAYERS) == written
    assert other.read(taken) == written
    taken, written = pulled(other, one, seed=7)
    assert one.on_device(taken, LAYERS) == written
    check_a_good_push(one, other, seed=8)
    check_a_good_push(other, one, seed=9)
    (peer,) = other.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    assert {path.data_path for path in peer.paths} == {common_pb2.DATA_PATH_CUDA_VMM}
    assert all("mapped read-only and copied on the same GPU" in path.why for path in peer.paths)


def test_a_source_that_is_killed_while_its_gpu_is_read_fails_the_pull_and_its_reader_serves_on(tmp_path: Path) -> None:
    with on_one_gpu(tmp_path, LIMITS, SLOW) as (source, destination):
        _, pulled = begin_slow_pull(source, destination)
        source.process.kill()
        end = destination.wait(pulled.transfer_id)
        assert (end.state, end.memory) == (FAILED, RETURNED)
        assert destination.counts().pinned_block_count == 0


def test_status_says_by_what_the_device_is_reached(pair: Pair, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["pair"]
    rows = pair.device.api.handshake.GetCapabilities(handshake_pb2.GetCapabilitiesRequest()).data_paths
    usable = {row.why for row in rows if row.available}
    assert usable
    assert all(("of a mirror of cuda:0" in why) == HAS_MIRROR[kind] for why in usable), rows
    assert ("moves by a mirror" in pair.processes[0].log) == HAS_MIRROR[kind]


def test_a_device_that_is_not_there_stops_the_start_and_says_what_to_do() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    serve = [sys.executable, "-m", "kvgrpc", "serve", "--port", "0", "--device", "cuda:0"]
    done = subprocess.run(serve, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "finds no CUDA device" in done.stderr
    assert "finds no CUDA device: install a driver" in done.stderr
    assert "set pool.device to host" in done.stderr
    assert "serving" not in done.stdout


class Made(list[UnreachedMemory]):
    """A maker of memory that keeps what it made."""

    def __call__(self, device: str, nbytes: int, *, exported: bool) -> UnreachedMemory:
        self.append(UnreachedMemory(device, nbytes))
        return self[-1]


CONFIG = Config(listen="127.0.0.1:0", data_paths=("shm",), pool=PoolConfig(blocks=8, layers=1, device="cuda:3"))


async def test_each_life_has_memory_of_its_own_on_the_device() -> None:
    made = Made()
    server = Server(CONFIG, device_memory=made)
    await server.start()
    await server.end_engine()
    assert [memory.name for memory in made] == ["cuda:3", "cuda:3"]
    assert [memory.closed for memory in made] == [True, False]
    await server.stop()
    assert made[1].closed


class Both(UnreachedMemory):
    """Memory that can have a mirror. With `exported`, peers also get descriptors."""

    def __init__(self, device: str, nbytes: int, *, exported: bool = False) -> None:
        self._exported = exported
        super().__init__(device, nbytes)

    def _as_known(self) -> PrivateMemory:
        if not self._exported:
            return super()._as_known()
        return VmmMemory(DRIVER, int(self.name.removeprefix("cuda:")), self._device.nbytes)


@pytest.mark.parametrize(
    ("data_paths", "checksums", "exported"),
    [
        (("cuda_vmm", "shm"), False, True),
        (("cuda_vmm", "shm"), True, False),
        (("shm", "cuda_vmm"), False, False),
        (DATA_PATHS, False, False),
        (("shm",), False, False),
    ],
)
def test_the_driver_makes_a_pool_only_where_its_data_path_comes_first_and_nobody_asks_for_checksums(
    data_paths: tuple[str, ...], checksums: bool, exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libcuda, "load", lambda: DRIVER)
    asked = []

    def make(device: str, nbytes: int, *, exported: bool) -> Both:
        asked.append(exported)
        return Both(device, nbytes, exported=exported)

    before = DRIVER.left
    config = replace(
        CONFIG, data_paths=data_paths, checksums=checksums, pool=PoolConfig(blocks=8, layers=1, device="cuda:1")
    )
    rank, status = RankMaker(config, Runner(Node()), make, lambda: "127.0.0.1:1").of_own_pool(4096)
    assert asked == [exported]
    assert rank.mirrored is not exported
    said = {name: (ok, why) for name, ok, why in status}
    assert said["shm"][0] is rank.mirrored
    if "cuda_vmm" in data_paths and not checksums and not exported:
        assert said["cuda_vmm"] == (False, ALONE)
    rank.retired = True
    assert rank.close(0.0)
    left = (before[0] + 1, before[1] + 1) if exported else before
    assert DRIVER.left == left, "the pool's, which is this test's to free"


async def test_after_a_copy_that_was_lost_the_memory_of_its_device_is_not_at_rest() -> None:
    made = Made()
    rank, _ = RankMaker(CONFIG, Runner(Node()), made, lambda: "127.0.0.1:1").of_own_pool(4096)
    device = made[0].device()
    device.errors["out"] = RuntimeError("an illegal memory access was encountered")
    rank.retired = True
    pieces = Pieces(*(np.array([number], dtype=np.int64) for number in (0, 64, 1)))
    rank.perform(CopyOut(0, "lost", pieces))
    await asyncio.to_thread(device.wait_started, "out")
    assert not await asyncio.to_thread(rank.close, 0.0)
    assert not made[0].closed


async def test_a_mirror_that_the_device_refuses_stops_the_start() -> None:
    class Refuses(FakeDevice):
        def open(self, mirror: object) -> None:
            raise PreconditionFailed(Reason.FEATURE_UNAVAILABLE, "host memory could not be page-locked")

    made = Made()

    def make(device: str, nbytes: int, *, exported: bool) -> UnreachedMemory:
        made(device, nbytes, exported=exported).put(Refuses(nbytes=nbytes))
        return made[0]

    with pytest.raises(PreconditionFailed, match="page-locked"):
        await Server(CONFIG, device_memory=make).start()
    assert made[0].closed
