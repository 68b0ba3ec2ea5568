"""The package and every file that states the version state the same one. docs/releasing.md says who bumps them."""

import re

import pytest

import kvgrpc
from tests.docs.pages import ROOT

STATED = {
    "clients/cpp/CMakeLists.txt": r"project\(kvgrpc VERSION (\S+)",
    "clients/java/pom.xml": r"<artifactId>kvgrpc-java</artifactId>\s*<version>([^<]+)",
    "clients/java/client/pom.xml": r"<artifactId>kvgrpc-java</artifactId>\s*<version>([^<]+)",
    "clients/java/conformance/pom.xml": r"<artifactId>kvgrpc-java</artifactId>\s*<version>([^<]+)",
    "clients/java/sample/pom.xml": r"<artifactId>kvgrpc-java</artifactId>\s*<version>([^<]+)",
    "clients/java/README.md": r"<version>([^<]+)",
    "clients/rust/Cargo.toml": r'^version = "([^"]+)"',
    "clients/typescript/package.json": r'"version": "([^"]+)"',
    "clients/typescript/package-lock.json": r'"name": "kvgrpc",\s*"version": "([^"]+)"',
    "clients/typescript/README.md": r"kvgrpc-(\d\S+)\.tgz",
    "README.md": r"kvgrpc-([\d.]+)-py3",
}
"""Files that state the version, and the pattern of each statement."""


@pytest.mark.parametrize("path", STATED)
def test_a_file_that_states_the_version_states_this_one(path: str) -> None:
    found = re.search(STATED[path], (ROOT / path).read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == kvgrpc.__version__


def test_the_security_policy_supports_this_version() -> None:
    assert f"| {kvgrpc.__version__.rpartition('.')[0]} |" in (ROOT / "SECURITY.md").read_text()
