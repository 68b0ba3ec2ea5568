"""TLS from a SPIFFE Workload API, whose agent is a small one that speaks the public protocol."""

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from kvgrpc import workload_api
from kvgrpc.config_security import TlsConfig
from kvgrpc.errors import InvalidRequest
from kvgrpc.service.own_tls import own_tls
from kvgrpc.tls import Tls, read
from kvgrpc.workload_api import SvidFiles
from tests.tls.agent import Agent, Svid, answer, svid, until
from tests.tls.authority import Authority

CA, OTHER = Authority(), Authority("another trust domain")
PEM_BEGIN = b"-----BEGIN CERTIFICATE-----"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dials an agent that is gone again at once."""
    monkeypatch.setattr(workload_api, "PAUSE_S", 0.02)
    monkeypatch.setattr(workload_api, "PAUSE_MAX_S", 0.05)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "agent.sock")
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def first(tmp_path: Path) -> Svid:
    return svid(CA, tmp_path / "first", "p")


@pytest.fixture
def files(agent: Agent, first: Svid) -> Iterator[SvidFiles]:
    """The files of a process that has its first identity."""
    agent.give(answer(first))
    made = SvidFiles(agent.address)
    try:
        yield made
    finally:
        made.close()


def test_the_files_have_the_first_identity_and_the_cas_of_all_trust_domains(agent: Agent, tmp_path: Path) -> None:
    theirs = OTHER.certificate.public_bytes(Encoding.DER)
    second = svid(CA, tmp_path / "second", "q")
    agent.give(answer(svid(CA, tmp_path / "first", "p"), second, federated={"other.test": theirs}))
    made = SvidFiles(agent.address)
    try:
        found = read(made.files)
        assert found.names == ("spiffe://p.test/lead", "localhost")
        trusted = x509.load_pem_x509_certificates(found.ca)
        assert {CA.certificate, OTHER.certificate} == set(trusted)
    finally:
        made.close()


def test_a_new_identity_is_in_use_after_the_next_look(agent: Agent, files: SvidFiles, tmp_path: Path) -> None:
    tls = Tls(files.files)
    agent.give(answer(svid(OTHER, tmp_path / "next", "p")))
    until(lambda: files.updates == 2)
    assert tls.look()
    assert tls.identity.ca == OTHER.pem
    assert not tls.look()


def test_the_files_shrink_with_what_they_hold(agent: Agent, tmp_path: Path) -> None:
    whole = svid(CA, tmp_path / "first", "p")
    agent.give(answer(whole, federated={"other.test": OTHER.certificate.public_bytes(Encoding.DER)}))
    made = SvidFiles(agent.address)
    try:
        agent.give(answer(whole))
        until(lambda: made.updates == 2)
        assert read(made.files).ca.count(PEM_BEGIN) == 1
    finally:
        made.close()


def _broken(first: Svid, folder: Path) -> dict[str, bytes]:
    another = svid(CA, folder / "another", "p")
    return {
        "no identity": answer(),
        "no protobuf": b"\xff\xff\xff",
        "no certificate": answer(Svid(first.spiffe_id, b"", first.key, first.bundle)),
        "half a certificate": answer(Svid(first.spiffe_id, first.chain[:100], first.key, first.bundle)),
        "half a key": answer(Svid(first.spiffe_id, first.chain, first.key[:20], first.bundle)),
        "the key of another": answer(Svid(first.spiffe_id, first.chain, another.key, first.bundle)),
        "no bundle": answer(Svid(first.spiffe_id, first.chain, first.key, b"")),
        "a broken bundle of others": answer(first, federated={"other.test": b"\x30\x03"}),
        "an expired certificate": answer(svid(CA, folder / "expired", "p", ends=timedelta(seconds=-1))),
        "a certificate of tomorrow": answer(svid(CA, folder / "tomorrow", "p", begins=timedelta(minutes=50))),
    }


def test_a_broken_update_is_kept_out_and_the_next_good_one_is_used(
    agent: Agent, files: SvidFiles, first: Svid, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, wrong = read(files.files).digest, []
    for name, data in _broken(first, tmp_path).items():
        caplog.clear()
        files.error = ""
        agent.give(data)
        until(lambda: files.error != "")
        warned = [row for row in caplog.records if row.levelno >= logging.WARNING and row.name == workload_api.__name__]
        if read(files.files).digest != before or not warned:
            wrong.append(name)
    assert wrong == []
    agent.give(answer(svid(CA, tmp_path / "good", "p")))
    until(lambda: files.updates == 2)
    assert read(files.files).digest != before
    assert files.error == ""


def test_an_agent_that_comes_back_is_found_and_in_between_the_identity_stays(
    agent: Agent, files: SvidFiles, tmp_path: Path
) -> None:
    before = read(files.files).digest
    agent.stop()
    until(lambda: files.error != "")
    assert read(files.files).digest == before
    agent.give(answer(svid(CA, tmp_path / "next", "p")))
    agent.start()
    until(lambda: files.updates == 2)
    assert read(files.files).digest != before


def test_an_agent_that_starts_later_is_waited_for(tmp_path: Path, first: Svid) -> None:
    agent = Agent(tmp_path / "agent.sock")
    agent.give(answer(first))
    starts = Timer(0.2, agent.start)
    starts.start()
    made = SvidFiles(agent.address)
    made.close()
    starts.join()
    agent.stop()


def _why(address: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        SvidFiles(address)
    (row,) = refused.value.violations
    assert row.field == "tls.workload_api"
    assert "\n" not in row.description
    return row.description


def test_no_agent_and_a_silent_one_end_the_start_with_one_line(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_api, "START_S", 0.3)
    assert "gave no identity within 0.3 s" in (said := _why(f"unix://{tmp_path}/none.sock"))
    assert "does not exist" in said
    assert "it says nothing" in _why(agent.address)
    agent.give(answer())
    assert "gave no identity" in _why(agent.address)


@pytest.mark.parametrize("address", ["", "/run/agent.sock", "tcp://127.0.0.1:1", "unix://host/x", "unix:", "unix:x?y"])
def test_an_address_that_is_no_path_is_refused(address: str) -> None:
    assert "is not unix:///PATH" in _why(address)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spiffe", None)
    assert _why("unix:///run/agent.sock") == "needs a library: pip install 'kvgrpc[spiffe]'"


def test_closing_leaves_the_agent_and_no_file(agent: Agent, first: Svid) -> None:
    agent.give(answer(first))
    before = _in_memory()
    made = SvidFiles(agent.address)
    assert len(_in_memory()) == len(before) + 3
    made.close()
    made.close()
    agent.wait_for(lambda one: one.open == 0)
    assert _in_memory() == before


def _in_memory() -> list[str]:
    """Returns the names of the files of this process that have an identity and no place."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which the folder is read
            targets.append(str(descriptor.readlink()))
    return sorted(target for target in targets if target.startswith("/memfd:kvgrpc"))


def test_an_identity_without_a_dns_name_is_warned_of(
    agent: Agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [x509.UniformResourceIdentifier("spiffe://p.test/lead")]
    files = CA.issue(tmp_path / "nameless", names)
    nameless = own_tls(TlsConfig(dir=str(files.cert.parent)))
    assert nameless is not None
    assert "no DNS name" in caplog.text


def test_files_beside_a_workload_api_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="leave it out"):
        TlsConfig(dir="/certs", workload_api="unix:///run/agent.sock").files()
