"""Settings of the connectors that come with vLLM, each with the setting that does the same here.

A stated setting is obeyed or refused, never ignored: an engine that would do something else than its configuration says
does not start, and says what to set. An engine only warns of environment variables, which engines with other connectors
may share.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum


class Place(Enum):
    """The place in which a setting is stated."""

    KEY = "kv_connector_extra_config"
    FIELD = "--kv-transfer-config"
    VARIABLE = "environment"


class Fate(Enum):
    """The reaction of an engine to a stated setting."""

    OBEYED = "obeys"
    REFUSED = "does not start"
    WARNED = "warns"


@dataclass(frozen=True)
class OldSetting:
    """A setting of one of vLLM's connectors."""

    name: str
    place: Place
    fate: Fate
    ours: str
    """The setting that does the same here, as text."""
    default: object = None
    """Value that a field has in vLLM if it is not stated."""
    blocks_only: bool = False
    """True if `ours` is no key of the mode that moves tensors in place of blocks."""

    def ours_in(self, mode: str) -> str:
        """Returns the setting that does the same in a mode."""
        return "nothing in this mode" if self.blocks_only and mode == TENSORS else self.ours


TENSORS = "tensors"
"""Name of the mode that moves no blocks."""
_SPILL = "`KVGRPC_TENSORS_SPILL_BYTES` in the environment"
_REGISTRATION = "`KVGRPC_LIMITS_REGISTRATION_TIMEOUT_S` in the environment"
OLD_SETTINGS = (
    OldSetting("kv_lease_duration", Place.KEY, Fate.REFUSED, "`ttl_s`"),
    OldSetting("kv_recompute_threshold", Place.KEY, Fate.REFUSED, "`recompute_threshold_tokens`", blocks_only=True),
    OldSetting("bidirectional_kv_xfer", Place.KEY, Fate.REFUSED, "`offer_ttl_s`, above 0", blocks_only=True),
    OldSetting("decoder_kv_blocks_ttl", Place.KEY, Fate.REFUSED, "`offer_ttl_s`", blocks_only=True),
    OldSetting("push_registration_timeout", Place.KEY, Fate.REFUSED, _REGISTRATION),
    OldSetting("backends", Place.KEY, Fate.REFUSED, "`data_paths`"),
    OldSetting("num_threads", Place.KEY, Fate.REFUSED, "`copy_threads`", blocks_only=True),
    OldSetting("engine_ttl", Place.KEY, Fate.REFUSED, "nothing: what is kept of a peer ends with it"),
    OldSetting(
        "enforce_handshake_compat", Place.KEY, Fate.REFUSED, "`weights_revision`, the same at engines that fit together"
    ),
    OldSetting("send_type", Place.KEY, Fate.REFUSED, '`send`, in small letters, with `"mode": "tensors"`'),
    OldSetting("mem_pool_size_gb", Place.KEY, Fate.REFUSED, f'{_SPILL}, with `"mode": "tensors"`'),
    OldSetting("nccl_num_channels", Place.KEY, Fate.REFUSED, "`NCCL_MAX_NCHANNELS` in the environment"),
    OldSetting("proxy_ip", Place.KEY, Fate.OBEYED, "`proxy_ip`"),
    OldSetting("proxy_port", Place.KEY, Fate.OBEYED, "`proxy_port`"),
    OldSetting("http_port", Place.KEY, Fate.OBEYED, "`http_port`"),
    OldSetting("kv_role", Place.FIELD, Fate.OBEYED, "as what an engine registers with a proxy, and vLLM itself"),
    OldSetting("engine_id", Place.FIELD, Fate.OBEYED, "the engine's name to peers"),
    OldSetting(
        "kv_load_failure_policy", Place.FIELD, Fate.OBEYED,
        "`on_loss`; `recompute` is obeyed, and `fail`, which vLLM has by default, asks for nothing",
    ),
    OldSetting(
        "kv_buffer_device", Place.FIELD, Fate.OBEYED,
        "`mirror`; `cpu` where the cache is on a device is obeyed as that, and a third device is refused",
    ),
    OldSetting("kv_buffer_size", Place.FIELD, Fate.REFUSED, '`store_bytes`, with `"mode": "tensors"`', 1e9),
    OldSetting("kv_ip", Place.FIELD, Fate.REFUSED, "`listen`", "127.0.0.1"),
    OldSetting("kv_port", Place.FIELD, Fate.REFUSED, "`listen`", 14579),
    OldSetting("kv_rank", Place.FIELD, Fate.REFUSED, "nothing: engines have names, and any number of peers"),
    OldSetting("kv_parallel_size", Place.FIELD, Fate.REFUSED, "nothing: engines have any number of peers", 1),
    OldSetting(
        "enable_permute_local_kv", Place.FIELD, Fate.OBEYED,
        "nothing: blocks in the order of heads and of tokens are bridged, whatever it says",
    ),
    OldSetting("VLLM_NIXL_SIDE_CHANNEL_HOST", Place.VARIABLE, Fate.WARNED, "`listen`"),
    OldSetting("VLLM_NIXL_SIDE_CHANNEL_PORT", Place.VARIABLE, Fate.WARNED, "`listen`"),
    OldSetting("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", Place.VARIABLE, Fate.WARNED, "`ttl_s`"),
    OldSetting("VLLM_KV_CACHE_LAYOUT", Place.VARIABLE, Fate.OBEYED, "the same: vLLM reads it"),
    OldSetting("VLLM_SSM_CONV_STATE_LAYOUT", Place.VARIABLE, Fate.OBEYED, "the same, at both engines: vLLM reads it"),
)  # fmt: skip


