"""Ranks on other hosts under mutual TLS: who gets in moves blocks, and who does not hears why.

Leads, workers and the links of ranks are processes.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509

from kvgrpc.engine import Engine, Rank, RankCredentials, content
from kvgrpc.engine.session.rank_link import RankLink
from kvgrpc.errors import InvalidRequest, KVGrpcError, PermissionDenied, Reason, Unauthenticated, Unavailable
from kvgrpc.session.v1 import session_pb2
from kvgrpc.wire.frames import encode
from tests.engine.made import layout
from tests.engine.private_side import PrivateSide
from tests.engine.support import WAIT_S, Lead, Workers, received, refused, tokens
from tests.identity.issuer import AUDIENCE, ISSUER, Issuer
from tests.service.conftest import TEST_S
from tests.tls.agent import Agent, answer, svid
from tests.tls.authority import Authority, Name

pytestmark = pytest.mark.timeout(TEST_S)

CA, FOREIGN, ISSUES = Authority(), Authority("a foreign CA"), Issuer()
PROMPT, SOURCE, TARGET = tokens(40), [1, 2, 9], [30, 31, 5]
ROLES = {
    "spiffe://test/lead": "peer",
    "spiffe://test/rank": "rank",
    "spiffe://test/viewer": "viewer",
    "spiffe://rank.test/lead": "rank",
    "jwt:rank": "rank",
}
SETTINGS = f"""
[tokens]
keys = "KEYS"
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files of all parties."""
    made = tmp_path_factory.mktemp("ranks")
    for name in ("lead", "rank", "viewer", "stranger"):
        CA.issue(made / name, names(name))
    FOREIGN.issue(made / "foreign", names("rank"))
    rows = [f'[[callers]]\nname = "{name}"\nroles = ["{role}"]\n' for name, role in ROLES.items()]
    (made / "roles.toml").write_text("\n".join(rows))
    (made / "keys.pem").write_bytes(ISSUES.public_pem)
    for subject in ("rank", "viewer"):
        (made / f"{subject}.token").write_text(ISSUES.token(subject))
    (made / "other.token").write_text(Issuer().token("rank"))
    return made


def names(party: str) -> list[Name]:
    """Returns the names of a party's certificate."""
    return [x509.UniformResourceIdentifier(f"spiffe://test/{party}"), x509.DNSName("localhost")]


@pytest.fixture(scope="module")
def leads(folder: Path) -> Iterator[tuple[Lead, Lead]]:
    """Yields two leads that ask who calls."""
    flags = (
        "--listen",
        "127.0.0.1:0",
        "--advertise",
        "localhost:0",
        "--tls-dir",
        f"{folder}/lead",
        "--roles",
        f"{folder}/roles.toml",
    )
    settings = SETTINGS.replace("KEYS", f"{folder}/keys.pem")
    with ExitStack() as stack:
        made = [Lead(folder, name, *flags, settings=settings) for name in ("P", "D")]
        for lead in made:
            stack.callback(lead.close)
        yield made[0].wait_ready(), made[1].wait_ready()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()


@pytest.fixture
def engine(leads: tuple[Lead, Lead]) -> Iterator[Engine]:
    """Yields an engine of one rank, which brings its own memory."""
    with Engine.attach(leads[0].socket_path, pool=layout(), private_memory=True) as made:
        yield made


def attach(engine: Engine, credentials: RankCredentials | None) -> Rank:
    """Attaches the engine's rank, as on another host."""
    memory = np.zeros(layout().total_bytes, np.uint8)
    return Rank(engine.remote_ticket, 0, [memory], data_paths=("cma",), credentials=credentials)


def test_ranks_elsewhere_move_blocks_under_mutual_tls(leads: tuple[Lead, Lead], workers: Workers, folder: Path) -> None:
    with ExitStack() as stack:
        sides = []
        for lead in leads:
            team = [workers.make(), workers.make()]
            shown = {"dir": f"{folder}/rank"}
            sides.append(PrivateSide(lead, team, "cma", remote={0: "", 1: ""}, credentials=shown))
            stack.callback(sides[-1].close)
        source, destination = sides
        expected = source.fill_all(SOURCE, 100)
        handover = source.hand_over(SOURCE, PROMPT)
        pull = destination.engine.pull(handover.grant, content(PROMPT))
        pull.start(TARGET)
        received(destination.finish(pull))
        source.finish(handover)
        assert destination.read_all(TARGET) == expected


