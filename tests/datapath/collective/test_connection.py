"""Only the connection of the two addresses that were told is shut down."""

import os
import socket
import struct

import pytest

from kvgrpc.datapath.collective.connection import (
    NEAR_UNSENT_BYTES,
    NEAR_US,
    bound_what_is_unread,
    is_near,
    round_trip_us,
    shut_down,
)
from tests.datapath.peers import open_descriptors


def told(address: tuple[str, int]) -> bytes:
    """As a library tells where it listens: a sockaddr_in among other bytes."""
    return b"before" + struct.pack("=H", socket.AF_INET) + struct.pack("!H", address[1]) + socket.inet_aton(address[0])


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    begun = socket.create_connection(listener.getsockname()[:2])
    return begun, listener.accept()[0]


def test_a_connection_is_found_by_either_end_and_others_stay(listener: socket.socket) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    with listener, other:
        ours, theirs = pair(listener), pair(other)
        with ours[0], ours[1], theirs[0], theirs[1]:
            before = open_descriptors()
            assert shut_down([], []) == 0
            assert shut_down([b"", b"nothing"], []) == 0
            assert shut_down([told(listener.getsockname())], []) == 1, "the end that was accepted there"
            assert ours[0].recv(1) == b""
            assert shut_down([], [told(other.getsockname())]) == 1, "the end that begun there"
            assert theirs[1].recv(1) == b""
            assert open_descriptors() == before


def test_a_socket_that_only_listens_is_left(listener: socket.socket) -> None:
    with listener:
        assert shut_down([told(listener.getsockname())], []) == 0
        begun, accepted = pair(listener)
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
            host, port, flow, _ = listener.getsockname()
            address = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, flow)
            assert shut_down([address + socket.inet_pton(socket.AF_INET6, host)], []) == 1
            assert accepted.recv(1) == b""


def test_descriptors_that_are_no_sockets_are_no_matter(listener: socket.socket) -> None:
    reading, writing = os.pipe()
    try:
        with listener:
            assert shut_down([told(listener.getsockname())], []) == 0
    finally:
        os.close(reading)
        os.close(writing)


def test_what_is_unread_of_a_near_connection_is_bounded_and_that_of_others_is_not(listener: socket.socket) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    with listener, other:
        ours, theirs = pair(listener), pair(other)
        with ours[0], ours[1], theirs[0], theirs[1]:
            assert bound_what_is_unread([told(listener.getsockname())], []) == 1
            # Linux counts its own rows, too, and says twice what was asked for.
            bounded = ours[1].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            assert (bounded == 2 * NEAR_UNSENT_BYTES) == is_near(round_trip_us(ours[1]))
            assert theirs[1].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) != 2 * NEAR_UNSENT_BYTES


def test_how_much_a_far_connection_has_under_way_is_left_to_the_system(listener: socket.socket) -> None:
    assert not is_near(NEAR_US + 1)
    assert not is_near((1 << 32) - 1), "none was seen"
    with listener:
        begun, accepted = pair(listener)
        with begun, accepted:
            assert 0 < round_trip_us(begun) < 1_000_000, "the handshake has been seen"
