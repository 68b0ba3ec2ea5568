"""Clients under TLS and with tokens: what gets in, what an error says, and which text holds no secret."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509

from kvgrpc.client import (
    Credentials,
    EngineUnreachable,
    Pace,
    connect,
    connect_sync,
    credentials as module,
    step_calls,
    why_unreachable,
)
from kvgrpc.client.renewal_stream import RenewalStream
from kvgrpc.errors import InvalidRequest, Unavailable
from kvgrpc.tls import TlsFiles
from kvgrpc.v1.lease_pb2 import LeaseRef
from tests.client.fake import FakeServer
from tests.tls.authority import Authority, Name

CA, FOREIGN = Authority(), Authority("a foreign CA")
LOCAL: list[Name] = [x509.DNSName("localhost")]


@asynccontextmanager
async def serving(files: TlsFiles | None) -> AsyncIterator[str]:
    """Serves nothing under mutual TLS with these files, or in plain text. Yields the address."""
    server = grpc.aio.server()
    if files is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (files.key.read_bytes(), files.cert.read_bytes())
        made = grpc.ssl_server_credentials([pair], files.ca.read_bytes(), require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", made)
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(None)


def parties(folder: Path) -> dict[str, TlsFiles]:
    """Returns the files of a good party, and of those with one fault each."""
    return {
        "good": CA.issue(folder / "good", LOCAL),
        "expired": CA.issue(folder / "expired", LOCAL, ends=timedelta(seconds=-1)),
        "not yet valid": CA.issue(folder / "not-yet-valid", LOCAL, begins=timedelta(minutes=30)),
        "of another name": CA.issue(folder / "of-another-name", [x509.DNSName("other.example")]),
        "foreign": FOREIGN.issue(folder / "foreign", LOCAL),
    }


def shown(own: TlsFiles, ca: TlsFiles | None = None) -> Credentials:
    """Returns credentials with the certificate of one party and the CA of another."""
    return Credentials(cert=own.cert, key=own.key, ca=(ca or own).ca)


async def test_an_error_says_what_tls_prevents(tmp_path: Path) -> None:
    known = parties(tmp_path)
    good = known["good"]
    cases: Mapping[str, tuple[TlsFiles | None, Credentials, str]] = {
        "no certificate": (good, Credentials(ca=good.ca), "asks its callers for a certificate"),
        "a foreign certificate": (good, shown(known["foreign"], good), "is of a CA that"),
        "an expired certificate": (good, shown(known["expired"]), "expired/tls.crt has expired"),
        "an early certificate": (good, shown(known["not yet valid"]), "not-yet-valid/tls.crt is not valid yet"),
        "a foreign server": (known["foreign"], shown(good), "is of a CA that this client does not trust"),
        "an expired server": (known["expired"], shown(good), "has expired"),
        "an early server": (known["not yet valid"], shown(good), "is not valid yet"),
        "a server of another name": (known["of another name"], shown(good), "has another name"),
        "plain text to TLS": (good, Credentials(), "speaks TLS, and this client plain text"),
        "TLS to plain text": (None, shown(good), "speaks plain text, and this client TLS"),
    }
    wrong = []
    for name, (server, credentials, said) in cases.items():
        async with serving(server) as address, connect(address, credentials=credentials) as client:
            with pytest.raises(Unavailable) as refused:
                await client.status()
            if said not in refused.value.metadata.get("tls", "") or said not in str(refused.value):
                wrong.append(f"{name}: {refused.value}")
    assert wrong == []


async def test_a_stream_that_tls_prevents_says_what_it_is_too(tmp_path: Path) -> None:
    good, foreign = CA.issue(tmp_path / "good", LOCAL), FOREIGN.issue(tmp_path / "foreign", LOCAL)
    cause = "is of a CA that this client does not trust"
    async with serving(good) as address, connect(address, credentials=shown(foreign)) as client:
        watch = client.watch_engine()
        told = await anext(watch)
        await watch.aclose()
        assert isinstance(told, EngineUnreachable)
        assert cause in told.error.metadata["tls"]
        streams = {
            "WatchTransfers": anext(client.watch(pace=Pace(give_up_s=0.0))),
            "Schedule": client.scheduler().step([step_calls.match_tokens("r", 0)]),
            "KeepAlive": RenewalStream(client._call, client._leases).renew([LeaseRef(lease_id="l")], 20.0),
        }
        for stream in streams.values():
            with pytest.raises(Unavailable) as refused:
                await stream
            assert cause in refused.value.metadata["tls"]


async def test_a_server_that_trusts_fewer_cas_than_its_callers_is_named_as_the_cause(tmp_path: Path) -> None:
    """Both sides trust both CAs, but for the server, which knows only its own."""
    good, foreign = CA.issue(tmp_path / "good", LOCAL), FOREIGN.issue(tmp_path / "foreign", LOCAL)
    foreign.ca.write_bytes(CA.pem + FOREIGN.pem)
    async with serving(good) as address:
        said = await why_unreachable(address, Credentials(dir=tmp_path / "foreign"), timeout_s=20.0)
    assert "it is perhaps of a CA that the server lacks" in said


async def test_a_connection_that_tls_does_not_prevent_is_not_explained(tmp_path: Path) -> None:
    good = CA.issue(tmp_path / "good", LOCAL)
    async with serving(good) as address, serving(None) as plain:
        assert await why_unreachable(address, shown(good)) == ""
        assert await why_unreachable(plain, Credentials()) == ""
        assert await why_unreachable("unix:/nowhere", shown(good)) == ""
    assert await why_unreachable(plain, shown(good)) == ""


async def test_a_silent_server_holds_a_probe_no_longer_than_its_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections, and nobody reads them
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert await why_unreachable(address, Credentials(), timeout_s=0.1) == ""


def test_a_synchronous_client_takes_the_same_credentials(tmp_path: Path) -> None:
    with connect_sync("localhost:1", credentials=shown(CA.issue(tmp_path / "own"))):
        pass


UNUSABLE: Mapping[str, tuple[dict[str, str], str]] = {
    "a key alone": ({"key": "own/tls.key", "ca": "own/ca.crt"}, "tls.cert"),
    "a certificate alone": ({"cert": "own/tls.crt", "ca": "own/ca.crt"}, "tls.key"),
    "no CA": ({"cert": "own/tls.crt", "key": "own/tls.key"}, "tls.ca"),
    "a folder that is not there": ({"dir": "nowhere"}, "tls.ca"),
    "the key of another": ({"dir": "own", "key": "other/tls.key"}, "tls.cert"),
    "a key for a certificate": ({"dir": "own", "cert": "own/tls.key"}, "tls.cert"),
    "a CA without PEM": ({"dir": "own", "ca": "empty"}, "tls.ca"),
    "a token in two places": ({"token": "a", "token_file": "empty"}, "token"),
    "a token of two lines": ({"token": "a\nb"}, "token"),
    "an empty file of a token": ({"token_file": "empty"}, "token_file"),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_unusable_credentials_are_refused_by_name_before_a_call(tmp_path: Path, case: str) -> None:
    for name in ("own", "other"):
        CA.issue(tmp_path / name)
    (tmp_path / "empty").touch()
    given, field = UNUSABLE[case]
    paths = {name: text if name == "token" else str(tmp_path / text) for name, text in given.items()}
    with pytest.raises(InvalidRequest) as refused:
        connect("localhost:1", credentials=Credentials(**paths))
    assert [row.field for row in refused.value.violations] == [field]


def test_credentials_come_from_the_variables_of_a_server() -> None:
    found = Credentials.from_environment({"KVGRPC_TLS_DIR": "/own", "KVGRPC_TLS_CA": "/ca.crt"})
    assert found == Credentials(dir="/own", ca="/ca.crt")
    assert found.paths == module.TlsPaths(Path("/own/tls.crt"), Path("/own/tls.key"), Path("/ca.crt"))


async def test_no_text_shows_a_token_or_a_key(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("two secret words\n")
    with pytest.raises(InvalidRequest) as refused:
        module.BearerToken(Credentials(token_file=secret))
    given = Credentials(token="secret")
    async with connect("localhost:1", credentials=given) as client:
        assert "secret" not in f"{refused.value} {given} {module.BearerToken(given)} {client} {client.__dict__}"


async def test_a_new_token_of_the_file_goes_with_later_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKEN_LOOK_S", 0.0)
    file, server = tmp_path / "token", FakeServer()
    file.write_text("first\n")
    await server.start()
    async with connect(server.address, credentials=Credentials(token_file=file)) as client:
        for content in ("first\n", "second", "", "third\n"):
            file.write_text(content)
            await client.capabilities()
    await server.stop()
    sent = [call.metadata.get("authorization") for call in server.seen]
    assert sent == ["Bearer first", "Bearer second", "Bearer second", "Bearer third"]
