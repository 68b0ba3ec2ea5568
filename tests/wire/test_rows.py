"""One row of a list fits into a message beside a whole page of others, however large its subject is."""

import numpy as np
from google.protobuf.message import Message

from kvgrpc.core.policy.values import LoadEnded, Loss, News, OnLoss, Save
from kvgrpc.core.tables.leases import LeaseTimes
from kvgrpc.core.tables.peers import Peer
from kvgrpc.core.tables.transfers import Direction, Failure, Phase, RankPath, Side, Transfer, TransferPath
from kvgrpc.core.values.bridge import bridges
from kvgrpc.core.values.compatibility import side_of
from kvgrpc.core.values.content import ContentId
from kvgrpc.core.values.limits import Limits
from kvgrpc.errors import KVGrpcError, NextStep, Reason
from kvgrpc.v1 import scheduler_pb2
from kvgrpc.wire import answers, description, scheduler
from kvgrpc.wire.bounds import ENDPOINTS_MAX, TEXT_BYTES_MAX
from tests.core.made_leases import lease
from tests.core.nodes import describe

PAGE_BYTES = 1 << 20
"""Maximum size of a page before its last row, in bytes."""
LIMITS = Limits()
LABEL = "\N{SNOWMAN}" * (TEXT_BYTES_MAX // 3)
SCATTERED = np.arange(0, 2 * LIMITS.blocks_per_request, 2) + (1 << 26)
"""Maximum number of blocks in a request, each a run of its own, with long ids."""
LONG = "\0" * 10_000_000
WORST = RankPath(4_000, 4_000, LONG[:20], LONG, ((LONG, LONG),) * 1_000)


def fits(row: Message) -> None:
    assert row.ByteSize() + PAGE_BYTES < LIMITS.message_bytes, row.ByteSize()


def test_a_transfer_of_thousands_of_ranks_fits_whatever_they_say() -> None:
    value = Transfer(
        id=LABEL, direction=Direction.RECEIVE, created=0.0, key=b"k" * 64, owner="me", request_id=LABEL,
        peer_engine_id=LABEL, peer_address=LABEL, peer_transfer_id=LABEL, lease_id=LABEL,
        phases=(Phase("handshake", 0.0),) * 16, paths=(TransferPath(WORST, 1 << 60, 1 << 31),) * ENDPOINTS_MAX,
        layers_done=tuple((2 * i, 1) for i in range(10_000)),
        failure=Failure(Reason.NO_DATA_PATH, LONG, "handshake", Side.SOURCE, 4_000),
    )  # fmt: skip
    fits(answers.transfer(value, 1.0))


def test_a_peer_of_thousands_of_ranks_fits_whatever_they_say() -> None:
    made = describe(LABEL, 1 << 52)
    side = side_of(made)
    peer = Peer(made, (), bridges(side, side), 0.0, LABEL)
    peer.paths = {(rank, rank): WORST for rank in range(ENDPOINTS_MAX)}
    fits(description.peer_to_proto(peer, 1.0, 9))


def test_a_lease_of_scattered_blocks_fits() -> None:
    made = lease(
        LABEL, request_id=LABEL, transfer_id=LABEL, blocks=(SCATTERED,), content=ContentId(1 << 30, opaque=b"x"),
        consumers=1 << 20, labels=tuple((f"{i:064}", "x" * 64) for i in range(16)),
    )  # fmt: skip
    fits(answers.lease(made, LeaseTimes(12.5, 600.0, 17.5, 1.5), 1 << 52))


def test_news_fit_into_one_reply_however_many_there_are_and_the_rest_comes_later() -> None:
    blocks = (tuple(SCATTERED.tolist()),)
    loss = Loss(Reason.NO_DATA_PATH, LONG, NextStep.RECOMPUTE, "handshake", Side.SOURCE, 0)
    rows: list[News] = [Save("r", blocks), LoadEnded("r", 0, loss, blocks, OnLoss.RECOMPUTE)] * 8
    left, replies = list(enumerate(rows, 1)), 0
    while left:
        reply = scheduler_pb2.PollSchedulerNewsResponse()
        scheduler.put_news(iter(left), reply, 1 << 52)
        assert 0 < reply.ByteSize() < LIMITS.message_bytes
        assert reply.more == (len(reply.news) < len(left))
        left, replies = left[len(reply.news) :], replies + 1
    assert replies > 1


def test_an_error_is_short_however_much_it_quotes() -> None:
    assert len(KVGrpcError(Reason.INTERNAL, LONG).message.encode()) <= 1024
