"""What a rank offers, path by path."""

import itertools

import pytest

from kvgrpc.core.values.endpoints import (
    CmaEndpoint,
    LoopbackEndpoint,
    NixlEndpoint,
    ProcessEndpoint,
    RankEndpoint,
    ShmEndpoint,
)

OFFERS = {
    "shm": ShmEndpoint("@s", b"token", 64, b"nonce", 64),
    "cma": CmaEndpoint(ProcessEndpoint("@p", b"token"), ()),
    "nixl": NixlEndpoint("a", b"metadata", "UCX", ()),
    "loopback": LoopbackEndpoint("k", 64),
}
WHOLE = RankEndpoint(3, **OFFERS)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", range(len(OFFERS) + 1))
def test_an_offer_can_be_cut_down_to_some_data_paths(count: int) -> None:
    for kept in itertools.combinations(OFFERS, count):
        cut = WHOLE.only(kept)
        assert cut.rank == 3
        assert {name: getattr(cut, name) for name in OFFERS} == {
            name: OFFERS[name] if name in kept else None for name in OFFERS
        }
