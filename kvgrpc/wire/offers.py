"""Offers that are found by their content, and what watchers of them are told."""

from collections.abc import Iterator

from kvgrpc.core.send.findable import FoundOffer
from kvgrpc.core.tables.leases import LeaseTimes
from kvgrpc.core.tables.offer_index import OfferChanges
from kvgrpc.v1 import common_pb2, lease_pb2
from kvgrpc.wire.values import duration, grant

DIGESTS_BYTES = 256 * 1024
"""Bytes of digests above which one message has no further offer."""


def found_to_proto(value: FoundOffer, times: LeaseTimes) -> lease_pb2.FoundOffer:
    return lease_pb2.FoundOffer(
        grant=grant(value.token),
        token_count=value.tokens,
        remaining=duration(times.remaining_s),
        soft_in=None if times.soft_in_s is None else duration(times.soft_in_s),
    )


def news_to_proto(
    header: common_pb2.ResponseHeader, news: OfferChanges, *, snapshot: bool
) -> Iterator[lease_pb2.WatchOffersResponse]:
    """Returns the messages of changes, at least one. A watch can resume after each of them: all ended offers are in the
    first one.
    """
    made = lease_pb2.WatchOffersResponse(header=header, snapshot=snapshot)
    for number in news.ended:
        made.changes.add(offer_number=number, ended=True)
    nbytes = 0
    for offer in news.offered:
        if nbytes >= DIGESTS_BYTES:
            made.offer_seq = made.changes[-1].offer_number
            yield made
            made, nbytes = lease_pb2.WatchOffersResponse(header=header), 0
        digests = offer.told_digests
        made.changes.add(offer_number=offer.number, digests=digests, token_count=offer.content.tokens)
        nbytes += len(digests) + 16
    made.offer_seq = news.seq
    yield made
