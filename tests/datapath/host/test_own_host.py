"""A rank listens at this host's address on the way to its lead, or on loopback if the lead cannot be reached."""

import pytest

from kvgrpc.datapath.host.own_host import LOOPBACK, own_host


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1:50051", "127.0.0.1"),
        ("localhost:1", LOOPBACK),
        ("", LOOPBACK),
        ("no address", LOOPBACK),
        ("host.invalid:50051", LOOPBACK),
    ],
)
def test_a_rank_listens_where_its_lead_is_reached_else_on_loopback(address: str, host: str) -> None:
    assert own_host(address) == host
