"""Two servers of one host in network namespaces of their own, as in two pods: with a folder that both mount they move
bytes as within one pod, and without it over the network.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2
from tests.e2e.conftest import Pair, scattered
from tests.hosts import hosts
from tests.service.conftest import SETTINGS
from tests.service.engines import SMALL_POOL, SUCCEEDED, Engine, ServeProcess
from tests.service.values import prompt

TRUST = ("--insecure", "--dial-allow", f"{hosts.NETWORK}.0/24", "--read-blocks", "--drain-s", "0", *SMALL_POOL)
MOUNTED = "/mnt"
"""Where the second pod mounts the folder."""
OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""The command that starts a process which sees none of another pod, as Kubernetes does by default."""

SHM, CMA, COLLECTIVE = common_pb2.DATA_PATH_SHM, common_pb2.DATA_PATH_CMA, common_pb2.DATA_PATH_COLLECTIVE
Pods = Callable[..., Pair]


class FirstProcess(ServeProcess):
    """A server that is the first process of a PID namespace. The process that made the namespace waits for it."""

    @property
    def pid(self) -> int:
        waits = self.popen.pid
        return int(Path(f"/proc/{waits}/task/{waits}/children").read_text().split()[0])

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@contextmanager
def mounting(folder: Path) -> Iterator[Pods]:
    """Makes the pods. Yields what starts a source and a destination in them, with that folder if they have one."""
    with ExitStack() as stack:
        why_not = stack.enter_context(hosts.two_hosts())
        if why_not:
            pytest.skip(why_not)
        (shared := folder / "shared").mkdir(mode=0o700)
        mount = ("sh", "-c", f'mount --bind "$0" {MOUNTED} && exec "$@"', str(shared))

        def start(data_paths: str, *, mounts: bool, within: tuple[str, ...] = ()) -> Pair:
            engines = []
            for host, command, place in ((hosts.FIRST, (), str(shared)), (hosts.SECOND, mount, MOUNTED)):
                flags = ["--listen", f"{host.address}:0", "--data-paths", data_paths, *TRUST]
                flags += ["--shared-dir", place] if mounts else []
                lies_in = folder / f"{host.name}-{data_paths}-{mounts}-{len(within)}"
                kind = FirstProcess if within else ServeProcess
                process = kind(lies_in, *flags, settings=SETTINGS, fresh=True, within=(*host.within, *command, *within))
                stack.callback(process.end)
                engines.append(Engine(process))
                stack.callback(engines[-1].api.close)
            source, destination = engines
            return source, destination

        yield start


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with mounting(tmp_path_factory.mktemp("pods")) as start:
        yield start


def pulled(source: Engine, destination: Engine, seed: int) -> handshake_pb2.RankPath:
    """Pulls blocks, compares all bytes, and returns how the two ranks move them."""
    tokens = prompt(20 * 16 - 5)
    blocks, target = scattered(source, 20), scattered(destination, 20)
    written = source.write(blocks, seed)
    handed = source.hand_over(tokens, blocks)
    end = destination.wait(destination.pull(handed.grant, tokens, target).transfer_id)
    assert end.state == SUCCEEDED, end.failure
    assert destination.read(target) == written
    peers = destination.api.admin.ListPeers(admin_pb2.ListPeersRequest()).peers
    (path,) = next(peer for peer in peers if peer.engine_id == source.engine_id).paths
    assert [row.data_path for row in end.paths] == [path.data_path]
    return path


def rejected(path: handshake_pb2.RankPath) -> dict[int, str]:
    return {row.data_path: row.why for row in path.rejected_paths}


def test_with_the_folder_both_ways_go_over_shm(pods: Pods) -> None:
    pair = pods("shm,collective", mounts=True, within=OWN_PROCESSES)
    for seed, (source, destination) in enumerate((pair, pair[::-1])):
        path = pulled(source, destination, seed)
        assert path.data_path == SHM
        assert not path.rejected_paths


def test_without_the_folder_bytes_go_over_collective_and_the_reason_names_the_setting(pods: Pods) -> None:
    path = pulled(*pods("shm,cma,collective", mounts=False), 1)
    assert path.data_path == COLLECTIVE
    why = rejected(path)
    assert "shared_dir" in why[SHM]
    assert "shared_dir" in why[CMA]


def test_cma_reads_between_pods_that_see_each_other_s_processes(pods: Pods) -> None:
    path = pulled(*pods("cma,collective", mounts=True), 2)
    assert path.data_path == CMA


def test_cma_is_rejected_between_pods_that_do_not_see_each_other_s_processes(pods: Pods) -> None:
    path = pulled(*pods("cma,collective", mounts=True, within=OWN_PROCESSES), 3)
    assert path.data_path == COLLECTIVE
    assert "PID namespace" in rejected(path)[CMA]


def test_windows_are_met_in_the_folder(pods: Pods) -> None:
    path = pulled(*pods("window,collective", mounts=True, within=OWN_PROCESSES), 4)
    assert path.data_path == common_pb2.DATA_PATH_WINDOW
