"""What vLLM's configuration says of kvgrpc, against what is documented."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.core.policy_values import Mode, OnLoss
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.options import Options
from tests.docs.pages import DOCS, plain, section, tables


def options_of(policy: str = "fail", **extra: Any) -> Options:
    transfer = SimpleNamespace(kv_connector_extra_config=extra, kv_load_failure_policy=policy)
    model = SimpleNamespace(model="llama", revision=None)
    return Options.of(SimpleNamespace(kv_transfer_config=transfer, model_config=model))


def test_every_option_is_documented_with_its_default() -> None:
    rows = {plain(row[0]): plain(row[1]) for row in tables(section(DOCS / "integrating.md", "## vLLM"))[0]}
    defaults = {field.name: field.default for field in dataclasses.fields(Options)} | vars(Defaults())
    of_vllm = {"defaults", "on_loss"}
    assert rows.keys() == defaults.keys() - of_vllm
    said = {"mode": "pull", "ttl_s": "the lead's", "offer_ttl_s": "0", "serve_flags": "none",
            "weights_revision": "model and revision", "data_paths": '["cma", "nixl"]'}  # fmt: skip
    assert rows == {name: said.get(name, str(defaults[name])) for name in rows}


def test_options_come_from_both_configurations_of_vllm() -> None:
    found = options_of("recompute", mode="push", data_paths=["nixl"], offer_ttl_s=9)
    assert (found.defaults.mode, found.defaults.offer_ttl_s) == (Mode.PUSH, 9.0)
    assert (found.on_loss, found.data_paths) == (OnLoss.RECOMPUTE, ("nixl",))
    assert found.weights_revision == "llama@"


@pytest.mark.parametrize("extra", [{"listne": "x"}, {"mode": "pusch"}])
def test_what_is_unknown_stops_the_start(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"listne|pusch"):
        options_of(**extra)