def test_a_rank_without_credentials_takes_the_paths_of_its_environment(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGRPC_TLS_DIR", f"{folder}/rank")
    attach(engine, None).close()


def test_a_rank_shows_what_a_workload_api_gives_it(engine: Engine, tmp_path: Path) -> None:
    agent = Agent(tmp_path / "agent.sock")
    agent.start()
    try:
        agent.give(answer(svid(CA, tmp_path / "rank", "rank")))
        attach(engine, RankCredentials(workload_api=agent.address)).close()
    finally:
        agent.stop()


def test_a_token_shows_who_a_rank_is_whatever_its_certificate(engine: Engine, folder: Path) -> None:
    attach(engine, RankCredentials(dir=folder / "stranger", token_file=folder / "rank.token")).close()


def test_who_does_not_get_in_hears_why_and_its_engine_lives(engine: Engine, folder: Path) -> None:
    files = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    own: dict[str, Any] = {kind: folder / "rank" / name for kind, name in files.items()}
    foreign = folder / "foreign"
    cases: dict[str, tuple[RankCredentials | None, type[KVGrpcError], str]] = {
        "nothing": (None, Unavailable, "speaks TLS, and this client plain text"),
        "no certificate": (RankCredentials(ca=own["ca"]), Unavailable, "asks its callers for a certificate"),
        "a lead of another CA": (RankCredentials(dir=foreign), Unavailable, "of a CA that this client does not trust"),
        "a certificate of another CA": (
            RankCredentials(cert=foreign / "tls.crt", key=foreign / "tls.key", ca=own["ca"]), Unavailable,
            "foreign/tls.crt is of a CA that",
        ),
        "no files": (RankCredentials(dir=folder / "nobody"), InvalidRequest, "nobody/ca.crt cannot be read"),
        "no token": (RankCredentials(**own, token_file=folder / "no.token"), InvalidRequest, "no.token cannot be read"),
        "another role": (RankCredentials(dir=folder / "viewer"), PermissionDenied, "spiffe://test/viewer has viewer"),
        "no role": (RankCredentials(dir=folder / "stranger"), PermissionDenied, "spiffe://test/stranger has no role"),
        "a token of nobody": (
            RankCredentials(**own, token_file=folder / "viewer.token"), PermissionDenied, "jwt:viewer has no role",
        ),
        "a token that is none": (
            RankCredentials(**own, token_file=folder / "roles.toml"), InvalidRequest, "one word of printable ASCII",
        ),
        "a token of another issuer": (
            RankCredentials(**own, token_file=folder / "other.token"), Unauthenticated, "token",
        ),
    }  # fmt: skip
    wrong = {}
    for name, (shown, kind, said) in cases.items():
        with pytest.raises(KVGrpcError) as caught:
            attach(engine, shown)
        if not isinstance(caught.value, kind) or said not in caught.value.message:
            wrong[name] = repr(caught.value)
    assert wrong == {}
    attach(engine, RankCredentials(dir=folder / "rank")).close()


def test_each_connection_of_a_rank_has_the_files_as_they_are_then(engine: Engine, folder: Path) -> None:
    """The lead refuses the ticket of nobody, so the engine stays as it is."""
    late = RankCredentials(dir=folder / "late", token_file=folder / "late.token")
    (folder / "late.token").write_text(Issuer().token("rank"))
    request = session_pb2.AttachRankRequest(ticket=bytes(32), private_memory=True)
    frame = encode(session_pb2.ClientFrame(attach_rank=request))
    link = RankLink(engine.address, late)
    with ExitStack() as stack:
        stack.callback(link.close)

        def asks() -> None:
            connection = link.connect()
            stack.callback(connection.close)
            connection.attach(frame, -1, WAIT_S)

        with refused(Reason.INVALID_FIELD, InvalidRequest):
            asks()
        FOREIGN.issue(folder / "late", names("rank"))
        with refused(Reason.PEER_UNREACHABLE, Unavailable):
            asks()
        CA.issue(folder / "late", names("stranger"))
        with refused(Reason.NOT_AUTHENTICATED, Unauthenticated):
            asks()
        (folder / "late.token").write_text(ISSUES.token("rank"))
        with refused(Reason.NOT_OWNER, PermissionDenied):
            asks()
