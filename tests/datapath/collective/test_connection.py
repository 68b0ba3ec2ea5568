"""Only connections of the two told addresses are shut down."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.datapath.collective.connection import (
    NEAR_UNSENT_BYTES,
    NEAR_US,
    Sockets,
    admit_nobody_else,
    bound_if_near,
    bound_what_is_unsent,
    connections,
    round_trip_us,
    shut_down,
    sockets,
)
from kvgrpc.datapath.collective.half import Address
from tests.datapath.peers import DEADLINE_S, open_descriptors


def told(address: tuple[str, int]) -> Address:
    """Returns an address in the form in which a half tells it."""
    return socket.inet_aton(address[0]), address[1]


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    begun = socket.create_connection(listener.getsockname()[:2])
    return begun, listener.accept()[0]


NONE: Sockets = frozenset()
STRANGER_S = 0.2
"""Timeout of a stranger, in seconds; nobody answers it, so the test takes this long."""


def inode_of(connection: socket.socket) -> int:
    return os.fstat(connection.fileno()).st_ino


def test_a_connection_is_found_by_either_end_and_others_stay(listener: socket.socket) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    with listener, other:
        ours, theirs = pair(listener), pair(other)
        with ours[0], ours[1], theirs[0], theirs[1]:
            before = open_descriptors()
            assert connections([], [], NONE) == connections([(b"", 0)], [], NONE) == NONE
            accepted = connections([told(listener.getsockname())], [], NONE)
            begun = connections([], [told(listener.getsockname())], NONE)
            assert accepted == frozenset({inode_of(ours[1])})
            assert begun == frozenset({inode_of(ours[0])})
            shut_down(accepted)
            assert ours[0].recv(1) == b""
            theirs[0].sendall(b"x")
            assert theirs[1].recv(1) == b"x"
            assert open_descriptors() == before


def test_what_was_connected_before_the_group_is_not_its_own_whatever_its_peer_tells(listener: socket.socket) -> None:
    with listener:
        old, before = pair(listener), sockets()
        new = pair(listener)
        with old[0], old[1], new[0], new[1]:
            address = told(listener.getsockname())
            assert connections([address], [address], before) == {inode_of(new[0]), inode_of(new[1])}


def test_a_socket_that_only_listens_is_left(listener: socket.socket) -> None:
    with listener:
        assert connections([told(listener.getsockname())], [], NONE) == NONE
        begun, accepted = pair(listener)
        begun.close()
        accepted.close()


def test_who_comes_when_nobody_else_is_admitted_reaches_nobody_and_who_is_there_stays(listener: socket.socket) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    with listener, other:
        here, there = pair(listener)
        admit_nobody_else([told(listener.getsockname())], NONE)
        with here, there, socket.socket() as stranger:
            stranger.settimeout(STRANGER_S)
            with pytest.raises(TimeoutError):
                stranger.connect(listener.getsockname())
            here.sendall(b"x")
            there.settimeout(DEADLINE_S)
            assert there.recv(1) == b"x"
            begun, accepted = pair(other)
            begun.close()
            accepted.close()


def test_connections_of_version_6_are_found_too() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no loopback of version 6: {error}")
    with listener:
        begun, accepted = pair(listener)
        with begun, accepted:
            host, port, _, _ = listener.getsockname()
            found = connections([(socket.inet_pton(socket.AF_INET6, host), port)], [], NONE)
            assert found == {inode_of(accepted)}


def test_descriptors_that_are_no_sockets_are_not_touched_and_files_keep_their_locks(
    listener: socket.socket, tmp_path: Path
) -> None:
    with listener, (tmp_path / "lock").open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begun, accepted = pair(listener)
        with begun, accepted:
            bound_what_is_unsent(connections([told(listener.getsockname())], [], NONE))
        take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        taken = subprocess.run([sys.executable, "-c", take, held.name], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in taken.stderr


@pytest.mark.parametrize(("least_us", "bounded"), [(1, True), (NEAR_US, True), (NEAR_US + 1, False), (None, False)])
def test_how_far_a_sender_may_be_ahead_is_bounded_where_it_is_near_and_else_left_to_the_system(
    listener: socket.socket, least_us: int | None, bounded: bool
) -> None:
    with listener:
        begun, accepted = pair(listener)
        with begun, accepted:
            usual = begun.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            bound_if_near(begun, least_us)
            found = begun.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    if bounded:
        most = int(Path("/proc/sys/net/core/wmem_max").read_text())
        # Linux doubles the requested size for its own bookkeeping, and reports the doubled one.
        assert found == 2 * min(NEAR_UNSENT_BYTES, most)
    else:
        assert found == usual


def test_the_round_trip_of_a_connection_is_known_from_its_beginning(listener: socket.socket) -> None:
    with listener:
        begun, accepted = pair(listener)
        with begun, accepted:
            found = round_trip_us(begun)
            assert found is not None
            assert 0 < found < 1_000_000
