"""Settings of the fleet: what names a registry, and every wrong value by its name."""

from dataclasses import fields
from typing import Any

import pytest

from kvgrpc.config import Config
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.config_sources import load
from kvgrpc.errors import InvalidRequest


def fleet(**values: Any) -> FleetConfig:
    return load(None, {}, {"fleet": values}).fleet


def test_without_a_registry_nothing_is_named() -> None:
    assert Config().fleet == fleet() == FleetConfig()
    assert (FleetConfig().members, FleetConfig().path) == ((), "")


def test_a_registry_is_what_its_address_begins_with() -> None:
    assert fleet(registry="etcd://a:1,b:2/").members == ("a:1", "b:2")
    assert {fleet(registry=text).path for text in ("file:/x/y.toml", "file:///x/y.toml")} == {"/x/y.toml"}
    for text in (
        "dns:///kv:1",
        "dns+srv:///_kvgrpc._tcp.kv",
        "kubernetes://?selector=a=b",
        "kubernetes-leases://llm",
        "kubernetes-leases://",
    ):
        assert fleet(registry=text).found_by_library
    assert not fleet(registry="file:x").found_by_library
    assert fleet(addresses="a:1, [::1]:2").published_addresses == ("a:1", "[::1]:2")


def test_every_key_has_a_variable() -> None:
    texts = {
        "registry": "file:x",
        "role": "decode",
        "entry_ttl_s": "7",
        "check_every_s": "2",
        "watch_offers": "false",
        "prefix": "/x/",
        "http": "{host}:80",
        "certificate_name": "{engine_id}.x",
        "addresses": "a:1",
    }
    names = {item.name for item in fields(FleetConfig)}
    variables = {f"KVGRPC_FLEET_{name.upper()}": texts.get(name, "text") for name in names}
    found = load(None, variables | {"KVGRPC_TLS_DIR": "certs"}, {}).fleet
    assert [name for name in names if getattr(found, name) == getattr(FleetConfig(), name)] == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("registry", "redis://a:1"),
        ("registry", "etcd://"),
        ("registry", "dns://"),
        ("registry", "kubernetes:/llm"),
        ("registry", "etcd://a"),
        ("registry", "etcd://a:0"),
        ("registry", "file:"),
        ("registry", 7),
        ("role", "router"),
        ("model", "a\nb"),
        ("tenant", "t" * 257),
        ("addresses", "a"),
        ("addresses", ",".join(["a:1"] * 9)),
        ("entry_ttl_s", 2),
        ("entry_ttl_s", True),
        ("entry_ttl_s", "many"),
        ("check_every_s", 0),
        ("check_every_s", float("nan")),
        ("watch_offers", 1),
        ("prefix", "engines"),
        ("http", "{host}"),
        ("http", "{host}:80,p=:81"),
        ("http", "{host}:0"),
        ("http", "prefill=8000,{host}:80"),
        ("certificate_name", "p.example"),
        ("certificate_name", "*.{engine_id}"),
        ("certificate_name", "{engine_id}.{engine_id}"),
        ("etcd_cert", "c"),
        ("etcd_user", "u"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fleet(**{field: value})
    (violation,) = caught.value.violations
    assert violation.field == f"fleet.{field}"
