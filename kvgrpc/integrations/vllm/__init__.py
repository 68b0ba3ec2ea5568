"""KVGrpcConnector: vLLM's V1 KV connector on kvgrpc, chosen by configuration only.

    --kv-transfer-config '{"kv_connector": "KVGrpcConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvgrpc.integrations.vllm"}'

The scheduler's side is a `kvgrpc.engine.scheduler.Scheduler` with a lead as a child process; the side of each worker is
a `kvgrpc.engine.Rank` over vLLM's own KV tensors. Steps are numbered: blocks freed in a step are filled, and blocks
computed in a step are sent, only once all workers have reported that step done. All sides are in vLLM's processes;
scheduler and worker meet in a folder that only this user can read.

With `"mode": "tensors"` a prompt's KV goes as named tensors, by way of a store; see `tensors/`.

Programs around vLLM know connectors by name, and Dynamo refuses a name that it does not know. `"kv_connector":
"NixlConnector"` with the same module path is this connector too: what such a program does for that name fits it.

The connector serves tensor-parallel ranks and pipeline stages on one host, each replica of a data-parallel engine by
itself, and groups of full attention, sliding windows, MLA and states, whose blocks are whole in each layer's memory. It
refuses others.
"""

from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvgrpc.integrations.vllm.connector import KVGrpcConnector

NixlConnector = KVGrpcConnector

__all__ = ["KVGrpcConnector", "NixlConnector"]

with suppress(ValueError):  # it is registered already
    # A MultiConnector sends its counts under the names of its connectors, which are looked up in this factory.
    KVConnectorFactory.register_connector(KVGrpcConnector.__name__, __name__, KVGrpcConnector.__name__)
