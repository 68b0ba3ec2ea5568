"""SGLang's KV cache as a pool.

SGLang gives addresses: of each layer's keys, of each layer's values, and of aux, by which SGLang means what decode must
know of a request beside its KV, such as the first token. Keys and values lie in pages, whose ids are the same on all
ranks. Aux is a row of several arrays for each request, and so are states of linear attention.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.layout import ITEM_BYTES, WHOLE, Group, GroupKind, PoolLayout, Region, TensorKind

AUX = "aux"
TYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}
"""Types of KV by SGLang's own names."""
ROW_TOKENS = 1 << 30
"""Tokens of a block of aux, more than any request has."""
OTHER = "serve this model with another back end"
ROWS = frozenset({"mamba"})
"""Kinds of state, by SGLang's own names, of which a request has one row."""


@dataclass(frozen=True)
class Heads:
    """The KV heads of a model: those of each rank, and all of them. Neighbouring ranks have the same head if there are
    fewer heads than ranks.
    """

    per_rank: int
    total: int
    dim: int


@dataclass(frozen=True)
class PageMemory:
    """A rank's pool and its memory, in the order of the pool's offsets. Groups are KV, aux, and then states; across
    engines KV alone.
    """

    layout: PoolLayout
    arrays: tuple[NDArray[np.uint8], ...]


class _Builder:
    """Lays one buffer after the other."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.regions: list[Region] = []
        self.arrays: list[NDArray[np.uint8]] = []
        self._end = 0

    def add(self, layer: int, tensor: TensorKind, address: int, nbytes: int, item_bytes: int) -> None:
        """Adds the blocks of one layer of the group that is added next."""
        self.regions.append(Region(len(self.groups), layer, 1, self._end, item_bytes, item_bytes, tensor))
        self.arrays.append(_bytes_at(address, nbytes))
        self._end += nbytes

    def rows(
        self, name: str, addresses: Sequence[int], nbytes: Sequence[int], item_bytes: Sequence[int], *,
        everywhere: bool = False,
    ) -> None:  # fmt: skip
        """Adds a group of which a request has one row, of one item of each array. `everywhere`: all ranks have the
        same rows, as they have latents, so that the peer may have another number of ranks.
        """
        count = _blocks(name, nbytes, item_bytes)
        kind, tokens = (GroupKind.MLA, ROW_TOKENS) if everywhere else (GroupKind.STATE, 1)
        for layer, of in enumerate(zip(addresses, nbytes, item_bytes, strict=True)):
            self.add(layer, WHOLE[kind], *of)
        layers = len(addresses)
        self.groups.append(Group(name, kind, layers, tokens, count, 1, sum(item_bytes), "bytes"))

    def layout(self) -> PoolLayout:
        return PoolLayout(tuple(self.groups), tuple(self.regions), self._end)


def memory_of(args: Any, model_dtype: str, heads: Heads | None, *, across: bool = False) -> PageMemory:
    """Returns the memory that SGLang's KVArgs name. `model_dtype`: the type of KV for which no other is chosen.
    `heads`: None for a model with MLA. `across`: engines of other programs are peers, which have no aux.

    Raises ValueError for memory that this back end does not serve.
    """
    if args.num_draft_entries:
        raise unserved("models without a draft", "leave --speculative-algorithm unset")
    for kind in args.state_types:
        if kind.value not in ROWS:
            raise unserved(f"full attention, latents and states; this model has {kind.value}", OTHER)
    if across and (args.state_types or args.kv_cache_dtype_str not in ("auto", "bf16", "bfloat16")):
        what = "attention and KV of the model's own type with SGLANG_KVGRPC_ACROSS_ENGINES"
        raise unserved(what, "leave --kv-cache-dtype unset, or that variable")
    made = _Builder()
    _add_kv(made, args, model_dtype, heads)
    if across:
        return PageMemory(made.layout(), tuple(made.arrays))
    made.rows(AUX, args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, everywhere=True)
    for number, kind in enumerate(args.state_types):
        made.rows(
            f"{kind.value}-{number}", args.state_data_ptrs[number], args.state_data_lens[number],
            args.state_item_lens[number],
        )  # fmt: skip
    return PageMemory(made.layout(), tuple(made.arrays))


def _add_kv(made: _Builder, args: Any, model_dtype: str, heads: Heads | None) -> None:
    """Adds the pages. If a page is not of the model's heads, a rank's heads count as one."""
    latent = heads is None
    count, item_bytes = len(args.kv_data_ptrs), args.kv_item_lens[0]
    if len(set(args.kv_item_lens)) != 1 or (not latent and count % 2):
        raise unserved("layers whose keys and values are of one size", OTHER)
    dtype = model_dtype if args.kv_cache_dtype_str == "auto" else TYPES.get(args.kv_cache_dtype_str, "")
    if dtype not in ITEM_BYTES or item_bytes % (args.page_size * ITEM_BYTES[dtype]):
        raise unserved(f"KV of a known type; this one is {args.kv_cache_dtype_str}", "choose --kv-cache-dtype")
    layers = count if latent else count // 2
    for number, address in enumerate(args.kv_data_ptrs):
        part, layer = divmod(number, layers)
        tensor = TensorKind.LATENT if latent else (TensorKind.K, TensorKind.V)[part]
        made.add(layer, tensor, address, args.kv_data_lens[number], item_bytes)
    kind = GroupKind.MLA if latent else GroupKind.FULL_ATTENTION
    blocks, elements = (
        _blocks("kv", args.kv_data_lens, args.kv_item_lens),
        item_bytes // args.page_size // ITEM_BYTES[dtype],
    )
    per_rank, total = 1, 0
    if heads is not None and heads.per_rank * heads.dim == elements:
        per_rank, total = heads.per_rank, heads.total
    made.groups.append(
        Group("kv", kind, layers, args.page_size, blocks, per_rank, elements // per_rank, dtype, total_kv_heads=total)
    )


def _blocks(name: str, nbytes: Sequence[int], item_bytes: Sequence[int]) -> int:
    """Returns the number of blocks, which all arrays of a group must have."""
    counts = {whole // one for whole, one in zip(nbytes, item_bytes, strict=True)}
    if len(counts) != 1:
        raise unserved(f"arrays of equally many blocks; {name} has {sorted(counts)}", OTHER)
    return counts.pop()


def _bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Returns the host memory at an address, which SGLang keeps as long as its process lives."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), dtype=np.uint8)


def unserved(what: str, instead: str) -> ValueError:
    """Returns the error of an engine that this back end does not serve."""
    return ValueError(f"the transfer back end kvgrpc serves {what}. To do: {instead}")
