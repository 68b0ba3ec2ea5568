"""The package and every file that states the version state the same one. docs/releasing.md says who bumps them."""

import re

import kvgrpc
from tests.docs.pages import ROOT

STATED = {
    "clients/c/CMakeLists.txt": r"project\(kvgrpc_engine VERSION (\S+)",
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
    "deploy/helm/kvgrpc/Chart.yaml": r"^appVersion: (\S+)",
    "deploy/helm/kvgrpc/values.yaml": r"image: registry.example/vllm-kvgrpc:(\S+)",
    "docs/operating.md": r"kvgrpc-([\d.]+)-py3",
    "README.md": r"kvgrpc-([\d.]+)-py3",
}
"""Files that state the version, and the pattern of each statement."""


def test_the_files_that_state_the_version_state_this_one() -> None:
    said = {path: re.search(pattern, (ROOT / path).read_text(), re.MULTILINE) for path, pattern in STATED.items()}
    assert {path: found and found[1] for path, found in said.items()} == dict.fromkeys(STATED, kvgrpc.__version__)


def test_the_changelog_has_a_section_of_this_version() -> None:
    assert f"\n## [{kvgrpc.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_security_policy_supports_this_version() -> None:
    assert f"| {kvgrpc.__version__.rpartition('.')[0]} |" in (ROOT / "SECURITY.md").read_text()
