"""A peer's half of a group is validated before the library hears of it."""

import socket

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathFailed, DataPathUnavailable
from kvgrpc.datapath.collective.half import CONNECTIONS, TOKEN_BYTES, Half, read_half
from tests.datapath.pumped import HOST

V4, V6 = socket.inet_aton("10.1.2.3"), socket.inet_pton(socket.AF_INET6, "2001:db8::7")
TOKEN = b"t" * TOKEN_BYTES
PORT = b"\x12\x34"


def half(first: bytes, second: bytes = PORT + V4, token: bytes = TOKEN) -> Values:
    return (("token", token), ("0", first), ("1", second))


@pytest.mark.parametrize(("host", "ip"), [(HOST, V4), ("::1", V6)])
def test_a_half_is_read_as_it_was_told_in_any_order(host: str, ip: bytes) -> None:
    told = Half(TOKEN, tuple((ip, 5_000 + index) for index in range(CONNECTIONS)))
    assert read_half(told.values, host) == read_half(told.values[::-1], host) == told


@pytest.mark.parametrize(
    "values",
    [
        (),
        half(PORT + V4)[:2],
        (*half(PORT + V4), ("2", PORT + V4)),
        (*half(PORT + V4), ("0", PORT + V4)),
        (("token", TOKEN), ("0/0/1", PORT + V4), ("1/0/1", PORT + V4)),
        half(PORT + V4, token=TOKEN[1:]),
        half(b""),
        half(PORT),
        half(PORT + V4[1:]),
        half(PORT + V4 + b"\0"),
        half(PORT + V6),
        half(PORT + V4, PORT + V6),
        half(b"\0\0" + V4),
        half(PORT + socket.inet_aton("0.0.0.0")),
        half(PORT + socket.inet_aton("224.0.0.1")),
        half(PORT + socket.inet_aton("255.255.255.255")),
    ],
)
def test_what_is_no_half_or_names_where_nobody_listens_is_refused(values: Values) -> None:
    with pytest.raises((DataPathFailed, DataPathUnavailable)):
        read_half(values, HOST)


@pytest.mark.parametrize(("host", "ip"), [(HOST, V6), ("::1", V4)])
def test_ranks_of_two_versions_of_ip_are_told_so_and_never_meet(host: str, ip: bytes) -> None:
    with pytest.raises(DataPathUnavailable, match=r"at an address of IPv\d, the other one at one of IPv\d"):
        read_half(half(PORT + ip, PORT + ip), host)


@given(st.lists(st.tuples(st.sampled_from(["token", "0", "1", "0/0/1"]), st.binary(max_size=40)), max_size=4))
def test_whatever_a_peer_says_is_a_half_or_refused(rows: list[tuple[str, bytes]]) -> None:
    try:
        found = read_half(tuple(rows), HOST)
    except (DataPathFailed, DataPathUnavailable):
        return
    assert len(found.addresses) == CONNECTIONS
    assert all(len(ip) == 4 and 0 < port < 65_536 for ip, port in found.addresses)
