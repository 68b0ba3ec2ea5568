"""Settings of other connectors are obeyed or refused, never ignored."""

import itertools
from types import SimpleNamespace

import pytest

from kvgrpc.core.policy.values import ModeChoice
from kvgrpc.integrations.old_settings import (
    OLD_SETTINGS,
    TENSORS,
    Fate,
    OldSetting,
    Place,
    check_fields,
    check_keys,
    not_read,
    passes_host,
)

MODES = [*(mode.value for mode in ModeChoice), TENSORS]
NOT_OF_TENSORS = {"kv_recompute_threshold", "bidirectional_kv_xfer", "decoder_kv_blocks_ttl", "num_threads"}
"""Settings without a counterpart where tensors are moved."""


def refused(place: Place) -> list[OldSetting]:
    return [row for row in OLD_SETTINGS if (row.place, row.fate) == (place, Fate.REFUSED)]


def test_a_key_of_another_connector_stops_the_start_and_names_ours_where_the_mode_has_it(
    subtests: pytest.Subtests,
) -> None:
    for row, mode in itertools.product(refused(Place.KEY), MODES):
        with subtests.test(row.name, mode=mode):
            with pytest.raises(ValueError, match=row.name) as stop:
                check_keys([row.name, "typo"], mode)
            has_it = mode != TENSORS or row.name not in NOT_OF_TENSORS
            assert f"In place of {row.name} set {row.ours if has_it else 'nothing in this mode'}" in str(stop.value)
            assert "no " + ", ".join(sorted([row.name, "typo"])) in str(stop.value)


def test_known_keys_stop_nothing() -> None:
    check_keys([], "pull")


def test_a_field_that_would_be_ignored_stops_the_start_unless_it_is_vllms_default(subtests: pytest.Subtests) -> None:
    check_fields(SimpleNamespace())
    for row in refused(Place.FIELD):
        with subtests.test(row.name):
            check_fields(SimpleNamespace(**{row.name: row.default}))
            with pytest.raises(ValueError, match=row.name) as stop:
                check_fields(SimpleNamespace(**{row.name: "other"}))
            assert row.ours in str(stop.value)


@pytest.mark.parametrize(
    ("stated", "device", "mirror", "passes"),
    [
        ({}, "xpu", None, False),
        ({}, "xpu", True, True),
        ({"kv_buffer_device": "xpu"}, "xpu", None, False),
        ({"kv_buffer_device": "cpu"}, "xpu", None, True),
        ({"kv_buffer_device": "cpu"}, "xpu", True, True),
        ({"kv_buffer_device": "cpu"}, "cpu", None, False),
        ({"kv_buffer_device": "cpu"}, "cpu", False, False),
    ],
)
def test_what_moves_passes_host_memory_where_either_setting_says_so(
    stated: dict[str, str], device: str, mirror: bool | None, passes: bool
) -> None:
    assert passes_host(SimpleNamespace(**stated), device, mirror) is passes


@pytest.mark.parametrize(("buffer", "mirror"), [("cuda", None), ("cuda", True), ("cpu", False)])
def test_a_buffer_elsewhere_and_one_against_the_mirror_stop_the_start(buffer: str, mirror: bool | None) -> None:
    with pytest.raises(ValueError, match="kv_buffer_device is"):
        passes_host(SimpleNamespace(kv_buffer_device=buffer), "xpu", mirror)


def test_what_a_platform_sets_by_itself_stops_nothing() -> None:
    """vLLM permutes on XPU, whatever the operator sets."""
    check_fields(SimpleNamespace(enable_permute_local_kv=True))


def test_variables_of_other_connectors_are_warned_of_with_ours() -> None:
    variables = [row for row in OLD_SETTINGS if row.place is Place.VARIABLE]
    assert not_read({"HOME": "/", **{row.name: "1" for row in variables if row.fate is Fate.OBEYED}}) == []
    for row in (row for row in variables if row.fate is Fate.WARNED):
        (line,) = not_read({row.name: "1"})
        assert row.name in line
        assert row.ours in line


def test_a_variable_that_no_table_has_is_warned_of_where_only_another_connector_reads_it() -> None:
    (line,) = not_read({"VLLM_NIXL_OF_TOMORROW": "1", "VLLM_LOGGING_LEVEL": "INFO"})
    assert "VLLM_NIXL_OF_TOMORROW is set, which kvgrpc does not read" in line
