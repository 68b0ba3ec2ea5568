"""NVIDIA Dynamo chooses params for vLLM's engines from a table that knows a connector by its name."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvgrpc.integrations.vllm import KVGrpcConnector
from tests.vllm.cores import Cores, request_of
from tests.vllm.engines import wait_until

protocols = pytest.importorskip("dynamo.vllm.kv_connector_protocols")
UNDER_THEIR_NAME = "NixlConnector"


def configured(name: str) -> Any:
    """Returns an engine with the plugin under this name."""
    transfer = KVTransferConfig(
        kv_connector=name, kv_connector_module_path="kvgrpc.integrations.vllm", kv_role="kv_both"
    )
    return SimpleNamespace(kv_transfer_config=transfer)


def test_the_plugin_stands_under_the_name_that_other_programs_know() -> None:
    config = configured(UNDER_THEIR_NAME).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(config) is KVGrpcConnector


def test_dynamo_refuses_a_connector_whose_name_is_not_in_its_table() -> None:
    with pytest.raises(ValueError, match="KVGrpcConnector"):
        protocols.make_kv_connector_protocol(configured("KVGrpcConnector"))


def test_what_dynamo_asks_of_both_legs_moves_the_kv(cores: Cores) -> None:
    p, d = cores
    protocol = protocols.make_kv_connector_protocol(configured(UNDER_THEIR_NAME))
    prefill = request_of("p", protocol.prefill_request_kv_transfer_params())
    answer = SimpleNamespace(kv_transfer_params=p.left(prefill, p.computing(prefill)))
    d.begin(request_of("d", protocol.decode_request_kv_transfer_params(answer)))
    wait_until(lambda: d.step() and d.told.loaded == {"d"})
    assert not d.told.failed
    wait_until(lambda: p.step() and p.used() == 0)
