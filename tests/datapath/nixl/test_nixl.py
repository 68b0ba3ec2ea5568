"""Data path `nixl` with the real library: UCX over this machine's transports, between real processes.

The contract of all data paths is in test_contract.py; ends of transfers and processes are in test_ends.py.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.core.values.endpoints import MemoryKind, NixlEndpoint, RankEndpoint, Segment
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable, PostingState
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.nixl import load, metadata
from kvgrpc.datapath.nixl.path import NixlPath
from kvgrpc.datapath.nixl.posting import SLICE_ROWS, NixlSlice, slices
from tests.datapath.nixl.peer import RUN, TCP, NixlPeer, finish, nothing, run_python, runs_over, scenario
from tests.datapath.peers import reach


def nixl_of(endpoint: RankEndpoint) -> NixlEndpoint:
    assert endpoint.nixl is not None
    return endpoint.nixl


class Rank:
    """This process's memory and path."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.bytes = np.zeros(nbytes, dtype=np.uint8)
        self.path = NixlPath(PrivateMemory.of(self.bytes), "test")
        self.endpoint = self.path.offer(RankEndpoint(0))

    def close(self) -> None:
        self.path.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


@pytest.fixture(scope="module")
def peer() -> Iterator[NixlPeer]:
    with NixlPeer((1 << 20,)) as peer:
        yield peer


# ---- moving bytes


def test_many_runs_are_posted_slice_by_slice_and_each_asks_for_the_next_turn(rank: Rank, peer: NixlPeer) -> None:
    runs = runs_over(1 << 20, 1 << 6)
    wakes: list[None] = []
    posting = reach(rank.path, peer.endpoint).read(runs, lambda: wakes.append(None))
    assert finish(posting) is PostingState.DONE
    assert len(runs) == 4 * SLICE_ROWS
    assert len(wakes) <= 3
    assert np.array_equal(rank.bytes[runs.dst[5] :][:64], peer.memory[runs.src[5] :][:64])
    assert np.array_equal(rank.bytes.reshape(-1, 64), peer.memory.reshape(-1, 64)[::-1])


def test_bytes_move_only_while_the_peer_makes_progress(rank: Rank) -> None:
    with NixlPeer((1 << 20,)) as peer:
        peer.ask("stop_polling")
        posting = reach(rank.path, peer.endpoint).read(runs_over(1 << 20), nothing)
        assert {posting.poll() for _ in range(2000)} == {PostingState.PENDING}
        peer.ask("poll")
        assert finish(posting) is PostingState.DONE


def test_each_slice_is_of_one_kind_of_memory_on_either_side() -> None:
    own = [Segment(1000, 100, MemoryKind.CUDA, 1), Segment(0, 200), Segment(500, 50, MemoryKind.PINNED_HOST)]
    peer = [Segment(0, 300), Segment(300, 50, MemoryKind.CUDA, 2)]
    rows = np.array([[1000, 0, 10], [0, 290, 10], [1090, 300, 10], [500, 340, 10]], dtype=np.int64)
    assert [describe(piece) for piece in slices(rows, own, peer)] == [
        ("VRAM", [[1000, 10, 1]], "DRAM", [[0, 10, 0]]),
        ("VRAM", [[1090, 10, 1]], "VRAM", [[300, 10, 2]]),
        ("DRAM", [[0, 10, 0]], "DRAM", [[290, 10, 0]]),
        ("DRAM", [[500, 10, 0]], "VRAM", [[340, 10, 2]]),
    ]


def test_no_slice_goes_past_the_end_of_a_part() -> None:
    own, peer = [Segment(0, 1000), Segment(1000, 100, MemoryKind.CUDA, 1)], [Segment(0, 1000)]
    rows = np.array([[0, 0, 10], [1000, 10, 5], [20, 15, 5], [30, 20, 7], [40, 27, 3]], dtype=np.int64)
    found = [(piece.part, *describe(piece)[1:2], piece.own_type) for piece in slices(rows, own, peer, [15, 20, 20, 30])]
    assert found == [
        (0, [[0, 10, 0]], "DRAM"),
        (0, [[1000, 5, 1]], "VRAM"),
        (1, [[20, 5, 0]], "DRAM"),
        (3, [[30, 7, 0], [40, 3, 0]], "DRAM"),
    ]


def describe(piece: NixlSlice) -> tuple[str, list[list[int]], str, list[list[int]]]:
    return piece.own_type, piece.own.tolist(), piece.peer_type, piece.peer.tolist()


def test_an_idle_agent_costs_no_processor_time(rank: Rank, peer: NixlPeer) -> None:
    remote = reach(rank.path, peer.endpoint)
    assert finish(remote.read(runs_over(1 << 20), nothing)) is PostingState.DONE
    before, began = time.process_time(), time.monotonic()
    threading.Event().wait(0.5)
    assert time.process_time() - before < 0.02 * (time.monotonic() - began)


