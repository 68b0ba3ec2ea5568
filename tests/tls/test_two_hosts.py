"""Two leads on two hosts, which are network namespaces, each with a CA of its own."""

import ipaddress
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509

from kvgrpc.client import Client, Credentials, connect
from kvgrpc.errors import Reason, Unavailable
from tests.hosts import hosts
from tests.service.conftest import TEST_S
from tests.service.engines import SMALL_POOL, ServeProcess
from tests.tls.authority import Authority, Name
from tests.tls.pulls import pull

pytestmark = pytest.mark.timeout(TEST_S)

OF_P, OF_D = Authority("the CA of P"), Authority("the CA of D")
NETWORK = f"{hosts.NETWORK}.0/24"
FLAGS = ("--dial-allow", NETWORK, "--private-networks", NETWORK, "--data-paths", "collective", "--drain-s", "0")


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[None]:
    with hosts.two_hosts() as why_not:
        if why_not:
            pytest.skip(why_not)
        yield


@pytest.fixture
def stack(two_hosts: None) -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def lead(stack: ExitStack, folder: Path, host: hosts.Host, authority: Authority, *trusted: Authority) -> str:
    """Starts a lead on a host, with a certificate of the authority. Returns its address."""
    names: list[Name] = [
        x509.UniformResourceIdentifier(f"spiffe://test/{host.number}"),
        x509.IPAddress(ipaddress.ip_address(host.address)),
    ]
    files = authority.issue(folder / host.name, names)
    files.ca.write_bytes(b"".join(one.pem for one in trusted))
    flags = ("--listen", f"{host.address}:0", "--tls-dir", str(files.cert.parent), *FLAGS, *SMALL_POOL)
    process = ServeProcess(folder / f"{host.name}-lead", *flags, within=host.within)
    stack.callback(process.end)
    address: str = process.wait_ready()["address"]
    return address


def caller(folder: Path, address: str, authority: Authority) -> Client:
    """Returns a client of a router that has a certificate of the authority, and trusts both."""
    files = authority.issue(folder / "router", (x509.DNSName("router"),))
    files.ca.write_bytes(OF_P.pem + OF_D.pem)
    return connect(address, credentials=Credentials(dir=files.cert.parent))


async def test_leads_that_trust_each_others_ca_move_blocks(stack: ExitStack, tmp_path: Path) -> None:
    first = lead(stack, tmp_path, hosts.FIRST, OF_P, OF_P, OF_D)
    second = lead(stack, tmp_path, hosts.SECOND, OF_D, OF_P, OF_D)
    async with caller(tmp_path, first, OF_P) as p, caller(tmp_path, second, OF_P) as d:
        await pull(p, d)
        await pull(d, p)


async def test_a_lead_that_does_not_trust_the_others_ca_is_not_met_and_the_error_says_why(
    stack: ExitStack, tmp_path: Path
) -> None:
    first = lead(stack, tmp_path, hosts.FIRST, OF_P, OF_P)
    second = lead(stack, tmp_path, hosts.SECOND, OF_D, OF_P, OF_D)
    untrusted = f"the certificate of {second} is of a CA that this client does not trust"
    refused = f"{first} refuses this client's certificate in {tmp_path}/"
    async with caller(tmp_path, first, OF_P) as p, caller(tmp_path, second, OF_D) as d:
        for client, other, why in ((p, second, untrusted), (d, first, refused)):
            with pytest.raises(Unavailable) as met:
                await client.connect_peer(other)
            assert met.value.reason is Reason.PEER_UNREACHABLE
            assert why in met.value.message


def test_a_bind_off_loopback_without_tls_warns_at_every_start(stack: ExitStack, tmp_path: Path) -> None:
    host = hosts.FIRST
    for _ in range(2):
        process = ServeProcess(
            tmp_path / "plain", "--listen", f"{host.address}:0", "--insecure", *SMALL_POOL, within=host.within
        )
        stack.callback(process.end)
        process.wait_ready()
        process.end()
        assert "without TLS (insecure)" in process.log
