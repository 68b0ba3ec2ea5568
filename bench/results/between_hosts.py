"""Baselines and targets of cases over collective: the other ways to move bytes between hosts without RDMA."""

from dataclasses import dataclass

from bench.results.targets import Target

BETWEEN_HOSTS = {
    "gloo": "send and recv of torch.distributed with Gloo between two processes that map the same pools: the whole pool"
    " in messages of 4 MB, 8 of them under way, whatever the blocks are; over the loopback device, as the servers",
    "nixl_tcp": "raw NIXL with UCX_TLS=tcp in both processes, with the same runs; the better of READ and WRITE, each"
    " with NIXL's progress thread and without it",
}
_LARGE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class BetweenHosts:
    """The part of a case over collective. None means that the case has another data path, or that the library is
    missing. Above 1 we are faster.
    """

    gloo_gbps: float | None = None
    ratio_gloo: float | None = None
    nixl_tcp_gbps: float | None = None
    ratio_nixl_tcp: float | None = None
    nixl_tcp_mode: str = ""
    """The best mode: READ or WRITE, and how the other side made progress."""


def targets_of(case: BetweenHosts, block_bytes: int) -> list[Target]:
    """Returns the targets of a case over collective."""
    bound = 0.9 if block_bytes >= _LARGE_BYTES else 0.7
    return [
        Target("ratio_gloo", case.ratio_gloo, bound, at_least=True),
        Target("ratio_nixl_tcp", case.ratio_nixl_tcp, 1.0, at_least=True),
    ]
