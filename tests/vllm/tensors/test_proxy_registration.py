"""Engines register with a proxy."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.integrations.vllm.proxy_registration import Proxy, ProxyRegistration
from tests.vllm.engines import free_port, wait_until
from tests.vllm.xpyd import Registered


def test_a_proxy_that_comes_later_than_its_engines_hears_of_them() -> None:
    port = free_port()
    engines = [
        ProxyRegistration(Proxy(f"127.0.0.1:{port}", kind, 8000 + number), f"127.0.0.1:{5000 + number}")
        for number, kind in enumerate(["P", "D", "D"])
    ]
    registered = Registered(port)
    try:
        wait_until(lambda: len(registered.engines["D"]) == 2 and registered.both())
        assert registered.engines == {
            "P": {"127.0.0.1:8000": "127.0.0.1:5000"},
            "D": {"127.0.0.1:8001": "127.0.0.1:5001", "127.0.0.1:8002": "127.0.0.1:5002"},
        }
    finally:
        for engine in engines:
            engine.close()
        registered.close()


def test_an_engine_ends_though_its_proxy_is_not_there() -> None:
    ProxyRegistration(Proxy(f"127.0.0.1:{free_port()}", "P", 8000), "127.0.0.1:5000").close()


@pytest.mark.parametrize(
    ("stated", "why"),
    [(("127.0.0.1", 30001, 0), "http_port"), (("", 30001, 8000), "proxy_ip"), (("127.0.0.1", 0, 8000), "proxy_port")],
)
def test_a_part_of_a_proxy_stops_the_start(stated: tuple[str, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Proxy.of(_role("kv_producer"), *stated)


@pytest.mark.parametrize(("role", "kind"), [("kv_producer", "P"), ("kv_consumer", "D")])
def test_an_engine_registers_as_what_its_role_says(role: str, kind: str) -> None:
    assert Proxy.of(_role(role), "::1", 30001, 8000) == Proxy("[::1]:30001", kind, 8000)
    assert Proxy.of(_role(role), "", 0, 0) is None
    with pytest.raises(ValueError, match="kv_role"):
        Proxy.of(_role("kv_both"), "::1", 30001, 8000)


def _role(role: str) -> Any:
    return SimpleNamespace(kv_role=role)
