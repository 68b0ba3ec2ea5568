"""Endpoints of a rank: one offer for each data path."""

import itertools

import pytest

from kvgrpc.core.values.endpoints import (
    AllocationSpan,
    CmaEndpoint,
    CudaVmmEndpoint,
    LoopbackEndpoint,
    MemoryKind,
    NixlEndpoint,
    ProcessEndpoint,
    RankEndpoint,
    Segment,
    ShmEndpoint,
)

OFFERS = {
    "shm": ShmEndpoint("@s", b"token", 64, b"nonce", 64),
    "cma": CmaEndpoint(ProcessEndpoint("@p", b"token"), ()),
    "cuda_vmm": CudaVmmEndpoint(
        "@g", b"token", b"gpu", b"nonce", (64, 64), (AllocationSpan(0, 8, 56), AllocationSpan(1, 0, 7))
    ),
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


def test_memory_is_on_a_device_where_a_data_path_of_devices_reaches_it_or_says_that_it_does_not() -> None:
    on_gpu = NixlEndpoint("a", b"metadata", "UCX", (Segment(1, 64, MemoryKind.CUDA),))
    assert [
        RankEndpoint(3, cuda_vmm=CudaVmmEndpoint(why_not="cudaMalloc")).on_device,
        RankEndpoint(3, nixl=on_gpu).on_device,
        WHOLE.only(("shm", "cma", "nixl")).on_device,
    ] == [True, True, False]


def test_memory_by_descriptors_is_as_long_as_its_spans() -> None:
    assert WHOLE.cuda_vmm is not None
    assert WHOLE.cuda_vmm.nbytes == 63
