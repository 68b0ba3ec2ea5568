"""Where engines serve HTTP: by an operator's rules, as IP addresses."""

import pytest

from kvgrpc.config_fleet import FleetConfig
from kvgrpc.fleet.entry import EngineRole
from kvgrpc.service.gateway import http_endpoints
from kvgrpc.service.gateway.http_endpoints import HttpEndpoints
from tests.fleet.entries import entry

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE


async def test_a_rule_of_an_engine_goes_before_the_rule_of_all() -> None:
    endpoints = HttpEndpoints(FleetConfig(http="{host}:8000, a=10.0.0.9:8100,b=[{host}]:1").http_rules)
    rows = {"c": "10.0.0.1:50051", "a": "10.0.0.1:50051", "b": "[fd00::1]:50051", "d": "[fd00::2]:50051"}
    found = {name: await endpoints.of(entry(name, addresses=(lead,)), DECODE) for name, lead in rows.items()}
    assert found == {"c": "10.0.0.1:8000", "a": "10.0.0.9:8100", "b": "[fd00::1]:1", "d": "[fd00::2]:8000"}


async def test_a_rule_of_a_part_goes_before_the_rule_of_all_and_behind_that_of_an_engine() -> None:
    rules = FleetConfig(http="prefill={host}:8000,{host}:8001,a={host}:1").http_rules
    assert rules == {"prefill": "{host}:8000", "": "{host}:8001", "a": "{host}:1"}
    for engine_id, expected in {"a": ("1", "1"), "b": ("8000", "8001"), "prefill": ("8000", "8001")}.items():
        found = [await HttpEndpoints(rules).of(entry(engine_id), part) for part in (PREFILL, DECODE)]
        assert tuple(one.rpartition(":")[2] for one in found) == expected


def test_an_engine_has_a_rule_if_each_part_that_it_may_play_has_one() -> None:
    endpoints = HttpEndpoints({"prefill": "{host}:1", "a": "{host}:2"})
    assert [endpoints.has_rule(entry("b", role=role)) for role in EngineRole] == [True, False, False]
    assert all(endpoints.has_rule(entry("a", role=role)) for role in EngineRole)
    assert HttpEndpoints({"prefill": "{host}:1", "decode": "{host}:2"}).has_rule(entry("b", role=EngineRole.BOTH))


async def test_without_a_rule_or_an_address_there_is_no_endpoint() -> None:
    assert await HttpEndpoints({"a": "{host}:1"}).of(entry("b", addresses=("10.0.0.1:1",)), DECODE) == ""
    assert await HttpEndpoints({"": "{host}:1"}).of(entry("b", addresses=()), DECODE) == ""
    assert await HttpEndpoints({"": "no such host.invalid:1"}).of(entry("b", addresses=("10.0.0.1:1",)), DECODE) == ""


async def test_the_addresses_of_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoints, "NAMES_MAX", 1)
    endpoints = HttpEndpoints({"": "{host}:1"})
    for host in ("localhost", "no such host.invalid", "localhost"):
        await endpoints.of(entry("b", addresses=(f"{host}:1",)), DECODE)
    assert len(endpoints._resolved) == 1
