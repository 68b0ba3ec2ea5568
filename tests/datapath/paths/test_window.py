"""Windows: the peer gets what it was sent, by a mapping that shows nothing else, and a stranger gets nothing."""

import fcntl
import mmap
import os
import resource
import secrets
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable
from kvgrpc.datapath.collective.messages import messages
from kvgrpc.datapath.collective.rendezvous import Rendezvous
from kvgrpc.datapath.paths.window import (
    SLOT_BYTES,
    TOKEN_BYTES,
    WINDOW_BYTES,
    WindowGroup,
    WindowHalf,
    _map_window,
    read_window_half,
)
from kvgrpc.datapath.shared_folder import SharedFolder, new_name
from tests.datapath.peers import DEADLINE_S, content, private, runs_of

TOKEN = bytes(TOKEN_BYTES)
NAME = f"kvgrpc-window-{'0' * 32}"


def side(
    pool: ThreadPoolExecutor, sends: bool, folder: SharedFolder | None = None
) -> tuple[Rendezvous, Future[Values], Future[WindowGroup]]:
    """Begins one side of a group; returns where it learns, what it tells, and the group."""
    told: Future[Values] = Future()
    rendezvous = Rendezvous(told.set_result, DEADLINE_S)
    return rendezvous, told, pool.submit(lambda: WindowGroup(sends=sends, rendezvous=rendezvous, folder=folder))


def test_the_window_shows_the_messages_and_no_other_byte_and_ends_as_zeros() -> None:
    memory, (pool_bytes,) = private((WINDOW_BYTES * 2,))
    pool_bytes[:] = content(1, len(pool_bytes))
    own, (got,) = private((SLOT_BYTES,))
    runs = runs_of((SLOT_BYTES, 0, 1000))
    with ThreadPoolExecutor(2) as pool:
        (at_source, from_source, source), (at_peer, from_peer, peer) = side(pool, True), side(pool, False)
        at_source.learn(from_peer.result(DEADLINE_S))
        at_peer.learn(from_source.result(DEADLINE_S))
        sender, receiver = source.result(DEADLINE_S), peer.result(DEADLINE_S)
    (sent,) = messages(runs, memory.segments, sends=True, most_bytes=SLOT_BYTES)
    (awaited,) = messages(runs, own.segments, sends=False, most_bytes=SLOT_BYTES)
    flying = sender.launch(sent, 1)
    receiver.land(receiver.launch(awaited, 1), DEADLINE_S)
    sender.land(flying, DEADLINE_S)
    mapping = receiver._mapping
    assert mapping is not None
    assert bytes(got[:1000]) == mapping[:1000] == pool_bytes[SLOT_BYTES : SLOT_BYTES + 1000].tobytes()
    assert not any(mapping[1000:])
    with pytest.raises(TypeError, match=r"read-only|modify"):
        mapping[0] = 1
    sender.close()
    assert not any(mapping[:])
    receiver.close()


def test_a_process_without_the_token_gets_no_window_and_keeps_nobody_from_it() -> None:
    with ThreadPoolExecutor(2) as pool:
        (at_source, from_source, source), (at_peer, from_peer, peer) = side(pool, True), side(pool, False)
        at_source.learn(from_peer.result(DEADLINE_S))
        told = from_source.result(DEADLINE_S)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(DEADLINE_S)
            stranger.connect("\0" + read_window_half(told, listens=True).listens_at)
            stranger.send(secrets.token_bytes(TOKEN_BYTES))
            assert socket.recv_fds(stranger, 100, 1)[:2] == (b"", [])
        at_peer.learn(told)
        for group in (source, peer):
            group.result(DEADLINE_S).close()