# ---- connecting: nothing of a peer's is believed


def test_a_peer_is_connected_once_and_again_after_it_was_closed(rank: Rank, peer: NixlPeer) -> None:
    remote = reach(rank.path, peer.endpoint)
    with pytest.raises(DataPathUnavailable, match="connected already"):
        reach(rank.path, peer.endpoint)
    remote.close()
    remote.close()
    with pytest.raises(DataPathFailed, match="closed"):
        remote.read(runs_over(RUN), nothing)
    assert finish(reach(rank.path, peer.endpoint).read(runs_over(RUN), nothing)) is PostingState.DONE


def test_an_agent_does_not_connect_to_itself(rank: Rank) -> None:
    with pytest.raises(DataPathUnavailable, match="connected already"):
        reach(rank.path, rank.endpoint)


def resealed(endpoint: NixlEndpoint, change: Callable[[bytes], bytes]) -> NixlEndpoint:
    """Changes the metadata of an endpoint and seals it again, as an attacker would."""
    return replace(endpoint, metadata=metadata.seal(change(metadata.unseal(endpoint.metadata))))


def address_at(unsealed: bytes) -> int:
    """Returns the offset of UCX's address, behind its tag and length."""
    return unsealed.index(b"UCX|c") + 13


CHANGES: dict[str, Callable[[NixlEndpoint], NixlEndpoint]] = {
    "no metadata": lambda n: replace(n, metadata=b""),
    "damaged": lambda n: replace(n, metadata=n.metadata[:99] + b"?" + n.metadata[100:]),
    "not metadata": lambda n: resealed(n, lambda _: b"something else"),
    "cut short": lambda n: resealed(n, lambda m: m[:-1]),
    "cut to its head": lambda n: resealed(n, lambda m: m[:14]),
    "one byte more": lambda n: resealed(n, lambda m: m + b"|"),
    "a length beyond the end": lambda n: resealed(n, lambda m: m.replace(b"DList\n", b"DList\xff")),
    "an unknown memory type": lambda n: resealed(
        n, lambda m: m.replace(b"|t\4\0\0\0\0\0\0\0\0", b"|t\4\0\0\0\0\0\0\0\7")
    ),
    "two backends": lambda n: resealed(n, lambda m: m.replace(b"\0\1\0\0\0\0\0\0\0|t", b"\0\2\0\0\0\0\0\0\0|t")),
    "an address of another version": lambda n: resealed(n, lambda m: m[: (a := address_at(m))] + b"\x7f" + m[a + 1 :]),
    "too long": lambda n: resealed(n, lambda m: m + bytes(1 << 21)),
    "another agent": lambda n: replace(n, agent="another"),
    "another backend": lambda n: replace(n, backend="GDS"),
    "no memory": lambda n: replace(n, segments=()),
    "more memory": lambda n: replace(n, segments=(replace(n.segments[0], nbytes=n.segments[0].nbytes + 1),)),
    "another kind of memory": lambda n: replace(n, segments=(replace(n.segments[0], kind=MemoryKind.CUDA),)),
    "an address below zero": lambda n: replace(n, segments=(replace(n.segments[0], address=-1),)),
    "a size that overflows": lambda n: replace(n, segments=(replace(n.segments[0], nbytes=1 << 63),)),
    "memory twice": lambda n: replace(n, segments=n.segments * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_contradictory_offer_is_refused_and_a_true_one_works(rank: Rank, peer: NixlPeer, change: str) -> None:
    with pytest.raises(DataPathUnavailable):
        reach(rank.path, replace(peer.endpoint, nixl=CHANGES[change](nixl_of(peer.endpoint))))
    assert finish(reach(rank.path, peer.endpoint).read(runs_over(RUN), nothing)) is PostingState.DONE


def test_a_change_of_any_byte_of_the_metadata_is_refused(rank: Rank, peer: NixlPeer) -> None:
    offer = nixl_of(peer.endpoint)
    for place in range(len(offer.metadata)):
        changed = bytearray(offer.metadata)
        changed[place] ^= 0x55
        with pytest.raises(DataPathUnavailable, match="not those that were sent"):
            reach(rank.path, replace(peer.endpoint, nixl=replace(offer, metadata=bytes(changed))))


def test_a_forged_offer_ends_the_process_only_inside_the_backend(peer: NixlPeer) -> None:
    result = scenario(
        """
        from kvgrpc.datapath.nixl import metadata
        rng = random.Random(5)
        offer, refused = endpoint.nixl, 0
        true = metadata.unseal(offer.metadata)
        address = true.index(b"UCX|c") + 13
        own = [*range(address + 1, true.index(b"MemSection") - 9), *range(len(true) - 12, len(true) - 1)]
        ours = [place for place in range(len(true)) if place not in own]
        remote.close()
        for trial in range(3 * len(ours)):
            changed = bytearray(true)
            for place in [ours[trial % len(ours)], *rng.choices(ours, k=rng.choice((0, 0, 1, 7)))]:
                changed[place] = rng.randrange(256)
            try:
                sealed = metadata.seal(bytes(changed))
                reach(path, replace(endpoint, nixl=replace(offer, metadata=sealed))).close()
            except DataPathUnavailable:
                refused += 1
        print(refused, 3 * len(ours))
        remote = reach(path, endpoint)
        assert finish(post()) is PostingState.DONE
        """,
        peer,
    )
    assert result.returncode == 0, result.stderr
    refused, tried = map(int, result.stdout.split())
    assert refused > 0.95 * tried


def test_metadata_says_the_agent_its_backend_and_its_memory(rank: Rank) -> None:
    offer = nixl_of(rank.endpoint)
    said = metadata.parse(metadata.unseal(offer.metadata))
    assert (said.agent, said.backend) == (offer.agent, "UCX")
    assert said.registered == ((0, offer.segments[0].address, 1 << 20, 0),)


def test_a_peer_that_is_gone_is_refused_or_fails_the_first_read(rank: Rank) -> None:
    with NixlPeer((1 << 20,)) as peer:
        peer.signal(signal.SIGKILL)
        peer.process.wait()
        with contextlib.suppress(DataPathUnavailable):
            posting = reach(rank.path, peer.endpoint).read(runs_over(RUN), nothing)
            assert finish(posting) is PostingState.FAILED
            assert "connection" in posting.error


# ---- what the library and the environment allow


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_PACKAGES", ("no_such_nixl",))
    with pytest.raises(DataPathUnavailable, match="install kvgrpc's extra 'nixl'; shm and cma work without it"):
        Rank()


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    memory = PrivateMemory.of(np.zeros(4096, dtype=np.uint8))
    with pytest.raises(DataPathUnavailable, match=r"no backend 'NONE' here, only .*UCX"):
        NixlPath(memory, backend="NONE")


def test_loading_nixl_leaves_logging_and_the_environment_as_the_program_set_them(tmp_path: Path) -> None:
    """NIXL's own import closes log handlers, and a file opened with "w" would stay silent afterwards."""
    code = """
        import logging, os, sys
        logging.basicConfig(filename=sys.argv[1], filemode="w", level=logging.INFO)
        os.environ["UCX_TCP_CONN_NB"] = "n"
        from kvgrpc.datapath.nixl.path import NixlPath
        from kvgrpc.datapath.host.memory import PrivateMemory
        path = NixlPath(PrivateMemory.of(bytearray(4096)))
        logging.info("written after")
        path.close()
        assert logging.raiseExceptions and "UCX_LOG_FILE" not in os.environ
        print(os.environ["UCX_TCP_CONN_NB"], os.environ["UCX_RCACHE_MAX_UNRELEASED"])
    """
    output = run_python(code, str(tmp_path / "log"))
    assert (output.stdout, output.stderr) == ("n 1024\n", "")
    assert "written after" in (tmp_path / "log").read_text()


def test_tcp_is_refused_unless_it_is_asked_for_and_the_error_says_how(peer: NixlPeer) -> None:
    result = scenario("", peer, {"UCX_TLS": "^cma"})
    assert "UCX_TLS=tcp in the environment of both accepts that" in result.stderr


def test_ucx_tls_forces_tcp_and_the_path_says_so(peer: NixlPeer) -> None:
    code = "assert finish(post()) is PostingState.DONE; print(remote.why)"
    by_default = scenario(code, peer)
    forced = scenario(code, peer, TCP)
    assert (by_default.returncode, forced.returncode) == (0, 0)
    assert by_default.stdout.startswith("NIXL over UCX by ")
    assert "tcp/" in forced.stdout
    assert "cma" not in forced.stdout


# ---- closing


def test_close_gives_every_descriptor_of_the_agent_back() -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    Rank().close()  # UCX opens some descriptors once for the process
    with NixlPeer((1 << 20,)) as peer:
        before = descriptors()
        rank = Rank()
        remote = reach(rank.path, peer.endpoint)
        finish(remote.read(runs_over(1 << 20), nothing))
        assert descriptors() > before
        assert remote.process is not None
        remote.process.close()
        rank.close()
        assert descriptors() == before


def test_a_closed_path_connects_to_no_peer(rank: Rank, peer: NixlPeer) -> None:
    rank.path.close()
    with pytest.raises(DataPathUnavailable, match="closed"):
        reach(rank.path, peer.endpoint)
