"""Ends of reads and processes of data path `nixl`: peers that die or stop, and exits at any moment.

A process's end is seen from outside, by its exit code, since the library can fault in its own destruction. Over TCP
bytes move only while both sides make progress, so that tests can interrupt a read. Over UCX's default transports a
slice is copied within one call.
"""

import contextlib
from collections.abc import Iterator
from textwrap import dedent

import pytest

from tests.datapath.nixl.peer import TCP, NixlPeer, scenario

# Several slices: over TCP, more than one call moves.
BYTES = 64 << 20


@pytest.fixture(scope="module")
def peer() -> Iterator[NixlPeer]:
    with NixlPeer((1 << 20,)) as peer:
        yield peer


@pytest.mark.parametrize("env", [{}, TCP], ids=["default", "tcp"])
def test_a_peer_killed_under_a_read_fails_it_and_no_byte_follows(env: dict[str, str]) -> None:
    with NixlPeer((BYTES,), env) as peer:
        result = scenario(
            """
            finish(post())
            posting = under_way()
            os.kill(pid, signal.SIGKILL)
            while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
                pass
            # What had left the peer still counts.
            assert finish(posting) is PostingState.FAILED or memory.all()
            with contextlib.suppress(DataPathFailed):
                assert finish(post()) is PostingState.FAILED
            at_end = memory.copy()
            for _ in range(2000):
                path.progress()
            assert np.array_equal(memory, at_end)
            try:
                post()
            except DataPathFailed as error:
                assert "broke before" in str(error)
            else:
                raise AssertionError("a broken connection was used")
            remote.close()
            """,
            peer,
            env,
        )
    assert result.returncode == 0, result.stderr


def test_connections_cut_under_a_read_fail_it_and_no_byte_follows() -> None:
    """The peer lives and would go on."""
    with NixlPeer((BYTES,), TCP) as peer:
        result = scenario(
            """
            posting = under_way()
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
                    one.getpeername()
                    one.shutdown(socket.SHUT_RDWR)
            assert finish(posting) is PostingState.FAILED or memory.all()
            at_end = memory.copy()
            for _ in range(2000):
                path.progress()
            assert np.array_equal(memory, at_end)
            """,
            peer,
            TCP,
        )
        assert result.returncode == 0, result.stderr


def test_a_stopped_peer_keeps_a_read_pending_and_after_close_no_byte_of_it_lands() -> None:
    with NixlPeer((BYTES,), TCP) as peer:
        result = scenario(
            """
            posting = under_way()
            os.kill(pid, signal.SIGSTOP)
            for _ in range(2000):
                assert posting.poll() is PostingState.PENDING
            path.close()
            assert posting.poll() is PostingState.FAILED
            at_end = memory.copy()
            os.kill(pid, signal.SIGCONT)
            print("closed", flush=True)
            sys.stdin.readline()
            assert np.array_equal(memory, at_end)
            """,
            peer,
            TCP,
            meanwhile=lambda: went_on(peer),
        )
    assert result.returncode == 0, result.stderr


def went_on(peer: NixlPeer) -> None:
    """Waits until the peer has finished, or until UCX has ended its process: see kvgrpc/datapath/nixl/path.py."""
    with contextlib.suppress(EOFError, OSError):
        peer.ask("poll")


# Lines that a process runs after `begin()` returned an unfinished posting, and how the process must end.
ENDS = {
    "closes twice": (
        """
        posting = begin()
        path.close()
        path.close()
        assert posting.poll() is PostingState.FAILED
        remote.close()
        path.progress()
        """,
        0,
    ),
    "exits": ("posting = begin(); sys.exit(3)", 3),
    "fails": ("posting = begin(); raise KeyError", 1),
    "exits from a SIGTERM handler": (
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
        posting = begin()
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while True:
            posting.poll()
        """,
        4,
    ),
    "forgets everything": ("posting = begin(); del posting, remote, path; gc.collect()", 0),
    "exits while another thread polls": (
        """
        posting = begin()
        def turn():
            while True:
                posting.poll()
                path.progress()
        threading.Thread(target=turn, daemon=True).start()
        """,
        0,
    ),
    "has another agent": (
        """
        other_memory = np.zeros(len(memory), dtype=np.uint8)
        other = NixlPath(PrivateMemory.of(other_memory), "other")
        others = reach(other, endpoint).read(runs, nothing)
        posting = begin()
        other.close()
        """,
        0,
    ),
    "forks": (
        """
        posting = begin()
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            assert not path._agent.closed
        """,
        0,
    ),
}


@pytest.fixture(scope="module")
def silent_peer() -> Iterator[NixlPeer]:
    """Makes a peer that answers nobody, so that a read stays posted."""
    with NixlPeer((1 << 20,)) as peer:
        peer.ask("stop_polling")
        yield peer


@pytest.mark.parametrize("way", ENDS)
def test_a_process_with_a_read_posted_ends_with_its_own_exit_code(silent_peer: NixlPeer, way: str) -> None:
    code, expected = ENDS[way]
    result = scenario("begin = post\n" + dedent(code), silent_peer)
    assert result.returncode == expected, result.stderr


def test_readers_that_came_and_went_do_not_harm_the_peer(silent_peer: NixlPeer) -> None:
    silent_peer.ask("poll")
    result = scenario("assert finish(post()) is PostingState.DONE", silent_peer)
    silent_peer.ask("stop_polling")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("way", ["exits", "exits while another thread polls"])
def test_a_process_with_bytes_arriving_ends_with_its_own_exit_code(way: str) -> None:
    code, expected = ENDS[way]
    with NixlPeer((BYTES,), TCP) as peer:
        result = scenario("begin = under_way\n" + dedent(code), peer, TCP)
    assert result.returncode == expected, result.stderr


@pytest.mark.parametrize("last", ["remote.close(); path.close()", ""], ids=["in order", "nothing"])
def test_a_process_whose_reads_are_over_may_close_or_not(peer: NixlPeer, last: str) -> None:
    result = scenario(f"assert finish(post()) is PostingState.DONE\n{last}", peer)
    assert result.returncode == 0, result.stderr
