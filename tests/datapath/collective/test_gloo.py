"""A Gloo group and its connections."""

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.collective.connection import Sockets, sockets
from kvgrpc.datapath.collective.half import CONNECTIONS
from kvgrpc.datapath.collective.messages import ALONE_BYTES_MIN
from tests.datapath.collective.conftest import NBYTES, Made
from tests.datapath.peers import DEADLINE_S, runs_of

MARGIN_BYTES = 4_096
"""Allowance for bytes that a connection carries beside the messages."""
RECEIVED = struct.Struct("=128xQ")
"""Format of Linux's struct tcp_info, up to the number of bytes that a connection has received."""


def received(which: Sockets) -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed meanwhile, or only listens
            if entry.stat().st_ino in which:
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    connection.getpeername()
                    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
                    found.append(int(RECEIVED.unpack(told)[0]))
    return found


def test_the_messages_of_a_send_take_all_connections_in_turn(made: Made) -> None:
    halves, source, destination = made
    before = sockets()
    halves.meet()
    new = sockets() - before
    jobs = halves.move(runs_of(*((at, at, ALONE_BYTES_MIN) for at in range(0, NBYTES, ALONE_BYTES_MIN))))
    assert [(job.poll(), job.error) for job in jobs] == [(PostingState.DONE, "")] * 2
    assert np.array_equal(source, destination)
    assert sorted(received(new))[-CONNECTIONS:] == pytest.approx([NBYTES / CONNECTIONS] * CONNECTIONS, abs=MARGIN_BYTES)


def test_a_group_that_is_aborted_while_a_connection_is_awaited_ends(made: Made) -> None:
    halves, _, _ = made
    half, peer = halves.both
    peer.wait_told()
    half.group.learn(peer.values)
    half.group.abort("the test wants so")
    assert half.group.join(DEADLINE_S)
    assert half.group.broken == "the test wants so"
