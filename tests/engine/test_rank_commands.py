"""What a worker does with commands that it cannot perform: it ends its connection, which its lead cannot overlook."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core.layout import PoolKind
from kvgrpc.engine import Rank, RankTicket
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire.description import pool_to_proto
from kvgrpc.wire.frames import encode
from tests.engine.made import layout
from tests.engine.support import WAIT_S

COMMANDS = {
    "connect": rank_pb2.RankCommand(connect=rank_pb2.ConnectCommand(peer="p", peer_rank=1)),
    "disconnect": rank_pb2.RankCommand(disconnect=rank_pb2.DisconnectCommand(peer="p", peer_rank=1)),
    "post": rank_pb2.RankCommand(
        post=rank_pb2.PostCommand(posting_id="t/0", peer="p", peer_rank=1, operation=rank_pb2.POST_OPERATION_READ)
    ),
    "post neither way": rank_pb2.RankCommand(post=rank_pb2.PostCommand(posting_id="t/0", peer="p")),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_the_worker_cannot_perform_ends_the_session(
    tmp_path: Path, command: rank_pb2.RankCommand
) -> None:
    path = str(tmp_path / "lead.sock")
    pool = layout()
    attached = session_pb2.AttachRankResponse(pool=pool_to_proto(pool, PoolKind.ENGINE_MANAGED))
    batch = session_pb2.RankCommandBatch(commands=[command])
    said = encode(session_pb2.ServerFrame(rank_attached=attached)) + encode(session_pb2.ServerFrame(commands=batch))
    with socket.socket(socket.AF_UNIX) as lead, ThreadPoolExecutor(1) as thread:
        lead.bind(path)
        lead.listen()
        lead.settimeout(WAIT_S)
        ended = thread.submit(_play, lead, said)
        memory = np.zeros(pool.total_bytes, dtype=np.uint8)
        with Rank(RankTicket(path, b"ticket", pool.total_bytes), 0, [memory], data_paths=("cma",)):
            ended.result(WAIT_S)


def _play(lead: socket.socket, said: bytes) -> None:
    """A lead that says so much, and listens until the worker ends the connection."""
    worker, _ = lead.accept()
    with worker:
        worker.settimeout(WAIT_S)
        worker.sendall(said)
        while worker.recv(1 << 16):
            pass
