"""A watch of offers is told in messages of bounded size, and can resume after each of them."""

from itertools import pairwise

import pytest

from kvgrpc.core.tables.offer_index import STEP_UNITS, OfferChanges, OfferIndex
from kvgrpc.core.values.content import DIGEST_BYTES, UNIT_TOKENS, ContentId
from kvgrpc.core.values.limits import Limits
from kvgrpc.v1 import lease_pb2
from kvgrpc.v1.common_pb2 import ResponseHeader
from kvgrpc.wire import offers
from kvgrpc.wire.offers import news_to_proto

HEADER = ResponseHeader(engine_id="P", incarnation=7)


def told(changes: OfferChanges, *, snapshot: bool) -> list[lease_pb2.WatchOffersResponse]:
    return list(news_to_proto(HEADER, changes, snapshot=snapshot))


def index(count: int, units: int) -> OfferIndex:
    made = OfferIndex(Limits())
    for number in range(count):
        made.add(f"l{number}", "", ContentId(units * UNIT_TOKENS, number.to_bytes(DIGEST_BYTES, "big") * units))
    return made


def test_a_message_without_changes_still_says_where_to_resume() -> None:
    (only,) = told(OfferChanges(5, ()), snapshot=False)
    assert (only.header, only.snapshot, list(only.changes), only.offer_seq) == (HEADER, False, [], 5)


def test_a_large_snapshot_comes_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "DIGESTS_BYTES", 1_000)
    of = index(count=40, units=4 * STEP_UNITS)
    messages = told(of.all_of(""), snapshot=True)
    assert len(messages) > 5
    assert [message.snapshot for message in messages] == [True, *[False] * (len(messages) - 1)]
    assert max(message.ByteSize() for message in messages) < 1_500
    numbers = [change.offer_number for message in messages for change in message.changes]
    assert numbers == list(range(1, 41))
    assert all(one.offer_seq < other.offer_seq for one, other in pairwise(messages))
    assert messages[-1].offer_seq == of.seq


def test_whoever_resumes_after_any_message_knows_in_the_end_what_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "DIGESTS_BYTES", 200)
    of = index(count=9, units=STEP_UNITS)
    for message in told(of.all_of(""), snapshot=True):
        kept = index(count=9, units=STEP_UNITS)
        seen = {n for n in range(1, 10) if n <= message.offer_seq}
        for lease in ("l1", "l6"):
            kept.remove(lease)
        changes = kept.changes_after("", message.offer_seq)
        assert changes is not None
        for again in told(changes, snapshot=False):
            for change in again.changes:
                (seen.discard if change.ended else seen.add)(change.offer_number)
        assert seen == {1, 3, 4, 5, 6, 8, 9}, message.offer_seq
