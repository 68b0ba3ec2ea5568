"""gRPC's authorization policy (gRFC A43) as a second gate."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.config import Config
from kvgrpc.config_security import IdentityConfig
from kvgrpc.errors import PermissionDenied, Reason
from kvgrpc.service.identity.authorization_policy import policy_of
from kvgrpc.service.identity.gate import Gate
from tests.identity.servers import People, serving, spiffe

EVERYTHING = {"name": "all"}


def policy(*allow: dict[str, Any], deny: tuple[dict[str, Any], ...] = ()) -> bytes:
    return json.dumps({"name": "p", "allow_rules": allow, "deny_rules": deny}).encode()


def rule(name: str = "r", **parts: Any) -> dict[str, Any]:
    return {"name": name, **parts}


def allows(data: bytes, principal: str = "a", path: str = "/s/m", *metadata: tuple[str, str | bytes]) -> bool:
    return not policy_of(data).refusal(principal, path, metadata)


def test_a_call_without_a_rule_is_refused() -> None:
    assert not allows(policy(rule(request={"paths": ["/other/m"]})))


def test_a_rule_without_parts_matches_every_call() -> None:
    assert allows(policy(EVERYTHING), "")


def test_a_deny_rule_goes_before_an_allow_rule() -> None:
    assert not allows(policy(EVERYTHING, deny=(rule(request={"paths": ["/s/*"]}),)))
    assert allows(policy(EVERYTHING, deny=(rule(request={"paths": ["/t/*"]}),)))


def test_principals_match_in_whole_by_their_beginning_by_their_end_or_if_there_is_one() -> None:
    for pattern, name, fits in (
        ("a", "a", True), ("a", "ab", False), ("a*", "ab", True), ("*b", "ab", True), ("*b", "ba", False),
        ("*", "a", True), ("*", "", False), ("a", "", False),
    ):  # fmt: skip
        assert allows(policy(rule(source={"principals": ["x", pattern]})), name) is fits, pattern


def test_paths_match_as_principals_do() -> None:
    for pattern, fits in (("/s/m", True), ("/s/*", True), ("*/m", True), ("*", True), ("/s/n", False), ("s/m", False)):
        assert allows(policy(rule(request={"paths": [pattern]}))) is fits, pattern


def test_every_header_must_match_by_one_of_its_values() -> None:
    data = policy(rule(request={"headers": [{"key": "A", "values": ["x", "y*"]}, {"key": "b", "values": ["*"]}]}))
    assert allows(data, "p", "/s/m", ("a", "yes"), ("b", "1"))
    assert not allows(data, "p", "/s/m", ("a", "yes"))
    assert not allows(data, "p", "/s/m", ("a", "no"), ("b", "1"))
    assert not allows(data, "p", "/s/m", ("a", b"yes"), ("b", "1"))


def test_the_values_of_a_repeated_header_are_one_value_with_commas() -> None:
    data = policy(rule(request={"headers": [{"key": "a", "values": ["x,y"]}]}))
    assert allows(data, "p", "/s/m", ("a", "x"), ("a", "y"))
    assert not allows(data, "p", "/s/m", ("a", "x"))


def test_all_parts_of_a_rule_must_match() -> None:
    data = policy(rule(source={"principals": ["a"]}, request={"paths": ["/s/m"]}))
    assert allows(data, "a", "/s/m")
    assert not allows(data, "a", "/s/n")
    assert not allows(data, "b", "/s/m")


@pytest.mark.parametrize(
    "said",
    [
        "", "[]", "{", '{"name": "p"}', '{"allow_rules": [{"name": "r"}]}',
        '{"name": "", "allow_rules": [{"name": "r"}]}',
        '{"name": "p", "allow_rules": []}', '{"name": "p", "allow_rules": [{}]}',
        '{"name": "p", "allow_rules": [{"name": "r", "sources": {}}]}',
        '{"name": "p", "allow_rules": [{"name": "r", "source": {"principals": "a"}}]}',
        '{"name": "p", "allow_rules": [{"name": "r", "source": {"principals": ["a*b"]}}]}',
        '{"name": "p", "allow_rules": [{"name": "r", "request": {"paths": [1]}}]}',
        '{"name": "p", "allow_rules": [{"name": "r", "request": {"headers": [{"key": "host", "values": ["a"]}]}}]}',
        '{"name": "p", "allow_rules": [{"name": "r", "request": {"headers": [{"key": "grpc-a", "values": ["a"]}]}}]}',
        '{"name": "p", "allow_rules": [{"name": "r", "request": {"headers": [{"key": "a", "values": []}]}}]}',
        '{"name": "p", "allow_rules": [{"name": "r"}], "deny": []}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_policy_that_is_wrong_anywhere_is_refused_in_whole(said: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        policy_of(said.encode())


def test_a_plain_server_may_have_a_policy_alone(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(policy(rule(request={"headers": [{"key": "x-team", "values": ["llm"]}]})))
    gate = Gate(Config(identity=IdentityConfig(policy=str(path))))
    method = "kvgrpc.v1.PoolService/AllocateBlocks"
    gate.admit(SimpleNamespace(invocation_metadata=lambda: (("x-team", "llm"),)), method, b"")
    with pytest.raises(PermissionDenied) as refused:
        gate.admit(SimpleNamespace(invocation_metadata=lambda: ()), method, b"")
    assert refused.value.reason is Reason.POLICY_DENIED


async def test_a_call_needs_a_role_and_the_policy(tmp_path: Path) -> None:
    people, path = People(tmp_path), tmp_path / "policy.json"
    people.give(a="router", b="router", c="viewer")
    path.write_bytes(policy(rule(source={"principals": [spiffe("a"), spiffe("c")]})))
    identity = IdentityConfig(roles=str(people.roles), policy=str(path))
    async with serving(people, "e", identity=identity) as server:
        async with people.client(server, "a") as both, people.client(server, "b") as role:
            await both.allocate(1)
            with pytest.raises(PermissionDenied) as refused:
                await role.allocate(1)
            assert refused.value.reason is Reason.POLICY_DENIED
            path.write_bytes(policy(EVERYTHING))
            assert server._lead.gate.look()
            await role.allocate(1)
        async with people.client(server, "c") as allowed:
            with pytest.raises(PermissionDenied) as refused:
                await allowed.allocate(1)
            assert refused.value.reason is Reason.ROLE_MISSING
