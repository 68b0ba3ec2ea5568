"""What vLLM is told about kvgrpc, and what its KV cache looks like as a pool."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgrpc.core.policy.values import Mode, OnLoss
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Strides, uniform_layout
from kvgrpc.integrations.params import Defaults

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


REQUIRED_LAYOUT = "LBHNC"
"""Asked of vLLM, so that engines agree: without, attention backends for devices would each choose their own."""
ORDERS = {REQUIRED_LAYOUT: "head_major", "LBNHC": "token_major"}
"""Within a block, of the layouts of vLLM that are served: each layer has memory of its own, and each block is whole."""
SPLITS = {
    "pipeline_parallel_size": "pipeline stages, each with layers of its own; vLLM's scheduler knows the first's",
    "prefill_context_parallel_size": "ranks that have the KV of other tokens",
    "decode_context_parallel_size": "ranks that have the KV of other tokens",
    "nnodes": "hosts, and workers reach their lead by a socket of its host",
}
"""Ways to split an engine that are not served, and what each of so many would be."""
OTHER_MODEL = "serve this model without a connector, or another one whose layers all have full attention"


@dataclass(frozen=True)
class Options:
    """`kv_connector_extra_config`, with what vLLM itself is told."""

    defaults: Defaults
    on_loss: OnLoss = OnLoss.FAIL
    listen: str = "127.0.0.1:0"
    """Where the lead serves peers and routers."""
    data_paths: tuple[str, ...] = ("cma", "nixl")
    serve_flags: tuple[str, ...] = ()
    """More flags of `kvgrpc serve` for the lead: --advertise, --dial-allow, --config."""
    recompute_threshold_tokens: int = 64
    layers_per_part: int = 0
    """Pushes hand over so many layers at once, as soon as they are computed; 0: all."""
    copy_threads: int = 1
    weights_revision: str = ""

    @classmethod
    def of(cls, config: "VllmConfig") -> "Options":
        """Raises ValueError for what is unknown, or wrong."""
        transfer = config.kv_transfer_config
        stated: dict[str, Any] = dict(transfer.kv_connector_extra_config or {})
        model = config.model_config
        defaults = Defaults(
            Mode(stated.pop("mode", "pull")),
            stated.pop("ttl_s", None),
            stated.pop("firm_ttl_s", None),
            float(stated.pop("offer_ttl_s", 0.0)),
        )
        fields: dict[str, Any] = {
            "on_loss": OnLoss(transfer.kv_load_failure_policy),
            "weights_revision": f"{model.model}@{model.revision or ''}",
            **{name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()},
        }
        unknown = fields.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"kv_connector_extra_config: kvgrpc knows no {', '.join(sorted(unknown))}")
        return cls(defaults, **fields)


def layout_of(config: "VllmConfig", cache: "KVCacheConfig") -> PoolLayout:
    """The pool. Raises ValueError for one that this connector does not serve, with the reason and what would do."""
    parallel = config.parallel_config
    for split, what in SPLITS.items():
        if (count := getattr(parallel, split)) != 1:
            raise _unserved(
                f"engines on one host whose ranks split nothing but heads; this one has {count} {what}",
                f"leave {split} at 1 and split the model by --tensor-parallel-size, or start it without a connector",
            )
    # Of models without experts, each rank of a data-parallel engine is told that it is alone, and its index.
    if parallel.data_parallel_size != 1 or parallel.data_parallel_index:
        raise _unserved(
            "no data-parallel engines, whose ranks would all listen at one address",
            "start an engine of its own for each rank, with its own `listen`, and let the router choose",
        )
    if config.cache_config.cache_dtype == "int8_per_token_head":
        raise _unserved("no cache of int8_per_token_head: vLLM's own tokens are wrong with it", "set --kv-cache-dtype")
    if len(cache.kv_cache_groups) != 1:
        raise _unserved(f"one KV cache group; this model has {len(cache.kv_cache_groups)}", OTHER_MODEL)
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    if kind != "FullAttentionSpec":
        raise _unserved(f"full attention; this model's layers have {kind}", OTHER_MODEL)
    # With a window the hybrid manager is off: blocks are there for all tokens, and all of them go.
    if (order := ORDERS.get(cache.kv_cache_layout or "")) is None:
        raise _unserved(
            f"blocks that are whole in each layer's memory; vLLM chose the layout {cache.kv_cache_layout}",
            f"set VLLM_KV_CACHE_LAYOUT to {REQUIRED_LAYOUT}, or leave it unset",
        )
    dtype = str(spec.dtype).removeprefix("torch.")
    plain_bytes = 2 * spec.block_size * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    if spec.page_size_bytes != plain_bytes:
        raise _unserved(
            f"blocks of keys and values alone; one of a layer has {spec.page_size_bytes} bytes, and they take "
            f"{plain_bytes}",
            "choose another --kv-cache-dtype or --block-size",
        )
    layers = len(group.layer_names)
    made = Group(
        "full", GroupKind.FULL_ATTENTION, layers, spec.block_size, cache.num_blocks, spec.num_kv_heads, spec.head_size,
        dtype, order=order, total_kv_heads=config.model_config.get_total_num_kv_heads(),
    )  # fmt: skip
    return uniform_layout(made, spec.page_size_bytes, strides=_strides(made, spec.dtype.itemsize))


def _strides(group: Group, item_bytes: int) -> Strides:
    """A block of a layer holds one head after the other where heads come first. How a head's keys and values are
    ordered is a matter of the attention backend's, which may interleave tokens to suit its processor.
    """
    head_bytes = 2 * group.block_tokens * group.head_dim * item_bytes
    return Strides(0, 0, head_bytes if group.order == "head_major" else 0, 0)


def _unserved(what: str, instead: str) -> ValueError:
    return ValueError(f"KVGrpcConnector serves {what}. To do: {instead}")
