"""Data path shm: which peers get a descriptor, and which descriptors a reader refuses to map."""

import array
import contextlib
import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import MemoryKind, RankEndpoint, Segment, ShmEndpoint
from kvgrpc.datapath.asker import ANSWER_S, credentials
from kvgrpc.datapath.base import DataPathUnavailable, PostingState
from kvgrpc.datapath.host.memory import PrivateMemory, SharedMemory
from kvgrpc.datapath.host.process_socket import ProcessSocket
from kvgrpc.datapath.paths.shm import ShmPath
from kvgrpc.datapath.questions import CHALLENGE_BYTES, REFUSED, Answer, Question
from tests.datapath.peers import CASES, DEADLINE_S, ProcessPeer, answered, ask, move, open_descriptors, reach, runs_of

SHM = next(case for case in CASES if case.name == "shm")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def pool() -> Iterator[SharedMemory]:
    memory = SharedMemory.create(100_000)
    memory.as_numpy()[:] = 3
    yield memory
    memory.close()


@pytest.fixture
def source(pool: SharedMemory) -> Iterator[ShmPath]:
    path = ShmPath(pool)
    yield path
    path.close()


@pytest.fixture
def reader() -> Iterator[ShmPath]:
    path = ShmPath(PrivateMemory.of(np.zeros(100_000, dtype=np.uint8)))
    yield path
    path.close()


def offered(path: ShmPath) -> ShmEndpoint:
    part = path.offer(RankEndpoint(0)).shm
    assert part is not None
    return part


def connect(reader: ShmPath, part: ShmEndpoint) -> None:
    reach(reader, RankEndpoint(0, shm=part)).close()


def works(reader: ShmPath, source: ShmPath) -> bool:
    connect(reader, offered(source))
    return True


def raw(part: ShmEndpoint) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(DEADLINE_S)
    client.connect("\0" + part.socket_path[1:])
    return client


def test_a_token_is_good_for_one_descriptor(reader: ShmPath, source: ShmPath) -> None:
    part = offered(source)
    connect(reader, part)
    with pytest.raises(DataPathUnavailable, match="used"):
        connect(reader, part)
    assert works(reader, source)


@pytest.mark.parametrize("more", [b"", b"\0", b"\0\5\0"], ids=["short", "half a number", "long"])
def test_a_question_of_another_length_is_refused_and_costs_no_token(source: ShmPath, more: bytes) -> None:
    part = offered(source)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(DEADLINE_S)
        client.connect("\0" + part.socket_path[1:])
        client.send(part.token + bytes(CHALLENGE_BYTES if more else CHALLENGE_BYTES - 1) + more)
        assert client.recv(100)[:1] == REFUSED
    answer = ask(Question(part.socket_path, part.token))
    assert isinstance(answer, Answer)
    answer.close()


def test_an_expired_token_is_refused(reader: ShmPath, pool: SharedMemory) -> None:
    path = ShmPath(pool, socket=ProcessSocket(token_ttl_s=0.0))
    with pytest.raises(DataPathUnavailable, match="expired"):
        connect(reader, offered(path))
    path.close()


def test_a_guessed_token_is_refused(reader: ShmPath, source: ShmPath) -> None:
    with pytest.raises(DataPathUnavailable, match="unknown"):
        connect(reader, replace(offered(source), token=b"\0" * 32))


def test_tokens_of_an_earlier_life_are_refused(reader: ShmPath) -> None:
    """A restarted peer has another socket, another pool and other tokens."""
    peer = ProcessPeer(SHM, 1, (8192,))
    before = peer.endpoint()
    peer.kill()
    peer.close()
    again = ProcessPeer(SHM, 1, (8192,))
    after = again.endpoint()
    assert before.shm is not None
    assert after.shm is not None
    with pytest.raises(DataPathUnavailable, match="cannot be reached"):
        reach(reader, before)
    with pytest.raises(DataPathUnavailable, match="unknown"):
        connect(reader, replace(after.shm, token=before.shm.token))
    with pytest.raises(DataPathUnavailable, match="another pool"):
        connect(reader, replace(after.shm, nonce=before.shm.nonce))
    again.close()


