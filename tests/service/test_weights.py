"""What one message costs a server: memory that it keeps of it, and how long nobody else is served."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2
from tests.service.api import Api
from tests.service.conftest import Start
from tests.service.consumer import Consumer
from tests.service.engines import Engine
from tests.service.footprint import resident_bytes

KEPT_BYTES_MAX = 4 << 20
"""Of one message, whatever it says: but for what was granted."""
STOOD_STILL_S_MAX = 0.5

Messages = Callable[[Engine], bytes]
WHOLE = common_pb2.GroupBlocks(blocks=common_pb2.BlockRuns(starts=[0], counts=[65_536]))
"""As many blocks as a request may name, in a few bytes."""


def many_blocks(caller: peer_pb2.Caller) -> bytes:
    """134 million blocks in 29 KB."""
    row = peer_pb2.AccessOpening(parts=[peer_pb2.ReadyPart(blocks=[WHOLE])] * 64)
    return peer_pb2.OpenAccessRequest(caller=caller, openings=[row] * 32).SerializeToString()


def known(engine: Engine) -> peer_pb2.Caller:
    consumer = Consumer(engine)
    consumer.handshake()
    return consumer.caller


MESSAGES: dict[str, tuple[str, Messages]] = {
    "a stranger names millions of blocks": (
        "peer.v1.PeerService/OpenAccess", lambda engine: many_blocks(Consumer(engine).caller)
    ),
    "a peer names millions of blocks": (
        "peer.v1.PeerService/OpenAccess", lambda engine: many_blocks(known(engine))
    ),
}  # fmt: skip


class Watch:
    """How long a server served nobody."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._over = threading.Event()
        self.longest_s = 0.0

    def look(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._api.admin.GetStatus(admin_pb2.GetStatusRequest())
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def end(self) -> None:
        self._over.set()


@contextmanager
def watched(engine: Engine) -> Iterator[Watch]:
    api = Api(engine.address)
    watch = Watch(api)
    thread = threading.Thread(target=watch.look)
    thread.start()
    try:
        yield watch
    finally:
        watch.end()
        thread.join()
        api.close()


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_leaves_little_behind_and_holds_up_nobody_for_long(start: Start, message: str) -> None:
    (engine,) = start(())
    rpc, make = MESSAGES[message]
    body = make(engine)
    call: Any = engine.api.channel.unary_unary(f"/kvgrpc.{rpc}")
    before = resident_bytes(engine.process.pid)
    with watched(engine) as watch, pytest.raises(grpc.RpcError):
        call(body, timeout=60)
    engine.api.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert resident_bytes(engine.process.pid) - before < KEPT_BYTES_MAX
    assert watch.longest_s < STOOD_STILL_S_MAX