def test_a_peer_that_leaves_before_it_has_its_window_costs_no_descriptor() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with ThreadPoolExecutor(1) as pool:
        rendezvous, told, group = side(pool, True)
        rendezvous.learn(WindowHalf(TOKEN, "").values)
        half = read_window_half(told.result(DEADLINE_S), listens=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect("\0" + half.listens_at)
            peer.send(half.token)
            peer.shutdown(socket.SHUT_RD)
        with suppress(DataPathFailed):  # the kernel decides whether the window was sent before the end was seen
            group.result(DEADLINE_S).close()
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_window_is_given_and_fetched_by_processes_with_many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    with ThreadPoolExecutor(2) as pool, ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (descriptor := os.dup(0)) <= 1030:
            taken.callback(os.close, descriptor)
        taken.callback(os.close, descriptor)
        (at_source, from_source, source), (at_peer, from_peer, peer) = side(pool, True), side(pool, False)
        at_source.learn(from_peer.result(DEADLINE_S))
        at_peer.learn(from_source.result(DEADLINE_S))
        for group in (source, peer):
            group.result(DEADLINE_S).close()


def test_a_window_that_is_fetched_is_not_inherited_by_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: list[bool] = []

    def look(descriptor: int) -> mmap.mmap:
        inherited.append(os.get_inheritable(descriptor))
        return _map_window(descriptor)

    monkeypatch.setattr("kvgrpc.datapath.paths.window._map_window", look)
    with ThreadPoolExecutor(2) as pool:
        (at_source, from_source, source), (at_peer, from_peer, peer) = side(pool, True), side(pool, False)
        at_source.learn(from_peer.result(DEADLINE_S))
        at_peer.learn(from_source.result(DEADLINE_S))
        for group in (source, peer):
            group.result(DEADLINE_S).close()
    assert inherited == [False]


def test_the_two_halves_of_a_window_meet_in_the_folder(tmp_path: Path) -> None:
    folder = SharedFolder(str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        (at_source, from_source, source), (at_peer, from_peer, peer) = (
            side(pool, way, folder) for way in (True, False)
        )
        at_source.learn(from_peer.result(DEADLINE_S))
        told = dict(from_source.result(DEADLINE_S))
        name = new_name("window-")
        (tmp_path / told["socket"].decode()).rename(tmp_path / name)  # so that the abstract name is another one
        at_peer.learn(tuple((told | {"socket": name.encode()}).items()))
        for group in (source, peer):
            group.result(DEADLINE_S).close()
    folder.close()


@pytest.mark.parametrize("late", [True, False])
def test_a_source_that_does_not_listen_is_worth_another_try_for_a_rank_that_came_late(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr("kvgrpc.datapath.paths.window.PROOF_S", 0.0 if late else 60.0)
    with ThreadPoolExecutor(1) as pool:
        rendezvous, _, group = side(pool, False)
        rendezvous.learn(WindowHalf(TOKEN, f"kvgrpc-window-{secrets.token_hex(16)}").values)
        with pytest.raises(DataPathFailed if late else DataPathUnavailable, match="cannot be fetched"):
            group.result(DEADLINE_S)


@pytest.mark.parametrize("writable", [True, False])
def test_a_descriptor_that_could_harm_the_reader_is_refused(writable: bool) -> None:
    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as source:
        source.bind("\0" + (name := f"kvgrpc-window-{secrets.token_hex(16)}"))
        source.listen(1)
        rendezvous, told, group = side(pool, False)
        rendezvous.learn(WindowHalf(TOKEN, name).values)
        token = read_window_half(told.result(DEADLINE_S), listens=False).token
        connection, _ = source.accept()
        fd = os.memfd_create("w", os.MFD_ALLOW_SEALING)
        os.truncate(fd, WINDOW_BYTES)
        if writable:
            os.posix_fallocate(fd, 0, WINDOW_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        given = fd if writable else os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        socket.send_fds(connection, [token], [given])
        with pytest.raises(DataPathUnavailable, match="it is writable" if writable else "it is not sealed"):
            group.result(DEADLINE_S)
        connection.close()
        for one in {fd, given}:
            os.close(one)


@pytest.mark.parametrize(
    ("values", "listens"),
    [
        ((), True),
        ((("token", TOKEN),), True),
        ((("token", TOKEN), ("token", TOKEN)), True),
        ((("token", b"short"), ("socket", NAME.encode())), True),
        ((("token", TOKEN), ("socket", b"/run/docker.sock")), True),
        ((("token", TOKEN), ("socket", NAME.encode() + b"\n")), True),
        ((("token", TOKEN), ("socket", b"\xff")), True),
        ((("token", TOKEN), ("socket", b"")), True),
        ((("token", TOKEN), ("socket", NAME.encode())), False),
    ],
)
def test_a_malformed_half_is_refused(values: Values, listens: bool) -> None:
    with pytest.raises(DataPathFailed):
        read_window_half(values, listens=listens)
