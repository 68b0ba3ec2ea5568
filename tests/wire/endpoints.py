"""Hypothesis strategies for endpoints of ranks and the texts in them."""

from hypothesis import strategies as st

from kvgrpc.core.values.endpoints import (
    AllocationSpan,
    CmaEndpoint,
    CollectiveEndpoint,
    CudaVmmEndpoint,
    LoopbackEndpoint,
    MemoryKind,
    NixlEndpoint,
    ProcessEndpoint,
    RankEndpoint,
    Segment,
    ShmEndpoint,
    WindowEndpoint,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PRINTED = st.characters(codec="utf-8").filter(str.isprintable)
TEXT = st.text(PRINTED, max_size=20)
SEGMENTS = st.lists(st.builds(Segment, U64, U64, st.sampled_from(MemoryKind), U32), max_size=3).map(tuple)
PROCESS = st.builds(ProcessEndpoint, st.text(max_size=20), st.binary(max_size=32))
ENDPOINTS = st.builds(
    RankEndpoint,
    rank=U32,
    shm=st.none() | st.builds(ShmEndpoint, TEXT, st.binary(max_size=20), U64, st.binary(max_size=32), U64),
    cma=st.none() | st.builds(CmaEndpoint, PROCESS, SEGMENTS),
    cuda_vmm=st.none()
    | st.builds(
        CudaVmmEndpoint,
        TEXT,
        st.binary(max_size=32),
        st.binary(max_size=16),
        st.binary(max_size=32),
        st.lists(U64, max_size=3).map(tuple),
        st.lists(st.builds(AllocationSpan, U32, U64, U64), max_size=3).map(tuple),
        TEXT,
    ),
    nixl=st.none() | st.builds(NixlEndpoint, TEXT, st.binary(max_size=50), TEXT, SEGMENTS, st.none() | PROCESS),
    collective=st.none() | st.builds(CollectiveEndpoint, TEXT, U64, U32),
    loopback=st.none() | st.builds(LoopbackEndpoint, TEXT, U64),
    window=st.none() | st.builds(WindowEndpoint, U64, U32),
)
