"""The identity of KV that engines of different programs exchange: what both of them know of a model by themselves.

An engine's own identity has its version, its kernels and its settings, which another program does not have. Two engines
that are set to exchange across programs agree in the model's configuration instead, as the file of the model says it.
Roundings may differ, as they do between kernels. Neither engine hands over the last token of a prompt: decode computes
it, since only decode's own program knows how it goes on from what was sampled elsewhere.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HEAD = "across engines 1"
BESIDES = frozenset(("_name_or_path", "transformers_version"))
"""Keys that do not count: where the configuration was read, and by which library."""
TOKENS_BACK = 1
"""Tokens at the end of a prompt that decode computes."""


def identity_of(
    weights: str, stated: Mapping[str, Any], overrides: Mapping[str, Any], *, quantization: str, model_len: int
) -> str:
    """Returns the identity of a model's KV. `weights`: the name of the weights. `stated`: the configuration in the
    model's file. `overrides`: what the engine was told to replace in it. `model_len`: the maximum length of a request,
    which counts only where it chooses one of two RoPE scalings.
    """
    found = {"config": _without({**stated, **overrides}), "quantization": quantization}
    text = json.dumps(found, sort_keys=True, default=repr)
    if "long_factor" in text:
        text += str(model_len)
    return f"{HEAD};{weights};{hashlib.sha256(text.encode()).hexdigest()}"


def stated_config(model: str, revision: str | None) -> dict[str, Any]:
    """Returns the configuration in a model's own file, by the library that both programs read it with."""
    from transformers import PretrainedConfig

    return dict(PretrainedConfig.get_config_dict(model, revision=revision)[0])


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without(found) for key, found in value.items() if key not in BESIDES}
    return [_without(found) for found in value] if isinstance(value, list | tuple) else value
