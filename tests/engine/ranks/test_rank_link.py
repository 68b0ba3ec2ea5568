"""The rank link of a worker whose lead is on another host: it ends with the worker, and reports its errors."""

import errno
import os
import socket
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.engine import Engine, Rank
from kvgrpc.engine.session import rank_link
from kvgrpc.engine.session.rank_link import RankLink
from kvgrpc.errors import InvalidRequest, Reason, Unimplemented
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import encode
from tests.engine.made import layout
from tests.engine.ranks.conftest import TICKET
from tests.engine.support import Lead, refused
from tests.service.conftest import TEST_S
from tests.service.engines import HOME, ServeProcess

pytestmark = pytest.mark.timeout(TEST_S)

NOBODY = "127.0.0.1:1"


def sockets() -> set[str]:
    """Returns the sockets that this process has open."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {name for name in links if name.startswith("socket:")}


def test_a_child_that_is_forked_while_a_link_is_made_does_not_keep_it(
    monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """Another thread may fork at that moment."""
    ours, childs = socket.socketpair()
    stack.enter_context(ours)

    class Forking(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.child = os.fork()
            if not self.child:
                ours.close()
                childs.recv(1)  # returns at the end of the test
                os._exit(0)
            childs.close()
            super().__init__(*arguments, **named)

    monkeypatch.setattr(subprocess, "Popen", Forking)
    link = RankLink(NOBODY)
    assert isinstance(link._process, Forking)
    stack.callback(os.waitpid, link._process.child, 0)
    stack.callback(ours.shutdown, socket.SHUT_RDWR)
    began = time.monotonic()
    link.close()
    assert link._process.returncode == 0, "it was killed, since it did not end"
    assert time.monotonic() - began < rank_link.END_S


def test_a_link_whose_process_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sockets()
    monkeypatch.setattr(rank_link.sys, "executable", "/nowhere")  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError):
        RankLink(NOBODY)
    assert sockets() == before


def test_a_rank_that_cannot_connect_leaves_no_process(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)

    pairs = [socket.socketpair()]

    def socketpair() -> tuple[socket.socket, socket.socket]:
        """Returns the prepared pair for the process, then fails for the connection."""
        if not pairs:
            raise OSError(errno.EMFILE, "too many open files")
        return pairs.pop()

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(socket, "socketpair", socketpair)
    with pytest.raises(OSError, match="too many open files"):
        Rank(engine.remote_ticket, 1, [np.zeros(layout().total_bytes, np.uint8)])
    (process,) = made
    assert process.returncode == 0


@pytest.mark.usefixtures("scheduler")
def test_a_worker_that_sends_what_is_no_frame_is_told_so(impatient: Lead, stack: ExitStack) -> None:
    """Its engine is coming back, and the lead has nothing to send."""
    link = RankLink(impatient.process.wait_ready()["address"])
    stack.callback(link.close)
    connection = link.connect()
    stack.callback(connection.close)
    request = session_pb2.AttachRankRequest(ticket=TICKET, rank=1, private_memory=True, returns=True)
    connection.send(encode(session_pb2.ClientFrame(attach_rank=request)))
    connection.send(b"\0\0\0\5\xff\xff\xff\xff\xff")
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        connection.answer(10.0)


def test_a_lead_that_refuses_streams_at_once_is_heard_each_time(tmp_path: Path) -> None:
    """gRPC's client may be about to write when the refusal arrives. Another process refuses, as it does in use."""
    process = ServeProcess(tmp_path / "alone", "--listen", f"{HOME}:0", "--drain-s", "0")
    try:
        link = RankLink(process.wait_ready()["address"])
        frame = encode(session_pb2.ClientFrame(attach_rank=session_pb2.AttachRankRequest(ticket=bytes(32))))
        with closing(link):
            for _ in range(400):
                with refused(Reason.FEATURE_UNAVAILABLE, Unimplemented):
                    link.connect().attach(frame)
    finally:
        process.end()