def check_keys(unknown: Collection[str], mode: str) -> None:
    """Raises ValueError for keys that this connector does not know in that mode."""
    if not unknown:
        return
    old = {row.name: row for row in OLD_SETTINGS if row.place is Place.KEY and row.fate is Fate.REFUSED}
    to_do = "".join(f". In place of {name} set {old[name].ours_in(mode)}" for name in sorted(unknown) if name in old)
    names = ", ".join(sorted(unknown))
    raise ValueError(f'{Place.KEY.value}: with "mode": "{mode}" kvgrpc knows no {names}{to_do}')


def check_fields(transfer: object) -> None:
    """Raises ValueError for a field of vLLM's configuration that would be ignored."""
    for row in OLD_SETTINGS:
        if row.place is not Place.FIELD or row.fate is not Fate.REFUSED:
            continue
        stated = getattr(transfer, row.name, row.default)
        if stated != row.default:
            raise ValueError(
                f"{Place.FIELD.value}: {row.name} is {stated!r}, which kvgrpc does not read. Leave it out; in its "
                f"place set {row.ours}"
            )


def passes_host(transfer: object, device: str, mirror: bool | None) -> bool:
    """Returns whether bytes move through host memory: by `mirror` if that is stated, or because vLLM's configuration
    has its buffer there. `device`: where vLLM computes. Raises ValueError if the two contradict each other, and for a
    buffer that is neither in host memory nor on the device.
    """
    buffer = getattr(transfer, "kv_buffer_device", device)
    if buffer not in {device, "cpu"}:
        raise ValueError(
            f"{Place.FIELD.value}: kv_buffer_device is {buffer!r}, and the cache is on {device}. Leave it out, or set "
            'it to "cpu" for a mirror in memory of the host'
        )
    on_host = buffer != device
    if on_host and mirror is False:
        raise ValueError(
            f"{Place.FIELD.value}: kv_buffer_device is {buffer!r}, and `mirror` in {Place.KEY.value} false: set one"
        )
    return bool(mirror) or on_host


_PREFIX = "VLLM_NIXL_"
"""Prefix of variables that only connectors of vLLM read."""


def not_read(environment: Mapping[str, str]) -> list[str]:
    """Returns a warning for each variable that is set and not read."""
    known = {row.name: row for row in OLD_SETTINGS if row.place is Place.VARIABLE}
    found = []
    for name in environment:
        if name in known:
            if known[name].fate is Fate.WARNED:
                found.append(f"{name} is set, which kvgrpc does not read. In its place set {known[name].ours}")
        elif name.startswith(_PREFIX):
            found.append(f"{name} is set, which kvgrpc does not read, and has nothing in place of")
    return found
