"""A peer's word never decides whose memory is read, whatever process, socket or secret it names."""

import array
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import CmaEndpoint, ProcessEndpoint, RankEndpoint, Segment
from kvgrpc.datapath.base import DataPathUnavailable
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.host.process import _ADDRESSES
from kvgrpc.datapath.paths.cma import CmaPath
from kvgrpc.datapath.questions import Answer, Question
from tests.datapath.peers import CASES, DEADLINE_S, ProcessPeer, ask, reach

CMA = next(case for case in CASES if case.name == "cma")
SECRET = 0x5C
NBYTES = 4096
# The bystander listens at a socket at which another process accepts, as a process that starts others does. Its memory
# is known: 4096 bytes of its own, then zeros.
BYSTANDER = f"""
import array, ctypes, socket, sys
memory = ctypes.create_string_buffer(bytes([{SECRET}]) * {NBYTES} + bytes({NBYTES}))
with socket.socket(fileno=int(sys.argv[1])) as theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("")
    listener.listen()
    socket.send_fds(theirs, [str(ctypes.addressof(memory)).encode()], [listener.fileno()])
    theirs.recv(1)
"""


@pytest.fixture
def own() -> Iterator[CmaPath]:
    path = CmaPath(PrivateMemory.of(np.zeros(NBYTES, dtype=np.uint8)))
    yield path
    path.close()


@pytest.fixture
def peer() -> Iterator[ProcessPeer]:
    peer = ProcessPeer(CMA, 1, (NBYTES,))
    yield peer
    peer.close()


@contextlib.contextmanager
def bystander() -> Iterator[tuple[int, socket.socket, int]]:
    """Yields the bystander's process id, the socket at which it listens, and the address of its memory."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        command = [sys.executable, "-c", BYSTANDER, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            mine.settimeout(DEADLINE_S)
            address, fds, _, _ = socket.recv_fds(mine, 100, 1)
            with socket.socket(fileno=fds[0]) as listener:
                yield process.pid, listener, int(address)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def answering(listener: socket.socket, payload: bytes) -> Iterator[None]:
    """Lets a rogue answer one question at another process's socket."""

    def answer() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(100)
            client.send(b"\0" + payload)

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    thread.join()


def test_a_process_that_only_listens_for_the_rogue_is_not_read(own: CmaPath) -> None:
    with bystander() as (pid, listener, address):
        name = "@" + listener.getsockname()[1:].decode()
        part = CmaEndpoint(ProcessEndpoint(name, bytes(32)), (Segment(address, NBYTES),))
        zeros = address + NBYTES
        with answering(listener, _ADDRESSES.pack(zeros, zeros)):
            answer = ask(Question(name, bytes(32)))
            assert isinstance(answer, Answer)
            assert answer.pid == pid
            with pytest.raises(DataPathUnavailable, match=f"process {pid} is not the peer"):
                own.connect(RankEndpoint(0, cma=part), answer)
            answer.close()


def test_our_own_process_is_not_read(own: CmaPath) -> None:
    with pytest.raises(DataPathUnavailable, match="this very one"):
        reach(own, own.offer(RankEndpoint(0)))


def test_of_another_rank_s_process_only_what_that_one_offers_is_read(own: CmaPath, peer: ProcessPeer) -> None:
    """A rogue has the socket and the token from its own handshake with that rank."""
    endpoint = peer.endpoint()
    assert endpoint.cma is not None
    more = replace(endpoint.cma.segments[0], nbytes=NBYTES * 2)
    with pytest.raises(DataPathUnavailable, match="is not the peer"):
        reach(own, replace(endpoint, cma=replace(endpoint.cma, segments=(more,))))


def test_a_proof_is_of_one_challenge(own: CmaPath, peer: ProcessPeer) -> None:
    endpoint = peer.endpoint()
    question = own.question(endpoint)
    answer = ask(question)
    assert isinstance(answer, Answer)
    with pytest.raises(DataPathUnavailable, match="is not the peer"):
        own.connect(endpoint, replace(answer, question=Question(question.socket_path, question.token)))
    answer.close()


def test_a_token_proves_once(own: CmaPath, peer: ProcessPeer) -> None:
    endpoint = peer.endpoint()
    reach(own, endpoint).close()
    with pytest.raises(DataPathUnavailable, match="used"):
        reach(own, endpoint)


def test_a_process_that_died_after_it_answered_is_not_read(own: CmaPath, peer: ProcessPeer) -> None:
    endpoint = peer.endpoint()
    answer = ask(own.question(endpoint))
    peer.kill()
    with pytest.raises(DataPathUnavailable, match="no such process"):
        own.connect(endpoint, answer)
    assert isinstance(answer, Answer)
    answer.close()


UNSEEN: dict[str, Any] = {
    "of another PID namespace": {"pid": 0, "end": None},
    "gone before it was held": {"end": None},
    "that proves nothing": {"payload": b""},
    "with an address of zero": {"payload": _ADDRESSES.pack(0, 4096)},
    "with an address that cannot be": {"payload": _ADDRESSES.pack(4096, 1 << 63)},
}


@pytest.mark.parametrize("change", UNSEEN.values(), ids=UNSEEN)
def test_an_unidentified_process_is_not_read(own: CmaPath, peer: ProcessPeer, change: dict[str, Any]) -> None:
    endpoint = peer.endpoint()
    answer = ask(own.question(endpoint))
    assert isinstance(answer, Answer)
    with pytest.raises(DataPathUnavailable):
        own.connect(endpoint, replace(answer, **change))
    answer.close()


def test_a_socket_without_a_process_behind_it_is_given_up(own: CmaPath) -> None:
    """The socket's process forked and died: the queue still exists, but nobody serves it."""
    with bystander() as (_, listener, address):
        name = "@" + listener.getsockname()[1:].decode()
    part = CmaEndpoint(ProcessEndpoint(name, bytes(32)), (Segment(address, NBYTES),))
    with pytest.raises(DataPathUnavailable):
        reach(own, RankEndpoint(0, cma=part))


@pytest.mark.parametrize("name", ["", "@", "x" * 108, "\0" + "x" * 10_000, "/nowhere", "a\0b", "@\ud7ff" * 30])
def test_a_text_that_names_no_socket_is_refused_in_few_words(own: CmaPath, name: str) -> None:
    part = CmaEndpoint(ProcessEndpoint(name, bytes(32)), (Segment(4096, NBYTES),))
    with pytest.raises(DataPathUnavailable) as refused:
        reach(own, RankEndpoint(0, cma=part))
    assert len(refused.value.message) < 1000


def test_descriptors_that_come_with_a_proof_are_not_kept(own: CmaPath) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        name = "@" + listener.getsockname()[1:].decode()
        read, write = os.pipe()

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(100)
                client.sendmsg([b"\0" + bytes(16)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))])

        thread = threading.Thread(target=answer)
        thread.start()
        part = CmaEndpoint(ProcessEndpoint(name, bytes(32)), (Segment(4096, NBYTES),))
        with pytest.raises(DataPathUnavailable):
            reach(own, RankEndpoint(0, cma=part))
        thread.join()
    os.close(write)
    assert os.read(read, 1) == b""  # the pipe's last writer is gone
    os.close(read)
