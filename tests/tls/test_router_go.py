"""The router in Go before leads that ask who calls: it shows its files of TLS and its token."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cryptography import x509

from kvgrpc.client import Credentials, connect_sync
from tests.examples.go_router import MODES, NEEDS_GO, ask, binary, listening, prompt, running
from tests.examples.http_engines import HttpEngine, serving, token, until
from tests.identity.issuer import AUDIENCE, ISSUER, Issuer
from tests.service.conftest import Start, start
from tests.service.engines import Engine
from tests.tls.authority import Authority, Name

__all__ = ["binary", "start"]

pytestmark = NEEDS_GO
LOCAL: list[Name] = [x509.DNSName("localhost")]
ROLES = """
[[callers]]
name = "spiffe://test/lead"
roles = ["peer"]
[[callers]]
name = "jwt:router"
roles = ["router"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with the files of all parties. The router's certificate alone gives it no role."""
    ca, issuer = Authority(), Issuer()
    ca.issue(tmp_path / "lead", [x509.UniformResourceIdentifier("spiffe://test/lead"), *LOCAL])
    ca.issue(tmp_path / "router", LOCAL)
    (tmp_path / "roles.toml").write_text(ROLES)
    (tmp_path / "keys.pem").write_bytes(issuer.public_pem)
    (tmp_path / "router.token").write_text(issuer.token("router"))
    (tmp_path / "stranger.token").write_text(issuer.token("stranger"))
    return tmp_path


@pytest.fixture
def engines(folder: Path, start: Start) -> Iterator[list[HttpEngine]]:
    flags = ("--listen", "127.0.0.1:0", "--advertise", "localhost:0", "--roles", f"{folder}/roles.toml")
    settings = f'[tokens]\nkeys = "{folder}/keys.pem"\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n'
    tls = ("--tls-dir", f"{folder}/lead")
    leads: list[Engine] = start(*((*flags, *tls, "--engine-id", name) for name in ("P", "D")), settings=settings)
    with ExitStack() as stack:
        yield [stack.enter_context(serving(lead.address)) for lead in leads]


def command(binary: Path, engines: list[HttpEngine], *flags: str) -> list[str]:
    made = [str(binary), "-listen", "127.0.0.1:0", *flags]
    for role, engine in zip(("-prefill", "-decode"), engines, strict=True):
        made += [role, f"drive,{engine.url},{engine.lead}"]
    return made


@pytest.mark.parametrize("mode", MODES)
def test_a_router_moves_kv_between_leads_that_ask_who_calls(
    folder: Path, engines: list[HttpEngine], binary: Path, mode: str
) -> None:
    log = folder / "router.log"
    shown = ("-tls-dir", f"{folder}/router", "-token-file", f"{folder}/router.token")
    with running(command(binary, engines, "-mode", mode, *shown), log, {}) as process:
        url, ids = listening(process, log, "router: "), prompt(1)
        until(lambda: ask(url, "GET", "/healthz")[0] == 200, log.read_text)
        status, answer = ask(url, "POST", "/v1/completions", {"prompt": ids, "max_tokens": 3})
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == [token(ids, place) for place in range(3)]
        own = Credentials(dir=folder / "router", token_file=folder / "router.token")
        with connect_sync(engines[1].lead, credentials=own) as client:
            assert client.status().counts.lease_count == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "error reading server preface"),
        (("-tls-dir", "router"), "has no role"),
        (("-tls-dir", "router", "-token-file", "stranger.token"), "jwt:stranger has no role"),
    ],
)
def test_a_router_that_leads_refuse_is_not_healthy_and_logs_why(
    folder: Path, engines: list[HttpEngine], binary: Path, flags: tuple[str, ...], said: str
) -> None:
    log = folder / "router.log"
    shown = [word if word.startswith("-") else f"{folder}/{word}" for word in flags]
    with running(command(binary, engines, *shown), log, {}) as process:
        url = listening(process, log, "router: ")
        until(lambda: said in log.read_text(), log.read_text)
        assert ask(url, "GET", "/healthz")[0] == 503
