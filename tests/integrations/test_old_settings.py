"""Settings of other connectors: what is stated is obeyed or refused, never ignored."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.integrations.old_settings import OLD_SETTINGS, Fate, Place, check_fields, check_keys, not_read


def refused(place: Place) -> list[Any]:
    return [pytest.param(row, id=row.name) for row in OLD_SETTINGS if (row.place, row.fate) == (place, Fate.REFUSED)]


@pytest.mark.parametrize("row", refused(Place.KEY))
def test_a_key_of_another_connector_stops_the_start_and_names_ours(row: Any) -> None:
    with pytest.raises(ValueError, match=row.name) as stop:
        check_keys([row.name, "typo"], "pull")
    assert row.ours in str(stop.value)
    assert "no " + ", ".join(sorted([row.name, "typo"])) in str(stop.value)


def test_known_keys_stop_nothing() -> None:
    check_keys([], "pull")


@pytest.mark.parametrize("row", refused(Place.FIELD))
def test_a_field_that_would_be_ignored_stops_the_start_unless_it_is_vllms_default(row: Any) -> None:
    default = "cuda" if row.name == "kv_buffer_device" else row.default
    check_fields(SimpleNamespace(**{row.name: default}), "cuda", on_host=False)
    check_fields(SimpleNamespace(), "cuda", on_host=False)
    with pytest.raises(ValueError, match=row.name) as stop:
        check_fields(SimpleNamespace(**{row.name: "other"}), "cuda", on_host=False)
    assert row.ours in str(stop.value)


def test_a_buffer_in_host_memory_is_obeyed_where_what_moves_passes_that() -> None:
    stated = SimpleNamespace(kv_buffer_device="cpu")
    check_fields(stated, "cuda", on_host=True)
    check_fields(stated, "cpu", on_host=False)
    with pytest.raises(ValueError, match="mirror"):
        check_fields(stated, "cuda", on_host=False)


def test_variables_of_other_connectors_are_warned_of_with_ours() -> None:
    variables = [row for row in OLD_SETTINGS if row.place is Place.VARIABLE]
    assert not_read({"HOME": "/"}) == []
    for row in variables:
        (line,) = not_read({row.name: "1"})
        assert row.name in line
        assert row.ours in line
