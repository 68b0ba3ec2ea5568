"""The settings of a staging store: what cannot be is refused by its name, before anything is made."""

from typing import Any

import pytest

from kvgrpc.config_sources import load
from kvgrpc.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        *((name, {name: value}) for name in ("known", "waits", "page_bytes") for value in (0, -1, True, 1.5)),
        *((name, {name: value}) for name in ("store_bytes", "spill_bytes") for value in (-1, True, "64")),
        ("page_bytes", {"page_bytes": 1000}),
        ("store_bytes", {"store_bytes": 100}),
        ("store_bytes", {"store_bytes": 1 << 60}),
        ("spill_bytes", {"spill_bytes": 4095}),
        ("spill_bytes", {"spill_bytes": 1 << 55}),
        ("spill_bytes", {"store_bytes": 1 << 20, "spill_bytes": 65535}),
        ("spill_bytes", {"store_bytes": 1 << 20, "spill_bytes": (1 << 40) + 1}),
    ],
    ids=str,
)
def test_a_staging_store_that_cannot_be_is_refused_by_its_key(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        load(None, {}, {"tensors": settings})
    assert [violation.field for violation in raised.value.violations] == [f"tensors.{field}"]


@pytest.mark.parametrize(
    "settings", [{"spill_bytes": 4096}, {"store_bytes": 65536, "spill_bytes": 65536}, {"waits": 1}]
)
def test_a_staging_store_at_its_limits_is_taken(settings: dict[str, Any]) -> None:
    made = load(None, {}, {"tensors": settings}).tensors
    assert {name: getattr(made, name) for name in settings} == settings


def test_a_server_without_an_embedded_pool_has_no_store_either() -> None:
    with pytest.raises(InvalidRequest) as raised:
        load(None, {}, {"pool": False, "tensors": {"store_bytes": 1 << 20}})
    assert [violation.field for violation in raised.value.violations] == ["tensors.store_bytes"]
