"""What a rank hears of a send that its peer refused: whether nothing is sent, and whether another group helps."""

import pytest

from kvgrpc.core.values.sends import MEET, SendAsk
from kvgrpc.errors import KVGrpcError, PreconditionFailed, Reason, Unavailable
from kvgrpc.service.peers.port import send_answer

NO_PATH = PreconditionFailed(Reason.NO_DATA_PATH, "a library is missing")
NO_GROUP = PreconditionFailed(Reason.DATA_PATH_FAILED, "there is no group")
NOT_HIS = PreconditionFailed(Reason.ACCESS_CLOSED, "the access is closed")
LOST = Unavailable(Reason.PEER_UNREACHABLE, "the connection broke")


@pytest.mark.parametrize(
    ("sequence", "error", "known", "regroup", "permanent"),
    [
        (MEET, NO_PATH, True, False, True),
        (MEET, NO_GROUP, True, True, False),
        (1, NO_PATH, True, True, False),
        (1, NO_GROUP, True, True, False),
        (1, NOT_HIS, True, False, False),
        (MEET, LOST, False, False, False),
    ],
)
def test_only_a_meeting_that_the_peer_refused_fails_for_good(
    sequence: int, error: KVGrpcError, known: bool, regroup: bool, permanent: bool
) -> None:
    heard = send_answer(SendAsk(0, 0, 1, sequence), error)
    assert (heard.known, heard.regroup, heard.permanent) == (known, regroup, permanent)
    assert (heard.error, heard.sequence) == (error.sentence, sequence)
