"""Commands under TLS: `make certs` writes what a server and its callers need, and a refusal says why."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from examples.certs import main
from kvgrpc.tls import TlsFiles, read
from tests.client.serving import served


async def command(*arguments: str) -> tuple[int, str]:
    """Runs `kvgrpc`. Returns its exit code and what it says of what is wrong."""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "kvgrpc", *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


async def test_commands_reach_a_server_with_the_files_that_were_made(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "p", "router"]) == 0
    with served("--tls-dir", str(tmp_path / "p")) as server:
        for name in ("status", "drain"):
            assert await command(name, server.address, "--tls-dir", str(tmp_path / "router")) == (0, "")
            code, said = await command(name, server.address)
            assert (code, "speaks TLS, and this client plain text" in said) == (1, True)
            assert "Is a server running there?" not in said
            code, said = await command(name, server.address, "--tls-dir", str(tmp_path / "nobody"))
            assert (code, "nobody/ca.crt cannot be read" in said) == (1, True)


def test_the_ca_stays_and_names_are_those_that_were_given(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "p"]) == 0
    assert main(["--out", str(tmp_path), "d=d.example,10.0.0.7,spiffe://example/d", "p"]) == 0
    p, d = (read(TlsFiles.in_folder(tmp_path / name)) for name in ("p", "d"))
    assert p.ca == d.ca == (tmp_path / "ca" / "ca.crt").read_bytes()
    assert p.names == ("spiffe://kvgrpc.example/p", "localhost", "127.0.0.1")
    assert d.names == ("spiffe://example/d", "d.example", "10.0.0.7")


def test_only_their_owner_reads_the_keys(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "p"]) == 0
    assert {path.name: path.stat().st_mode & 0o077 for path in tmp_path.rglob("*.key")} == {"ca.key": 0, "tls.key": 0}


@pytest.mark.parametrize("party", ["../p", "ca", "=localhost", "a/b"])
def test_a_party_is_one_folder(tmp_path: Path, party: str) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), party])


def test_a_name_that_no_certificate_can_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "p=ä.example"]) == 1
    assert capsys.readouterr().err.startswith("make certs: ")
