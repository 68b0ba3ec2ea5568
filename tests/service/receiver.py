"""A rank that receives what a source sends, by a process group, without a server of its own."""

import threading
from typing import Any

import numpy as np

from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.endpoints import Segment
from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import PostingState
from kvgrpc.datapath.collective.gloo import GlooGroup
from kvgrpc.datapath.collective.group import GroupJob, ProcessGroup
from kvgrpc.datapath.collective.messages import messages
from kvgrpc.peer.v1 import peer_pb2
from tests.service.consumer import Consumer
from tests.service.engines import BLOCK_BYTES

WAIT_S = 60.0
HOST = "127.0.0.1"


def post_send(access: bytes, sequence: int, **fields: Any) -> peer_pb2.PostSendRequest:
    return peer_pb2.PostSendRequest(access_id=access, sequence=sequence, **{"epoch": 1, **fields})


class Receiver:
    """A consumer's rank that receives."""

    def __init__(self, consumer: Consumer) -> None:
        self.memory = np.zeros(4 * BLOCK_BYTES, dtype=np.uint8)
        self._consumer = consumer
        self._ready = threading.Event()
        self._group = ProcessGroup(
            lambda rendezvous: GlooGroup(sends=False, host=HOST, rendezvous=rendezvous),
            told=self._tell,
            ready=self._ready.set,
        )
        assert self._ready.wait(WAIT_S)
        assert not self._group.broken

    def _tell(self, values: Values) -> None:
        rows = [peer_pb2.GroupValue(key=key, value=value) for key, value in values]
        reply = self._consumer.ask(post_send(b"", 0, values=rows))
        self._group.learn(tuple((row.key, row.value) for row in reply.values))

    def receive(self, number: int, nbytes: list[int]) -> None:
        """Receives send `number`, of these numbers of bytes, one after the other into its memory."""
        lengths, done = np.array(nbytes, dtype=np.int64), threading.Event()
        runs = Runs(np.cumsum(lengths) - lengths, np.cumsum(lengths) - lengths, lengths)
        own = (Segment(self.memory.ctypes.data, len(self.memory)),)
        job = GroupJob(messages(runs, own, sends=False), done.set)
        self._group.start(number, job)
        assert done.wait(WAIT_S)
        assert job.poll() is PostingState.DONE, job.error

    def close(self) -> None:
        self._group.abort("the test is over")
        assert self._group.join(WAIT_S)
