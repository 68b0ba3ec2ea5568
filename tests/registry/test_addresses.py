"""The address of a registry says which one it is, and a missing extra is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.addresses import publisher_at, registry_at
from kvgrpc.registry.dns import DnsRegistry
from kvgrpc.registry.kubernetes.lease_registry import LeaseRegistry
from kvgrpc.registry.kubernetes.slice_registry import SliceChoice, SliceRegistry

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
MISSING = """
import sys
sys.modules[{library!r}] = None
from kvgrpc.registry.addresses import registry_at
try:
    registry_at({address!r}, None, {pod!r})
except Exception as error:
    print(error)
"""


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "namespace").write_text("llm")
    return tmp_path


async def introduce(address: str) -> EngineEntry:
    raise AssertionError(address)


def test_an_address_says_which_registry_it_is(account: Path) -> None:
    assert isinstance(registry_at("dns:///kv.example:7", introduce, {}), DnsRegistry)
    assert isinstance(registry_at("dns+srv:///_kvgrpc._tcp.kv.example", introduce, {}), DnsRegistry)
    assert isinstance(registry_at(f"kubernetes-leases://?account={account}", introduce, POD), LeaseRegistry)
    slices = registry_at(f"kubernetes://?selector=a%2Fb=c,d=e&port=kv&domain=svc&account={account}", introduce, POD)
    assert isinstance(slices, SliceRegistry)
    assert slices._choice == SliceChoice("a/b=c,d=e", "kv", "svc")
    assert slices._api.settings.namespace == "llm"
    other = registry_at(f"kubernetes://other?selector=a=b&account={account}", introduce, POD)
    assert isinstance(other, SliceRegistry)
    assert other._api.settings.namespace == "other"


@pytest.mark.parametrize(
    "wrong",
    [
        "", "consul://x", "dns:///kv.example", "kubernetes://llm", "kubernetes://?selector=", "kubernetes-leases://?port=x",
        "kubernetes://llm?selector=a&chosen=b", "kubernetes://llm/x?selector=a",
    ],
)  # fmt: skip
def test_an_address_that_says_nothing_is_refused(wrong: str, account: Path) -> None:
    with pytest.raises(InvalidRequest, match="registry"):
        registry_at(wrong.replace("?", f"?account={account}&"), introduce, POD)


def test_only_leases_are_published_by_an_address(account: Path) -> None:
    assert callable(publisher_at(f"kubernetes-leases://?account={account}", POD, 40))
    for wrong in ("dns:///kv.example:7", f"kubernetes://?selector=a=b&account={account}", "etcd://a:1"):
        with pytest.raises(InvalidRequest, match="registry"):
            publisher_at(wrong, POD, 40)


def test_outside_of_a_pod_kubernetes_has_no_address() -> None:
    with pytest.raises(InvalidRequest, match="in a pod only"):
        registry_at("kubernetes-leases://llm", introduce, {})


@pytest.mark.parametrize(
    ("library", "address", "extra"),
    [
        ("dns", "dns:///kv.example:7#", "dns"),
        ("aiohttp", "kubernetes://llm?selector=a=b&account=", "kubernetes"),
        ("aiohttp", "kubernetes-leases://llm?account=", "kubernetes"),
    ],
)
def test_a_missing_extra_is_named(library: str, address: str, extra: str, account: Path) -> None:
    script = MISSING.format(library=library, address=f"{address}{account}", pod=POD)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert f"pip install 'kvgrpc[{extra}]'" in ended.stdout
