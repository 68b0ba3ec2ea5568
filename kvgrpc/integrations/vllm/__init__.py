"""KVGrpcConnector: vLLM's V1 KV connector on kvgrpc, chosen by configuration only.

    --kv-transfer-config '{"kv_connector": "KVGrpcConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvgrpc.integrations.vllm"}'

The scheduler's side is a `kvgrpc.engine.scheduler.Scheduler` with a lead as a child process; the side of each worker is
a `kvgrpc.engine.Rank` over vLLM's own KV tensors. Steps are numbered: what was freed in one is filled, and what was
computed in one is sent, only once all workers have reported it done. All sides are in vLLM's processes; scheduler and
worker meet in a folder that only this user can read.

With `"mode": "tensors"` a prompt's KV goes as named tensors, by way of a store; that is `tensors/`.

Programs around vLLM know connectors by name, and Dynamo refuses one that it does not know. `"kv_connector":
"NixlConnector"` with the same module path is this connector, too: what such a program does for that name fits it.

For tensor-parallel ranks and pipeline stages on one host, each replica of a data-parallel engine by itself, and groups
of full attention, of sliding windows, of MLA and of states, whose blocks are whole in each layer's memory; others are
refused.
"""

from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvgrpc.integrations.vllm.connector import KVGrpcConnector

NixlConnector = KVGrpcConnector

__all__ = ["KVGrpcConnector", "NixlConnector"]

with suppress(ValueError):  # it is registered
    # What a MultiConnector counts is sent under the names of its connectors, which are looked up there.
    KVConnectorFactory.register_connector(KVGrpcConnector.__name__, __name__, KVGrpcConnector.__name__)
