"""Who only connects takes no descriptor of the reserve, and the log says so once."""

import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvgrpc import open_files
from kvgrpc.config import Config
from kvgrpc.core.values.limits import Limits
from kvgrpc.datapath.host.process_socket import ProcessSocket, SocketReply
from kvgrpc.datapath.questions import Question
from kvgrpc.open_files import RESERVE, Door, unreserved
from kvgrpc.server import Server
from tests.datapath.movers import until
from tests.datapath.peers import answered, open_descriptors

GUESTS = 5


@contextmanager
def limited(most: int) -> Iterator[None]:
    """This process may have so many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def filled_but_for(count: int) -> Iterator[None]:
    """So many descriptors are left to those who are no guests of the reserve."""
    with ExitStack() as stack:
        stack.enter_context(limited(4 * RESERVE + open_descriptors()))
        while (taken := os.open("/dev/null", os.O_RDONLY)) < unreserved() - count:
            stack.callback(os.close, taken)
        os.close(taken)
        yield


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.setblocking(False)
        yield made


def closed(guest: socket.socket | None) -> None:
    """It was let in, and goes."""
    assert guest is not None
    guest.close()


def test_a_door_lets_in_who_leaves_the_reserve_alone_and_the_others_later(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(listener, "guests")
    with ExitStack() as stack:
        for _ in range(GUESTS + 2):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        with filled_but_for(GUESTS):
            inside = [door.accept() for _ in range(GUESTS)]
            for _ in range(10):
                assert door.accept() is None
                assert door.full
            os.close(os.open("/dev/null", os.O_RDONLY))  # the reserve is there
            closed(inside.pop())
            inside.append(door.accept())
            assert not door.full
        inside.append(door.accept())
        for guest in inside:
            closed(guest)
        assert door.accept() is None
        assert not door.full, "nobody is there any more"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "guests wait: this process may have" in caplog.text


def test_a_limit_that_is_low_has_a_reserve_of_a_quarter() -> None:
    with limited(4 * RESERVE):
        assert unreserved() == 3 * RESERVE
    with limited(100):
        assert unreserved() == 75


SPARE = """
import os, resource
from kvgrpc.open_files import spare
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
free = 75 - len(os.listdir("/proc/self/fd"))
print(spare(free), spare(free + 1))
"""
"""For a process of its own: threads of earlier tests open descriptors in this one."""


def test_what_neither_a_process_nor_the_reserve_has_is_spare() -> None:
    assert subprocess.check_output([sys.executable, "-c", SPARE], text=True).split() == ["True", "False"]


def test_peers_that_ask_for_memory_leave_the_reserve_alone_and_are_answered_when_others_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as stack:
        asked = ProcessSocket()
        stack.callback(asked.close)
        question = Question(*asked.mint("peer", "shm", lambda *_: SocketReply(b"here")))
        with filled_but_for(2 * GUESTS):  # both ends are of this process
            for _ in range(GUESTS + 1):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                stranger.connect("\0" + question.socket_path[1:])
            until(lambda: "peers that ask this process for its memory wait" in caplog.text)
            os.close(os.open("/dev/null", os.O_RDONLY))
        assert answered(question)
    assert len(caplog.records) == 1


def test_a_server_takes_no_more_connections_than_leave_half_of_the_open_files_to_all_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with limited(1_024):
        assert Server(Config()).config.limits.connections == (1_024 - RESERVE) // 2
    assert "limits.connections is 2048, and 480 here" in caplog.text
    caplog.clear()
    with limited(4 * Limits().connections):
        assert Server(Config()).config.limits.connections == Limits().connections
    assert not caplog.records


def test_the_limit_is_raised_to_what_the_system_allows() -> None:
    with limited(200):
        open_files.raise_limit()
        assert open_files.limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_a_descriptor_that_comes_is_inherited_by_no_child_and_a_second_one_is_closed() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there, Path(os.devnull).open() as given:
        before = open_descriptors()
        socket.send_fds(there, [b"ab"], [given.fileno(), given.fileno()])
        said, (descriptor,) = open_files.received_with_descriptor(here, 2)
        assert (said, os.get_inheritable(descriptor)) == (b"ab", False)
        os.close(descriptor)
        assert open_descriptors() == before
