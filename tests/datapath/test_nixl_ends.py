"""How reads and processes of data path `nixl` end: peers that die or stop, and exits at any moment.

A process's end is seen from outside, by its exit code: the library can fault in its own destruction.
Over TCP bytes move only while both sides make progress, so that a read is met under way; over what
UCX takes by default a slice is copied within one call.
"""

import signal
from collections.abc import Iterator

import pytest

from kvgrpc.datapath.nixl_posting import SLICE_ROWS
from tests.datapath.nixl_peer import RUN, TCP, NixlPeer, scenario

# Two slices, and long enough over TCP to be met under way.
BYTES = 2 * SLICE_ROWS * RUN


@pytest.mark.parametrize("env", [{}, TCP], ids=["default", "tcp"])
def test_a_peer_killed_under_a_read_fails_it_and_no_byte_follows(env: dict[str, str]) -> None:
    with NixlPeer((BYTES,), env) as peer:
        result = scenario(
            """
            postings = [under_way(), remote.read(runs, nothing)]
            os.kill(pid, signal.SIGKILL)
            assert [finish(posting) for posting in postings] == [PostingState.FAILED] * 2
            at_end = memory.copy()
            for _ in range(2000):
                path.progress()
            assert np.array_equal(memory, at_end)
            assert postings[0].error and postings[0].poll() is PostingState.FAILED
            try:
                remote.read(runs, nothing)
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
            assert finish(posting) is PostingState.FAILED
            at_end = memory.copy()
            for _ in range(2000):
                path.progress()
            assert np.array_equal(memory, at_end)
            """,
            peer,
            TCP,
        )
        assert result.returncode == 0, result.stderr
        assert peer.process.poll() is None


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
            meanwhile=lambda: peer.ask("poll"),
        )
    assert result.returncode == 0, result.stderr


ENDS = {
    "closes in order": ("assert finish(post()) is PostingState.DONE; remote.close(); path.close()", 0),
    "closes nothing": ("assert finish(post()) is PostingState.DONE", 0),
    "closes twice in the middle": (
        """
        posting = under_way()
        path.close()
        path.close()
        assert posting.poll() is PostingState.FAILED
        remote.close()
        path.progress()
        """,
        0,
    ),
    "exits in the middle": ("posting = under_way(); sys.exit(3)", 3),
    "fails in the middle": ("posting = under_way(); raise KeyError", 1),
    "exits from a SIGTERM handler in the middle": (
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
        posting = under_way()
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while True:
            posting.poll()
        """,
        4,
    ),
    "is killed by SIGTERM in the middle": (
        "posting = under_way(); os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
        -signal.SIGTERM,
    ),
    "forgets everything in the middle": ("posting = under_way(); del posting, remote, path; gc.collect()", 0),
    "exits while another thread polls": (
        """
        posting = under_way()
        def turn():
            while True:
                posting.poll()
                path.progress()
        threading.Thread(target=turn, daemon=True).start()
        """,
        0,
    ),
    "has two agents in the middle": (
        """
        other_memory = np.zeros(len(memory), dtype=np.uint8)
        other_path = NixlPath(PrivateMemory.of(other_memory), "other")
        other = other_path.connect(endpoint).read(runs, nothing)
        posting = under_way()
        path.close()
        assert finish(other) is PostingState.DONE
        assert other_memory.all()
        """,
        0,
    ),
    "dies as a fork's parent goes on": (
        """
        posting = under_way()
        child = os.fork()
        if not child:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert finish(posting) is PostingState.DONE
        """,
        0,
    ),
}


@pytest.fixture(scope="module")
def big_peer() -> Iterator[NixlPeer]:
    with NixlPeer((BYTES,), TCP) as peer:
        yield peer


@pytest.mark.parametrize("way", ENDS)
def test_a_process_ends_with_its_own_exit_code(big_peer: NixlPeer, way: str) -> None:
    code, expected = ENDS[way]
    result = scenario(code, big_peer, TCP)
    assert result.returncode == expected, result.stderr
    assert big_peer.process.poll() is None
