"""The shared folder: what a rank finds there under a name that a peer states, and what it leaves alone."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvgrpc.core.values.endpoints import RankEndpoint, ShmEndpoint
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.host.memory import SharedMemory
from kvgrpc.datapath.host.process_socket import ProcessSocket
from kvgrpc.datapath.paths.shm import ShmPath
from kvgrpc.datapath.shared_folder import SharedFolder, new_name, place_of
from kvgrpc.errors import InvalidRequest
from tests.datapath.peers import open_descriptors, reach

NAME = f"kvgrpc-{'0' * 32}"


@contextlib.contextmanager
def rank(folder: Path | None) -> Iterator[ShmPath]:
    shared = SharedFolder(str(folder)) if folder is not None else None
    memory = SharedMemory.create(4096)
    path = ShmPath(memory, socket=ProcessSocket(shared))
    yield path
    path.close()
    memory.close()
    if shared is not None:
        shared.close()


def offer(path: ShmPath) -> ShmEndpoint:
    part = path.offer(RankEndpoint(0), "reader").shm
    assert part is not None
    return part


def bound(path: Path) -> socket.socket:
    """Returns a socket at that path, at which nobody listens."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_RDONLY)
    made.bind(f"/proc/self/fd/{folder}/{path.name}")  # the path itself may be too long
    os.close(folder)
    return made


def elsewhere(part: ShmEndpoint, folder: Path) -> ShmEndpoint:
    """Returns an endpoint as one that is found in the folder alone, as by a rank of another network namespace."""
    name = new_name()
    (folder / part.socket_path[1:]).rename(folder / name)
    return replace(part, socket_path=f"@{name}")


def test_a_rank_listens_in_the_folder_for_its_user_alone_and_leaves_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    with rank(tmp_path) as path:
        file = tmp_path / offer(path).socket_path[1:]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_a_rank_is_found_in_the_folder_wherever_the_peer_has_mounted_it(tmp_path: Path) -> None:
    (folder := tmp_path / "here").mkdir()
    (tmp_path / ("there" * 40)).symlink_to(folder)  # longer than a socket's path may be
    with rank(folder) as source, rank(tmp_path / ("there" * 40)) as reader:
        reach(reader, RankEndpoint(0, shm=elsewhere(offer(source), folder))).close()


def test_a_rank_without_the_folder_is_found_by_its_abstract_name_and_finds_others(tmp_path: Path) -> None:
    with rank(tmp_path) as one, rank(None) as other:
        reach(other, RankEndpoint(0, shm=offer(one))).close()
        reach(one, RankEndpoint(0, shm=offer(other))).close()


def test_a_rank_that_is_not_found_is_rejected_with_what_would_help(tmp_path: Path) -> None:
    with rank(tmp_path) as source, rank(tmp_path) as reader, rank(None) as other:
        part = replace(offer(source), socket_path=f"@{NAME}")
        with pytest.raises(DataPathUnavailable, match="has it neither"):
            reach(reader, RankEndpoint(0, shm=part))
        with pytest.raises(DataPathUnavailable, match="shared_dir"):
            reach(other, RankEndpoint(0, shm=part))


def test_a_peer_leads_nobody_out_of_the_folder_nor_to_what_is_no_socket_of_this_user(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    outside = tmp_path / NAME
    with bound(outside) as listener, rank(folder) as source, rank(folder) as reader:
        listener.listen()
        listener.setblocking(False)
        link, fifo, plain, foreign = (new_name() for _ in range(4))
        (folder / link).symlink_to(outside)
        os.mkfifo(folder / fifo)
        (folder / plain).write_bytes(b"")
        names = [link, fifo, plain, "../" + NAME, f"{folder}/../{NAME}", NAME + "x" * 100, NAME + "\0", "."]
        if os.geteuid() == 0:
            bound(folder / foreign).close()
            os.chown(folder / foreign, 12345, 12345)
            names.append(foreign)
        part = offer(source)
        wrong = [f"@{name}" for name in names] + [str(outside), str(folder / link), "/" + "x" * 200]
        for path in wrong:
            with pytest.raises(DataPathUnavailable) as refused:
                reach(reader, RankEndpoint(0, shm=replace(part, socket_path=path)))
            assert "the peer refused" not in refused.value.message, path
        with pytest.raises(BlockingIOError):  # nobody came
            listener.accept()


def test_a_start_removes_the_sockets_of_the_dead_and_nothing_else(tmp_path: Path) -> None:
    living, dead, window, unfinished = new_name(), new_name(), new_name("window-"), new_name() + ".new"
    for name in (dead, window, unfinished, "somebody-else"):
        bound(tmp_path / name).close()
    (tmp_path / NAME).write_bytes(b"no socket")
    foreign = new_name()
    bound(tmp_path / foreign).close()
    left = {living, NAME, "somebody-else"}
    if os.geteuid() == 0:
        os.chown(tmp_path / foreign, 12345, 12345)
        left.add(foreign)
    folder = SharedFolder(str(tmp_path))
    with folder.listen(living, 0), contextlib.ExitStack() as stack:
        for _ in range(2):  # the queue is full, so a further one would block
            asking = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            asking.setblocking(False)
            with place_of(living, folder) as place:
                asking.connect_ex(place)
        SharedFolder(str(tmp_path)).close()
        folder.close()
        assert {file.name for file in tmp_path.iterdir()} == left


def test_a_folder_in_which_others_could_replace_a_socket_is_refused(tmp_path: Path) -> None:
    cases = {0o777: "sticky", 0o775: "sticky", 0o1777: "", 0o1775: "", 0o700: "", 0o755: ""}
    for mode, why in cases.items():
        tmp_path.chmod(mode)
        if why:
            with pytest.raises(InvalidRequest, match=why):
                SharedFolder(str(tmp_path))
        else:
            SharedFolder(str(tmp_path)).close()
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(InvalidRequest, match="belongs to user 12345"):
            SharedFolder(str(tmp_path))


@pytest.mark.parametrize("path", ["missing", "file", "nul\0"])
def test_what_is_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="shared_dir"):
        SharedFolder(f"{tmp_path}/{path}")


def test_a_folder_that_takes_no_socket_any_more_costs_only_peers_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "folder").mkdir()
    with rank(folder) as source, rank(None) as reader:
        folder.rmdir()
        reach(reader, RankEndpoint(0, shm=offer(source))).close()
    assert "other network namespaces" in caplog.text


def test_a_name_that_is_no_rank_s_is_not_looked_for_in_the_folder(tmp_path: Path) -> None:
    folder = SharedFolder(str(tmp_path))
    with bound(tmp_path / "other"), place_of("other", folder) as place:
        assert place == "\0other"
    folder.close()
