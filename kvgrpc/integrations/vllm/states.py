"""Sections of vLLM's states, and how ranks share them.

A state is a convolution's last inputs, and what the recurrence keeps. The inputs are of several projections, and every
rank has its share of each. So a rank's bytes are no slice of the model's, but slices of each section.
"""

from math import prod
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from kvgrpc.core.values.layout import Section

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAMBA2, GATED_DELTA = "MAMBA2", "GDN_ATTN"
"""Kinds of states whose sections are known, by vLLM's own names."""
GROUPS = "mamba_n_groups", "n_groups", "mamba_ngroups"
"""Names that models give the number of their groups of heads; a group shares the projections B and C."""


def sections_of(config: "VllmConfig", spec: Any) -> tuple[Section, ...]:
    """Returns the sections of a rank's state; empty if they are not known."""
    kind = getattr(spec.mamba_type, "name", "")
    if kind not in {MAMBA2, GATED_DELTA} or len(spec.shapes) != 2 or spec.tp_replicated:
        return ()
    inputs, (heads, head_dim, state_size) = spec.shapes
    width, rows = inputs if is_conv_state_dim_first() else inputs[::-1]
    common, odd = divmod(width - heads * head_dim, 2)
    if odd or common <= 0:
        return ()
    ranks = config.parallel_config.tensor_parallel_size
    copies = 1 if kind == GATED_DELTA else _copies(config, common, state_size, ranks)
    if not copies:
        return ()
    own, shared = (heads * head_dim, ranks), (common, ranks // copies)
    widths = [own, shared, shared] if kind == MAMBA2 else [shared, shared, own]
    item_bytes, kept_bytes = (dtype.itemsize for dtype in spec.dtypes)
    if is_conv_state_dim_first():
        made = [Section(count * rows * item_bytes, count * rows * item_bytes * shares) for count, shares in widths]
    else:
        made = [Section(count * item_bytes, count * item_bytes * shares) for count, shares in widths] * rows
    nbytes = prod(spec.shapes[1]) * kept_bytes
    return (*made, Section(nbytes, nbytes * ranks))


def _copies(config: "VllmConfig", common: int, state_size: int, ranks: int) -> int:
    """Returns how many ranks have the same groups, with `common` elements on each: a lone group of a model is on every
    rank. 0: not known, since the model does not say how many groups it has, or there are no whole ones.
    """
    groups, rest = divmod(common, state_size)
    if rest:
        return 0
    if groups > 1 or ranks == 1:
        return 1
    model = config.model_config.hf_text_config
    total = next((getattr(model, name) for name in GROUPS if getattr(model, name, None)), None)
    return 0 if total is None else ranks // min(total, ranks)
