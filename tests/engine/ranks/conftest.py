"""Leads and engines for ranks that connect over the network."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvgrpc.engine import Engine
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import encode
from tests.engine.conftest import SETTINGS
from tests.engine.made import layout
from tests.engine.ranks.moves import GRACE_S
from tests.engine.ranks.streams import RankStream, stream_to
from tests.engine.session_client import ATTACH, Client
from tests.engine.support import Lead

CONNECT_S = 2.0
TICKET = os.urandom(32)
Connect = Callable[..., RankStream]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Yields a source's lead whose ranks write what is pushed."""
    lead = Lead(tmp_path_factory.mktemp("lead"), "W", "--source-writes", settings=SETTINGS)
    yield lead.wait_ready()
    lead.close()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Yields a lead that soon declares a silent rank dead."""
    settings = SETTINGS.replace("peer_grace_s = 30.0", f"peer_grace_s = {GRACE_S}")
    settings = settings.replace("connect_timeout_s = 20.0", f"connect_timeout_s = {CONNECT_S}")
    lead = Lead(tmp_path_factory.mktemp("lead"), "I", settings=settings)
    yield lead.wait_ready()
    lead.close()


@pytest.fixture
def engine(impatient: Lead) -> Iterator[Engine]:
    """Yields an engine of two ranks that bring their own memory."""
    with Engine.attach(impatient.socket_path, pool=layout(), private_memory=True, world_size=2) as made:
        yield made
    impatient.wait_no_engine()


@pytest.fixture
def connect(impatient: Lead, stack: ExitStack) -> Connect:
    """Opens streams, each with its first message."""

    def begin(**introduction: Any) -> RankStream:
        made = stream_to(impatient)
        stack.callback(made.cut)
        made.say(**introduction)
        return made

    return begin


@pytest.fixture
def scheduler(impatient: Lead, stack: ExitStack) -> Client:
    """Attaches the scheduler of an engine of two ranks that comes back, with `TICKET`."""
    client = Client(impatient.socket_path)
    stack.callback(client.socket.close)
    frame = session_pb2.ClientFrame()
    frame.CopyFrom(ATTACH)
    private = session_pb2.POOL_MEMORY_PRIVATE
    frame.attach.MergeFrom(session_pb2.AttachRequest(rank_ticket=TICKET, memory=private, world_size=2))
    client.socket.sendall(encode(frame))
    return client
