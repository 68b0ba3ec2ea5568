"""The options of this mode, and the engines that it serves."""

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from kvgrpc.core.tensors.line import RESERVED
from kvgrpc.core.tensors.store_layout import PAGE_BYTES, pages_for, store_layout
from kvgrpc.core.values.content import UNIT_TOKENS
from kvgrpc.core.values.layout import GroupKind, PoolLayout
from kvgrpc.errors import KVGrpcError
from kvgrpc.integrations.derived_keys import read_secret
from kvgrpc.integrations.old_settings import TENSORS, Place, passes_host
from kvgrpc.integrations.vllm.geometry import unserved
from kvgrpc.integrations.vllm.options import SharedOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_log = logging.getLogger(__name__)
SERVED = {GroupKind.FULL_ATTENTION, GroupKind.MLA}
OTHER_MODE = 'set "mode" to "pull" or "push"'
SPLITS = {"pipeline_parallel_size": "pipeline stages", "data_parallel_size": "replicas", "nnodes": "hosts"}
"""Ways to split an engine that are not served in this mode."""


class SendMode(Enum):
    """The way of a tensor from the prefill engine's store into the decode engine's."""

    PUT = "put"
    """A prefill step ends when the decode engine has what it computed."""
    PUT_ASYNC = "put_async"
    """A prefill step ends when what it computed is copied."""
    GET = "get"
    """Like `PUT_ASYNC`, but the tensors are kept until the decode engine fetches them."""


class WhenFull(Enum):
    """The fate of a tensor for which a prefill engine has no room: neither in its store nor among the copies that wait
    for room there.
    """

    GIVE_UP = "give_up"
    """The request gives no KV: the decode engine computes or fails it. No step waits for room in the store."""
    WAIT = "wait"
    """The step waits for room, and so do all requests of that engine."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions(SharedOptions):
    """The settings of an engine in this mode."""

    send: SendMode = SendMode.PUT_ASYNC
    store_bytes: int = 1 << 30
    page_bytes: int = PAGE_BYTES
    store_on_device: bool = False
    """True if the store lies in the memory that the engine computes in, beside its cache. False: in host memory."""
    queued_bytes: int = 256 << 20
    """Maximum bytes of copies that wait for room in a prefill engine's store, in the memory that it computes in."""
    when_full: WhenFull = WhenFull.GIVE_UP
    waiting_bytes: int = 4 << 30
    """Maximum bytes of KV, on a rank, that a decode engine waits for at a time. One request is always asked for."""
    part_tokens: int = 1024
    layers_per_tensor: int = 4
    timeout_s: float = 30.0
    """Time, in seconds, that a decode engine waits for tensors, and that a prefill engine's tensors wait for room."""
    ttl_s: float | None = None
    """Time, in seconds, that a tensor is kept which nobody has fetched; None: the lead's default."""
    peers: tuple[str, ...] = ()
    """Addresses of rank 0 of all stores that tensors may be exchanged with; empty: all that the lead may dial. A single
    one is the default store for tensors that are put.
    """
    data_paths: tuple[str, ...] = ("shm", "cma", "nixl", "cuda_vmm", "collective")

    @classmethod
    def of(cls, config: "VllmConfig") -> "TensorOptions":
        """Reads the options of an engine. Raises ValueError for unknown and invalid ones."""
        transfer = config.kv_transfer_config
        stated: dict[str, Any] = dict(transfer.kv_connector_extra_config or {})
        stated.pop("mode", None)
        if passes_host(transfer, current_platform.device_type, mirror=None) and stated.get("store_on_device"):
            raise ValueError(
                f"{Place.FIELD.value}: kv_buffer_device is 'cpu', and `store_on_device` in {Place.KEY.value} true: set "
                "one of them"
            )
        stated["send"] = SendMode(stated.get("send", cls.send.value))
        stated["when_full"] = WhenFull(stated.get("when_full", cls.when_full.value))
        made = cls._made(config, TENSORS, stated)
        try:
            store_layout(made.store_bytes, made.page_bytes)
        except KVGrpcError as error:
            raise ValueError(str(error)) from error
        if not made.timeout_s > 0:
            raise ValueError(f"timeout_s: {made.timeout_s} is no time to wait")
        if made.queued_bytes < 0:
            raise ValueError(f"queued_bytes: {made.queued_bytes} is no number of bytes")
        read_secret(made.pairing_secret_file)
        for peer in made.peers:
            address_of(peer, 0)
        return made


def address_of(first: str, rank: int) -> str:
    """Returns the address of a rank's store, given that of rank 0. Port 0 is any. Raises ValueError for no address."""
    host, colon, port = first.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"{first!r} is no address: write host:port")
    return f"{host}:{int(port) + rank}" if int(port) else first


def check(config: "VllmConfig", options: TensorOptions, layout: PoolLayout) -> None:
    """Raises ValueError for an engine that this mode does not serve, with the reason and a remedy. `layout`: one that
    other modes serve.
    """
    parallel = config.parallel_config
    for split, what in SPLITS.items():
        if (count := getattr(parallel, split)) != 1:
            raise unserved(f"in this mode engines of one of them; this one has {count} {what}", OTHER_MODE)
    if config.speculative_config:
        raise unserved("in this mode engines without speculation", f"leave --speculative-config unset, or {OTHER_MODE}")
    kinds = [group.kind for group in layout.groups]
    if len(kinds) > 1 or kinds[0] not in SERVED:
        raise unserved(
            f"in this mode models whose layers all have full attention, or all MLA; this one has "
            f"{', '.join(kind.value for kind in kinds)}",
            OTHER_MODE,
        )
    if parallel.tensor_parallel_size > 1 and address_of(options.listen, 1) == options.listen:
        raise unserved(
            "in this mode engines whose ranks are found by the port of the first one; with port 0 they are not",
            "give `listen` a fixed port, with as many free ones behind it",
        )
    _check_tensors(options, layout)


def _check_tensors(options: TensorOptions, layout: PoolLayout) -> None:
    """Raises ValueError for an invalid size of tensors, or one that the store has no room for."""
    block_tokens = layout.groups[0].block_tokens
    if options.part_tokens < 1 or options.part_tokens % block_tokens or options.part_tokens % UNIT_TOKENS:
        raise unserved(
            f"parts of whole blocks of {block_tokens} tokens, and of a multiple of {UNIT_TOKENS} tokens; `part_tokens` "
            f"is {options.part_tokens}",
            "set `part_tokens` to a multiple of both, the same for both engines",
        )
    if options.layers_per_tensor < 1:
        raise unserved(
            f"tensors of one layer or more; `layers_per_tensor` is {options.layers_per_tensor}",
            "set it to 1 or more, the same for both engines",
        )
    layers = min(options.layers_per_tensor, len(layout.regions))
    nbytes = options.part_tokens // block_tokens * layers * max(region.block_bytes for region in layout.regions)
    pages, there = pages_for(nbytes, options.page_bytes), options.store_bytes // options.page_bytes
    what = (
        f"`part_tokens` {options.part_tokens} and `layers_per_tensor` {options.layers_per_tensor} take {pages} pages "
        f"of {options.page_bytes} bytes, and with `store_bytes` {options.store_bytes} there are {there}"
    )
    larger = "set `store_bytes` higher, or one of the others lower, the same for both engines"
    if pages > there:
        raise unserved(f"tensors that its store has room for; those of {what}", larger)
    if pages > there // RESERVED:
        _log.warning("tensors of %s: one that is needed may wait for others to leave. To do: %s", what, larger)
