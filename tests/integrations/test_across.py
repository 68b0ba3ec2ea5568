"""The identity of KV that engines of different programs exchange."""

from typing import Any

import pytest

from kvgrpc.integrations.across import identity_of

CONFIG = {
    "num_hidden_layers": 4,
    "rope_scaling": {"type": "linear", "_name_or_path": "a"},
    "transformers_version": "5.0",
}


def identity(weights: str = "w", overrides: dict[str, Any] | None = None, **more: Any) -> str:
    config = {**CONFIG, **more.pop("config", {})}
    named = {"quantization": "", "model_len": 4096, **more}
    return identity_of(weights, config, overrides or {}, **named)


def test_engines_agree_whatever_library_and_place_their_configuration_was_read_by() -> None:
    elsewhere = {"transformers_version": "6.1", "_name_or_path": "/b", "rope_scaling": {"type": "linear"}}
    assert identity(config=elsewhere) == identity()
    assert identity(model_len=8192) == identity()
    assert identity(overrides={"num_hidden_layers": 4}) == identity()


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "other"},
        {"config": {"num_hidden_layers": 5}},
        {"overrides": {"rope_scaling": {"type": "dynamic"}}},
        {"quantization": "fp8"},
    ],
)
def test_whatever_changes_the_kv_keeps_engines_apart(changed: dict[str, Any]) -> None:
    assert identity(**changed) != identity()


def test_the_length_counts_where_it_chooses_a_scaling() -> None:
    long = {"rope_scaling": {"long_factor": [1.0], "short_factor": [1.0]}}
    assert identity(config=long, model_len=8192) != identity(config=long)
