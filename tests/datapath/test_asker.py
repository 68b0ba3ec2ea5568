"""Questions to many processes at once: processes that do not answer keep nobody waiting."""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvgrpc.datapath.asker import ANSWER_S, AT_ONCE, FAIR_S, Asker
from kvgrpc.datapath.host.process_socket import ProcessSocket, SocketReply
from kvgrpc.datapath.questions import Answer, Question
from tests.datapath.peers import DEADLINE_S, open_descriptors

Answers = queue.SimpleQueue[Answer | str]


@pytest.fixture
def asker() -> Iterator[Asker]:
    asker = Asker("test")
    yield asker
    asker.close()


@pytest.fixture
def honest() -> Iterator[ProcessSocket]:
    socket = ProcessSocket()
    yield socket
    socket.close()


@contextlib.contextmanager
def silent(backlog: int) -> Iterator[str]:
    """Makes a socket that queues `backlog` connections and one more, and never answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen(backlog)
        yield "@" + listener.getsockname()[1:].decode()


def question(honest: ProcessSocket) -> Question:
    return Question(*honest.mint("peer", "shm", lambda *_: SocketReply(b"here")))


def next_of(answers: Answers) -> Answer | str:
    answer = answers.get(timeout=DEADLINE_S)
    if isinstance(answer, Answer):
        answer.close()
    return answer


@pytest.mark.parametrize("backlog", [0, 1000], ids=["full queue", "long queue"])
def test_sockets_that_never_answer_hardly_delay_a_good_one(asker: Asker, honest: ProcessSocket, backlog: int) -> None:
    """There are eight times as many as are asked at once: full waits in turn would take eight times `ANSWER_S`."""
    answers: Answers = queue.SimpleQueue()
    refusals: Answers = queue.SimpleQueue()
    with silent(backlog) as path:
        for _ in range(8 * AT_ONCE):
            asker.ask(Question(path, bytes(32)), refusals.put)
        began = time.monotonic()
        asker.ask(question(honest), answers.put)
        answer = next_of(answers)
        took_s = time.monotonic() - began
        assert isinstance(answer, Answer)
        assert answer.payload == b"here"
        assert took_s < 4 * ANSWER_S
        for _ in range(8 * AT_ONCE):
            assert "no answer" in str(next_of(refusals))


def test_while_there_is_room_a_slow_process_has_all_its_time(asker: Asker) -> None:
    answers: Answers = queue.SimpleQueue()
    slow = ProcessSocket()

    def answer(*_: object) -> SocketReply:
        threading.Event().wait(3 * FAIR_S)
        return SocketReply(b"late")

    asker.ask(Question(*slow.mint("peer", "shm", answer)), answers.put)
    with silent(10) as path:
        asker.ask(Question(path, bytes(32)), answers.put)
        first = next_of(answers)
    assert isinstance(first, Answer)
    assert first.payload == b"late"
    slow.close()


def test_what_was_cancelled_is_not_told(asker: Asker, honest: ProcessSocket) -> None:
    answers: Answers = queue.SimpleQueue()
    with silent(10) as path:
        under_way = asker.ask(Question(path, bytes(32)), answers.put)
        asker.ask(question(honest), answers.put)
        assert isinstance(next_of(answers), Answer)
        asker.cancel(under_way)
        asker.cancel(under_way)
        asker.ask(question(honest), answers.put)
        assert isinstance(next_of(answers), Answer)
    asker.close()
    assert answers.empty()


def test_a_close_ends_what_is_asked_and_what_waits_and_leaves_no_descriptor() -> None:
    answers: Answers = queue.SimpleQueue()
    before = open_descriptors()
    asker = Asker("test")
    with silent(1000) as path:
        for _ in range(2 * AT_ONCE):
            asker.ask(Question(path, bytes(32)), answers.put)
        asker.close()
        asker.close()
        asker.ask(Question(path, bytes(32)), answers.put)
        assert next_of(answers) == "this rank is closing"
    assert answers.empty()
    assert open_descriptors() == before


def test_an_asker_that_has_nothing_to_ask_costs_nothing(asker: Asker, honest: ProcessSocket) -> None:
    answers: Answers = queue.SimpleQueue()
    asker.ask(question(honest), answers.put)
    next_of(answers)
    thread = next(t for t in threading.enumerate() if t.name == "test")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before, began = time.clock_gettime(clock), time.monotonic()
    threading.Event().wait(0.3)
    assert time.clock_gettime(clock) - before < 0.016 * (time.monotonic() - began)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_of_another_user_is_told_nothing(asker: Asker) -> None:
    answers: Answers = queue.SimpleQueue()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        # Only system calls are safe in this child: the parent has threads.
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")
            listener.listen()
            os.write(write, listener.getsockname()[1:])
            client, _ = listener.accept()
            os._exit(len(client.recv(100)))
    path = "@" + os.read(read, 100).decode()
    asker.ask(Question(path, bytes(32)), answers.put)
    assert "another" in str(next_of(answers))
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)
