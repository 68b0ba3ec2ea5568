"""The address of a registry says which one it is, and a missing extra is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.fleet.entry import EngineEntry
from kvgrpc.registry.addresses import registry_at
from kvgrpc.registry.dns import DnsRegistry
from kvgrpc.registry.kubernetes.lease_registry import LeaseRegistry
from kvgrpc.registry.kubernetes.slice_registry import SliceChoice, SliceRegistry

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
MISSING = """
import sys
from pathlib import Path
sys.modules[{library!r}] = None
from kvgrpc.registry.addresses import registry_at
try:
    registry_at({address!r}, None, {pod!r}, Path({account!r}))
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
    assert isinstance(registry_at("kubernetes-leases://", introduce, POD, account), LeaseRegistry)
    slices = registry_at("kubernetes://?selector=a%2Fb=c,d=e&port=kv&domain=svc", introduce, POD, account)
    assert isinstance(slices, SliceRegistry)
    assert slices._choice == SliceChoice("a/b=c,d=e", "kv", "svc")
    assert slices._api.settings.namespace == "llm"
    other = registry_at("kubernetes://other?selector=a=b", introduce, POD, account)
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
        registry_at(wrong, introduce, POD, account)


def test_outside_of_a_pod_kubernetes_has_no_address() -> None:
    with pytest.raises(InvalidRequest, match="in a pod only"):
        registry_at("kubernetes-leases://llm", introduce, {})


@pytest.mark.parametrize(
    ("library", "address", "extra"),
    [
        ("dns", "dns:///kv.example:7", "dns"),
        ("aiohttp", "kubernetes://llm?selector=a=b", "kubernetes"),
        ("aiohttp", "kubernetes-leases://llm", "kubernetes"),
    ],
)
def test_a_missing_extra_is_named(library: str, address: str, extra: str, account: Path) -> None:
    script = MISSING.format(library=library, address=address, pod=POD, account=str(account))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert f"pip install 'kvgrpc[{extra}]'" in ended.stdout
