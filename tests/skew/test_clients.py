"""A client of one version drives two servers of the other version."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.skew.versions import Version, serving

PROGRAM = Path(__file__).with_name("client_program.py")


@pytest.mark.parametrize("client", [True, False], ids=["wheel's client", "tree's client"])
def test_a_client_drives_servers_of_the_other_version(
    versions: dict[bool, Version], client: bool, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(serving(versions[not client], tmp_path / name)) for name in "PD"]
        said = json.loads(versions[client].run(str(PROGRAM), *(engine.address for engine in engines)))
    assert (said["pull"], said["push"]) == ("succeeded", "succeeded")
    assert said["lease"] == ["live", "live", "released", "released"]
