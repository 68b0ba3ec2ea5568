"""Commands of a lead, and a worker that performs them. For a command that it cannot perform, the worker ends its
connection, which every lead notices.
"""

import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core import events
from kvgrpc.core.actions import Expect, MakeOffer, MapPeer, Operation, Post, RankAction, UnmapPeer
from kvgrpc.core.values.byte_runs import Runs
from kvgrpc.core.values.layout import PoolKind
from kvgrpc.core.values.strips import Repack, Strip
from kvgrpc.engine import Rank, RankTicket, rank as rank_module
from kvgrpc.errors import InternalError, Reason
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.wire import session
from kvgrpc.wire.description import pool_to_proto
from kvgrpc.wire.frames import FrameReader, encode
from kvgrpc.wire.rank_commands import command_of
from tests.datapath.movers import HeldWritten
from tests.engine.made import layout
from tests.engine.support import WAIT_S, refused

COMMANDS = {
    "post with five dimensions": rank_pb2.RankCommand(
        post=rank_pb2.PostCommand(
            posting_id="t/0",
            peer="p",
            operation=rank_pb2.POST_OPERATION_READ_AND_REPACK,
            repack=rank_pb2.RepackCommand(strips=[rank_pb2.Strip(shape=[1] * 5)]),
        )
    ),
    "copy out without a mirror": rank_pb2.RankCommand(copy_out=rank_pb2.CopyOutCommand(name="c1")),
    "post neither way": rank_pb2.RankCommand(post=rank_pb2.PostCommand(posting_id="t/0", peer="p")),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_a_worker_cannot_do_ends_the_session(tmp_path: Path, command: rank_pb2.RankCommand) -> None:
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


class Lead:
    """The parts of a lead that tests of commands need, with one worker."""

    def __init__(self, folder: Path, memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        path = str(folder / f"lead-{id(self)}.sock")
        pool = layout()
        attached = session_pb2.AttachRankResponse(pool=pool_to_proto(pool, PoolKind.ENGINE_MANAGED))
        self._reader = FrameReader(session_pb2.ClientFrame)
        self._reports: deque[events.Event] = deque()
        with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
            listener.bind(path)
            listener.listen()
            listener.settimeout(WAIT_S)
            accepted = thread.submit(self._accept, listener, encode(session_pb2.ServerFrame(rank_attached=attached)))
            self.rank = Rank(RankTicket(path, b"ticket", pool.total_bytes), 0, [memory], data_paths=("nixl",))
            accepted.result(WAIT_S)

    def _accept(self, listener: socket.socket, said: bytes) -> None:
        self._worker, _ = listener.accept()
        self._worker.settimeout(WAIT_S)
        self._worker.sendall(said)

    def perform(self, action: RankAction) -> None:
        batch = session_pb2.RankCommandBatch(commands=[command_of(action, ["nixl"])])
        self._worker.sendall(encode(session_pb2.ServerFrame(commands=batch)))

    def report(self) -> events.Event:
        """Returns the worker's next report."""
        while not self._reports:
            received = self._worker.recv(1 << 16)
            assert received, "the worker ended its connection"
            for frame in self._reader.feed(received):
                for report in frame.reports.reports:
                    event = session.report_to_event(0, report)
                    assert event is not None
                    self._reports.append(event)
        return self._reports.popleft()

    def close(self) -> None:
        self._worker.close()
        self.rank.close()


def test_a_worker_with_memory_of_its_own_reads_a_peer_s_and_writes_it(tmp_path: Path) -> None:
    nbytes = layout().total_bytes
    own, theirs = (np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8) for seed in (1, 2))
    lead, peer = Lead(tmp_path, own), Lead(tmp_path, theirs)
    try:
        peer.perform(MakeOffer(0, "key", "p@1"))
        offered = peer.report()
        assert isinstance(offered, events.EndpointOffered)
        peer.perform(Expect("access", open=True, writes=True))
        lead.perform(MapPeer(0, "p", offered.endpoint, 7))
        mapped = lead.report()
        assert isinstance(mapped, events.PeerMapped)
        assert (mapped.data_path, mapped.attempt) == ("nixl", 7)
        for operation, source, destination in ((Operation.READ, theirs, own), (Operation.WRITE, own, theirs)):
            before, sent = destination.copy(), source.copy()
            runs = Runs(*np.array([[10, 2000], [500, 3000], [100, 64]], dtype=np.int64))
            lead.perform(Post(0, "t", "p", runs, "", operation))
            ended = lead.report()
            assert isinstance(ended, events.PostingEnded)
            assert (ended.done, ended.nbytes, ended.quiesced) == (True, 164, True)
            before[500:600], before[3000:3064] = sent[10:110], sent[2000:2064]
            assert np.array_equal(destination, before)
            assert np.array_equal(source, sent)
            source[:] = source[::-1].copy()
        peer.perform(Expect("access", open=False, writes=True))
        peer.perform(MakeOffer(0, "key", "p@1"))
        peer.report()
    finally:
        lead.close()
        peer.close()


def test_a_worker_reads_several_ranks_of_a_peer_and_re_packs_what_they_send(tmp_path: Path) -> None:
    nbytes = layout().total_bytes
    rows = np.random.default_rng(1).integers(0, 256, (3, nbytes), dtype=np.uint8)
    own, *theirs = rows
    lead, *peers = (Lead(tmp_path, row) for row in rows)
    want = own.copy()
    try:
        for number, peer in enumerate(peers):
            peer.perform(MakeOffer(0, "key", "p@1"))
            offered = peer.report()
            assert isinstance(offered, events.EndpointOffered)
            lead.perform(MapPeer(0, "p", replace(offered.endpoint, rank=number), number))
            mapped = lead.report()
            assert isinstance(mapped, events.PeerMapped)
            assert (mapped.data_path, mapped.peer_rank, mapped.attempt) == ("nixl", number, number)
            peer.perform(Expect("access", open=True))
        runs = Runs(*np.array([[64], [0], [256]], dtype=np.int64))
        for number in range(2):
            place = np.array([number * 1000], dtype=np.int64)
            strip = Strip(place % 2 + 32, place, (2, 2), (128, 64), (64, 32), 32)
            repack = Repack((strip,), 256)
            lead.perform(Post(0, f"t/{number}", "p", runs, "", peer_rank=number, repack=repack))
            for i in range(4):
                want[number * 1000 + i * 32 :][:32] = theirs[number][96 + 64 * i :][:32]
        ended = [lead.report() for _ in peers]
        assert all(isinstance(end, events.PostingEnded) and end.done and end.nbytes == 128 for end in ended)
        assert np.array_equal(own, want)
        lead.perform(Post(0, "t", "p", runs, "", peer_rank=2))
        refused = lead.report()
        assert isinstance(refused, events.PostingEnded)
        assert "rank 2 of the peer p is not connected" in refused.message
        lead.perform(UnmapPeer(0, "p", gone=True))
        lead.perform(Post(0, "t", "p", runs, "", peer_rank=1))
        gone = lead.report()
        assert isinstance(gone, events.PostingEnded)
        assert not gone.done
    finally:
        for side in (lead, *peers):
            side.close()


@pytest.mark.parametrize("operation", Operation)
def test_an_unknown_writer_holds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Operation) -> None:
    path = HeldWritten()
    path.late_writes = "nobody knows"
    monkeypatch.setattr(rank_module, "make_paths", lambda *_: ([path], []))
    lead = Lead(tmp_path, np.zeros(layout().total_bytes, dtype=np.uint8))
    lead.perform(Expect("access", open=True, writes=operation is Operation.WRITE))
    lead.perform(MakeOffer(0, "key", "p@1"))
    lead.report()
    if operation is Operation.READ:
        lead.close()
    else:
        with refused(Reason.DATA_PATH_FAILED, InternalError):
            lead.close()


def _play(lead: socket.socket, said: bytes) -> None:
    """Plays a lead that sends these bytes, then reads until the worker ends the connection."""
    worker, _ = lead.accept()
    with worker:
        worker.settimeout(WAIT_S)
        worker.sendall(said)
        while worker.recv(1 << 16):
            pass
