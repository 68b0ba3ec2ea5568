"""The file of roles: what its rows mean, and what is no row."""

from pathlib import Path

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.service.identity.assignments import NONE, assignments_of
from kvgrpc.service.identity.names import certificate_name
from kvgrpc.service.identity.patterns import check_pattern, matches
from kvgrpc.service.identity.roles import Role
from kvgrpc.service.identity.watched_file import FILE_BYTES_MAX, WatchedFile

FILE = b"""
[[callers]]
name = "spiffe://prod/sa/decode-7"
roles = []

[[callers]]
name = "spiffe://prod/sa/decode-*"
roles = ["engine", "peer"]
tenant = "acme"

[[callers]]
name = "dns:*.ops.test"
roles = ["operator"]
"""


def test_the_first_row_that_matches_counts() -> None:
    rows = assignments_of(FILE)
    assert rows.of("spiffe://prod/sa/decode-1").roles == {Role.ENGINE, Role.PEER}
    assert rows.of("spiffe://prod/sa/decode-1").tenant == "acme"
    assert rows.of("spiffe://prod/sa/decode-7").roles == frozenset()
    assert rows.of("dns:a.ops.test").roles == {Role.OPERATOR}
    assert rows.of("jwt:a.ops.test") is NONE


def test_a_lone_star_is_every_caller_with_a_name() -> None:
    rows = assignments_of(b"[[callers]]\nname = '*'\nroles = ['viewer']")
    assert rows.of("dns:a").roles == {Role.VIEWER}
    assert rows.of("anonymous") is NONE
    assert assignments_of(b"[[callers]]\nname = 'anonymous'\nroles = ['viewer']").of("anonymous").roles == {Role.VIEWER}


def test_a_caller_without_a_row_has_no_role() -> None:
    assert assignments_of(FILE).of("dns:other") is NONE
    assert assignments_of(b"").of("anonymous") is NONE


@pytest.mark.parametrize(
    "text",
    [
        "[[callers", "callers = 3", "other = 1", "[callers]\nname = 'dns:a'", "[[callers]]\nname = 'dns:a'",
        "[[callers]]\nroles = []", "[[callers]]\nname = 'dns:a'\nroles = ['root']",
        "[[callers]]\nname = 'dns:a'\nroles = [1]",
        "[[callers]]\nname = 'dns:a'\nroles = 'viewer'", "[[callers]]\nname = 'dns:a*b'\nroles = []",
        "[[callers]]\nname = 'dns:*a*'\nroles = []",
        "[[callers]]\nname = ''\nroles = []", "[[callers]]\nname = 'a'\nroles = []",
        "[[callers]]\nname = '*.test'\nroles = []", "[[callers]]\nname = 'dns:'\nroles = []",
        "[[callers]]\nname = 1\nroles = []", "[[callers]]\nname = 'dns:a'\nroles = []\ntenant = 'A b'",
        "[[callers]]\nname = 'dns:a'\nroles = []\ntenant = 1", "[[callers]]\nname = 'dns:a'\nroles = []\nrole = 'x'",
        "callers = [1]", "\xff", "a = " + "[" * 5000,
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_anywhere_is_refused_in_whole(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        assignments_of(text.encode("latin-1"))


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("a", "a", True), ("a", "ab", False), ("a*", "a", True), ("a*", "ab", True), ("a*", "ba", False),
        ("*a", "ba", True), ("*a", "ab", False), ("*", "a", True), ("*", "", False),
    ],
)  # fmt: skip
def test_patterns_are_a_name_a_beginning_an_end_or_everything(pattern: str, name: str, fits: bool) -> None:
    assert matches(check_pattern(pattern), name) is fits


def test_a_broken_file_keeps_the_old_content_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "roles.toml"
    path.write_bytes(FILE)
    file = WatchedFile("identity.roles", path, assignments_of)
    old = file.value
    for content in (b"[[callers", b"[[callers", b"x" * (FILE_BYTES_MAX + 1)):
        path.write_bytes(content)
        assert not file.look()
        assert file.value is old
        assert file.error
    assert caplog.text.count("old content stays in use") == 2
    path.write_bytes(b"")
    assert file.look()
    assert not file.error
    assert file.value.of("spiffe://prod/sa/decode-1") is NONE


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"identity\.roles"):
        WatchedFile("identity.roles", tmp_path / "none.toml", assignments_of)


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"peer_spiffe_id": [b"spiffe://a/b"], "peer_uri": [b"spiffe://a/b"], "peer_dns": [b"d"]}, "spiffe://a/b"),
        ({"peer_uri": [b"https://a/b", b"https://c"], "peer_dns": [b"d"]}, "uri:https://a/b"),
        ({"peer_dns": [b"first.test", b"second.test"]}, "dns:first.test"),
        ({"x509_common_name": [b"root"], "x509_subject": [b"CN=root"]}, "anonymous"),
        ({"peer_dns": [b"engine"]}, "dns:engine"),
        ({"peer_uri": [b"tenant acme x"], "peer_dns": [b"d"]}, "dns:d"),
        ({"peer_uri": [b"a\nb"]}, "anonymous"),
        ({"peer_uri": [b"\xff\xfe"]}, "anonymous"),
        ({"peer_uri": [b"a" * 4096]}, "anonymous"),
        ({"peer_spiffe_id": [b"other://a"]}, "anonymous"),
        ({}, "anonymous"),
    ],
)
def test_a_certificate_names_by_spiffe_id_then_uri_then_dns_and_never_by_common_name(
    properties: dict[str, list[bytes]], name: str
) -> None:
    assert certificate_name(properties) == name
