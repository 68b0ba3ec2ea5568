"""Settings of a client's channel."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
import trustme

from kvgrpc.client import Client, connect
from kvgrpc.client.channel import CHANNEL_OPTIONS, SERVICE_CONFIG
from kvgrpc.errors import Reason, Unavailable
from tests.client.fake import FakeServer, failing

ROOT = Path(__file__).parent.parent.parent


def test_only_unavailable_is_retried_and_nothing_waits_for_a_server() -> None:
    policies = [config.get("retryPolicy") for config in SERVICE_CONFIG["methodConfig"]]
    codes = [policy["retryableStatusCodes"] for policy in policies if isinstance(policy, dict)]
    assert codes == [["UNAVAILABLE"]]
    assert [config["waitForReady"] for config in SERVICE_CONFIG["methodConfig"]] == [False, False]
    assert json.loads(str(dict(CHANNEL_OPTIONS)["grpc.service_config"])) == SERVICE_CONFIG


def test_every_language_has_the_same_service_config() -> None:
    assert json.loads((ROOT / "clients/go/service_config.json").read_text()) == SERVICE_CONFIG


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "[::1]",
        "host",
        "host:",
        "http://127.0.0.1:50051",
        "https://h",
        "",
        "50051",
        "::1",
        ":50051",
        "h:0",
        "h:99999",
        "a/b:50051",
    ],
)
async def test_an_address_that_is_not_host_and_port_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        connect(address)


@pytest.mark.parametrize(
    "address", ["[::1]:50051", "dns:///h:50051", "unix:/run/s", "unix-abstract:s", "ipv4:127.0.0.1:1"]
)
async def test_names_that_grpc_resolves_by_itself_are_taken(address: str) -> None:
    async with connect(address):
        pass


async def test_a_peer_that_cannot_be_reached_is_dialled_once_for_its_error(server: FakeServer, client: Client) -> None:
    server.answers["ConnectPeer"] = failing(grpc.StatusCode.UNAVAILABLE, "PEER_UNREACHABLE")
    with pytest.raises(Unavailable, match="as the test says") as raised:
        await client.connect_peer("127.0.0.1:1")
    assert raised.value.reason is Reason.PEER_UNREACHABLE
    assert len(server.requests("ConnectPeer")) == 1


async def test_with_credentials_the_connection_is_encrypted() -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    server = FakeServer()
    await server.start(grpc.ssl_server_credentials([(certificate.private_key_pem.bytes(), chain)]))
    try:
        trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with connect(server.address, credentials=trusting) as client:
            await client.status()
        async with connect(server.address, credentials=grpc.ssl_channel_credentials()) as client:
            with pytest.raises(Unavailable):  # the default authorities do not include this one
                await client.status()
        async with connect(server.address) as client:
            with pytest.raises(Unavailable):
                await client.status()
    finally:
        await server.stop()


def test_a_client_needs_a_running_event_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        connect("127.0.0.1:1")
    asyncio.run(_connected())


async def _connected() -> None:
    async with connect("127.0.0.1:1", channel_options=[("grpc.keepalive_time_ms", 1000)]):
        pass
