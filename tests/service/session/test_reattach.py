"""Engines that come back: memory that a worker gives too late is closed."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvgrpc.errors import PermissionDenied
from kvgrpc.service.session.reattach import Return
from kvgrpc.service.session.workers import Reports, SocketEnd
from kvgrpc.session.v1 import session_pb2

TICKET = b"t" * 32


def is_open(name: str) -> bool:
    """Returns whether this process has a file of that name open."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return any(name in str(link) for link in links)


async def nothing() -> AsyncIterator[Reports]:
    """Acts as a worker that is connected and stays silent."""
    await asyncio.Event().wait()
    yield ()


async def test_memory_that_comes_after_the_end_is_closed() -> None:
    back = Return(session_pb2.AttachRequest(rank_ticket=TICKET, world_size=1))
    here, worker = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=here)
    request = session_pb2.AttachRankRequest(ticket=TICKET, rank=0, returns=True)
    taken = asyncio.ensure_future(back.take(request, nothing(), SocketEnd(writer)))
    _, (given, *_), _, _ = await asyncio.to_thread(socket.recv_fds, worker, 4096, 1)
    back.end()  # the scheduler has hung up
    memory = os.memfd_create("given-too-late")
    with socket.socket(fileno=given) as into:
        socket.send_fds(into, [b"."], [memory])
    os.close(memory)
    with pytest.raises(PermissionDenied):
        await taken
    assert not is_open("given-too-late")
    assert not back.memory
    writer.close()
    worker.close()
