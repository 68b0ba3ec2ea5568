"""A server whose files of identities are not usable does not start."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.cli.serve import EXIT_CONFIG


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (["--roles", "{folder}/none.toml"], "identity.roles"),
        (["--config", "{folder}/policy.toml"], "identity.policy"),
        (["--config", "{folder}/tokens.toml"], "tokens.keys"),
        (["--config", "{folder}/issuer.toml"], "tokens.issuer"),
    ],
)
def test_an_unusable_file_ends_the_start_with_one_line_and_a_code(
    tmp_path: Path, flags: list[str], setting: str
) -> None:
    (tmp_path / "policy.toml").write_text(f'[identity]\npolicy = "{tmp_path}/none.json"')
    (tmp_path / "tokens.toml").write_text(
        f'[tokens]\nkeys = "{tmp_path}/none.pem"\nissuer = "https://issuer.test"\naudience = "kvgrpc"'
    )
    (tmp_path / "issuer.toml").write_text('[tokens]\nkeys = "key.pem"')
    given = [flag.format(folder=tmp_path) for flag in flags]
    command = [sys.executable, "-m", "kvgrpc", "serve", "--listen", "127.0.0.1:0", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == EXIT_CONFIG, done.stderr
    (line,) = done.stderr.splitlines()
    assert setting in line