def test_what_contradicts_itself_is_refused(reader: ShmPath, source: ShmPath) -> None:
    for change in (
        {"nonce": b"short"},
        {"nbytes": 0},
        {"nbytes": 1 << 40},
        {"nonce_offset": 1 << 40, "nbytes": 1 << 30},
        {"socket_path": "@nobody-listens-here"},
        {"socket_path": "/tmp/\0x"},
        {"socket_path": "x" * 1000},
        {"socket_path": ""},
    ):
        with pytest.raises(DataPathUnavailable):
            connect(reader, replace(offered(source), **change))
    assert works(reader, source)


@contextlib.contextmanager
def giving(*fds: int, payload: bytes = b"\0") -> Iterator[ShmEndpoint]:
    """Makes a peer that answers with these descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        path = f"\0kvgrpc-test-{os.getpid()}-{fds}"
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(100)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                client.sendmsg([payload], rights if fds else [])

        thread = threading.Thread(target=answer)
        thread.start()
        yield ShmEndpoint("@" + path[1:], b"t" * 32, 4096, b"n" * 32, 4096)
        thread.join()


def memfd(size: int, seals: int, allocate: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if allocate:
        os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return read_only


@pytest.mark.parametrize(
    ("size", "seals", "allocate", "reason"),
    [
        (8192, 0, True, "not sealed"),
        (8192, fcntl.F_SEAL_GROW, True, "not sealed"),
        (8192, fcntl.F_SEAL_SHRINK, True, "not sealed"),
        (8192, SEALS, False, "not allocated"),
        (4096, SEALS, True, "fewer"),
        (8192, SEALS, True, "another pool"),
    ],
)
def test_an_unsafe_descriptor_is_refused(reader: ShmPath, size: int, seals: int, allocate: bool, reason: str) -> None:
    fd = memfd(size, seals, allocate)
    with giving(fd) as part, pytest.raises(DataPathUnavailable, match=reason):
        connect(reader, part)
    os.close(fd)


def test_a_descriptor_that_is_no_pool_is_refused(reader: ShmPath, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 8192)
    for fd in (os.open(tmp_path / "file", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)):
        with giving(fd) as part, pytest.raises(DataPathUnavailable, match="not a pool"):
            connect(reader, part)
        os.close(fd)


def test_a_writable_descriptor_is_refused(reader: ShmPath, pool: SharedMemory) -> None:
    with giving(os.dup(pool.fd)) as part, pytest.raises(DataPathUnavailable, match="writable"):
        connect(reader, part)


@pytest.mark.parametrize("payload", [b"", b"\0", b"\1no", b"\7" * 500])
def test_an_answer_without_a_descriptor_is_refused(reader: ShmPath, payload: bytes) -> None:
    with giving(payload=payload) as part, pytest.raises(DataPathUnavailable):
        connect(reader, part)


def test_more_descriptors_than_one_are_refused_and_none_leaks(reader: ShmPath, pool: SharedMemory) -> None:
    fds = pool.reopen_read_only(), pool.reopen_read_only()
    before = open_descriptors()
    with giving(*fds) as part, pytest.raises(DataPathUnavailable):
        connect(reader, part)
    assert open_descriptors() <= before
    for fd in fds:
        os.close(fd)


def test_connecting_and_closing_leaks_no_descriptor(reader: ShmPath, source: ShmPath) -> None:
    assert works(reader, source)
    before = open_descriptors()
    for _ in range(20):
        assert works(reader, source)
        with pytest.raises(DataPathUnavailable):
            connect(reader, replace(offered(source), nonce=b"n" * 32))
    assert open_descriptors() < before + 20  # the socket's thread may still have some to close


@pytest.mark.parametrize("garbage", [b"", b"x", b"x" * 65, b"x" * 100_000, bytes(range(256))])
def test_garbage_does_not_stop_the_socket(reader: ShmPath, source: ShmPath, garbage: bytes) -> None:
    part = offered(source)
    with raw(part) as client:
        client.send(garbage)
    with raw(part) as client:
        client.send(garbage)
        assert client.recv(1000)[:1] in {b"", b"\1"}
    assert works(reader, source)


def test_a_descriptor_sent_to_the_socket_is_not_kept(reader: ShmPath, source: ShmPath) -> None:
    assert works(reader, source)
    read, write = os.pipe()
    with raw(offered(source)) as client:
        socket.send_fds(client, [b"x"], [write])
        client.recv(1000)
    os.close(write)
    assert os.read(read, 1) == b""  # the pipe's last writer is gone
    os.close(read)


def test_a_client_that_breaks_off_does_not_stop_the_socket(reader: ShmPath, source: ShmPath) -> None:
    for _ in range(50):
        raw(offered(source)).close()
        with raw(part := offered(source)) as client:
            client.send(part.token + bytes(32))
    assert works(reader, source)


def test_silent_clients_do_not_keep_others_waiting_and_are_dropped(reader: ShmPath, source: ShmPath) -> None:
    part = offered(source)
    silent = [raw(part) for _ in range(40)]
    began = time.monotonic()
    assert works(reader, source)
    assert time.monotonic() - began < ANSWER_S
    assert [client.recv(1) for client in silent] == [b""] * 40  # an end, not a timeout
    for client in silent:
        client.close()


def test_a_peer_that_does_not_answer_is_given_up_after_the_bound(reader: ShmPath) -> None:
    peer = ProcessPeer(SHM, 1, (8192,))
    endpoint = peer.endpoint()
    assert peer.process.pid is not None
    os.kill(peer.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)  # all of its threads have stopped
    began = time.monotonic()
    with pytest.raises(DataPathUnavailable, match="no answer"):
        reach(reader, endpoint)
    assert ANSWER_S * 0.9 < time.monotonic() - began < ANSWER_S * 10
    os.kill(peer.process.pid, signal.SIGCONT)
    peer.close()


def test_a_closed_socket_offers_nothing(pool: SharedMemory) -> None:
    path = ShmPath(pool)
    path.close()
    with pytest.raises(DataPathUnavailable, match="closed"):
        offered(path)


def test_the_kernel_names_the_user_of_the_other_end() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert credentials(one) == (os.getpid(), os.geteuid())
    one.close()
    other.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_another_user_gets_no_descriptor(source: ShmPath) -> None:
    part = offered(source)
    child = os.fork()
    if not child:
        # Only system calls are safe in this child: the parent has threads.
        answer = b"none"
        with contextlib.suppress(OSError):
            os.setuid(65534)
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            client.settimeout(DEADLINE_S)
            client.connect("\0" + part.socket_path[1:])
            answer = b""
            client.send(part.token + bytes(32))
            answer = client.recv(100)
        os._exit(len(answer))
    assert os.waitpid(child, 0)[1] == 0
    assert answered(Question(part.socket_path, part.token))  # the token is unused


def test_private_memory_is_not_offered() -> None:
    path = ShmPath(PrivateMemory.of(bytearray(64)))
    with pytest.raises(DataPathUnavailable, match="pool"):
        path.offer(RankEndpoint(0))
    path.close()


def test_device_memory_is_not_a_destination(source: ShmPath) -> None:
    path = ShmPath(PrivateMemory([Segment(1 << 30, 64, MemoryKind.CUDA)]))
    with pytest.raises(DataPathUnavailable, match="device"):
        connect(path, offered(source))
    path.close()


def test_a_mapping_is_valid_after_the_end_of_its_path_and_pool() -> None:
    pool = SharedMemory.create(100_000)
    pool.as_numpy()[:] = 8
    source, own = ShmPath(pool), np.zeros(100_000, dtype=np.uint8)
    reader = ShmPath(PrivateMemory.of(own))
    remote = reach(reader, source.offer(RankEndpoint(0)))
    source.close()
    pool.close()
    assert move(reader, remote, runs_of((0, 0, 100_000))).poll() is PostingState.DONE
    assert (own == 8).all()
    remote.close()
    reader.close()


def test_an_idle_socket_costs_nothing(reader: ShmPath, source: ShmPath) -> None:
    assert works(reader, source)
    thread = next(t for t in threading.enumerate() if t.name == "kvgrpc-process")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before, began = time.clock_gettime(clock), time.monotonic()
    threading.Event().wait(0.3)
    assert time.clock_gettime(clock) - before < 0.016 * (time.monotonic() - began)
