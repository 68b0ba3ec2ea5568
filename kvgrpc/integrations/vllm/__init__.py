"""KVGrpcConnector: vLLM's V1 KV connector on kvgrpc, chosen by configuration only.

    --kv-transfer-config '{"kv_connector": "KVGrpcConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "kvgrpc.integrations.vllm",
                           "kv_connector_extra_config": {"mode": "pull"}}'

The scheduler's side is a `kvgrpc.engine.scheduler.Scheduler` with a lead as a child process; the worker's side is a
`kvgrpc.engine.Rank` over vLLM's own KV tensors. Steps are numbered: what was freed in one is filled, and what was
computed in one is sent, only once the worker has reported it done. Both sides are in vLLM's processes; they meet in a
folder that only this user can read.

For one rank and one group of full attention whose blocks are whole in each layer's tensor; others are refused.
"""

from kvgrpc.integrations.vllm.connector import KVGrpcConnector

__all__ = ["KVGrpcConnector"]
