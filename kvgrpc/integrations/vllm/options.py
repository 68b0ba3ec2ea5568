"""Options: what vLLM's configuration says about kvgrpc."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from vllm.platforms import current_platform

from kvgrpc.core.policy.values import ModeChoice, OnLoss, Rules
from kvgrpc.core.values.layout import GroupKind, PoolLayout
from kvgrpc.integrations.across import TOKENS_BACK
from kvgrpc.integrations.derived_keys import read_secret
from kvgrpc.integrations.old_settings import check_fields, check_keys, passes_host
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.proxy_registration import Proxy

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

_log = logging.getLogger(__name__)

PORT_MAX = 65_535


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The settings of `kv_connector_extra_config` that all modes have, with related settings of vLLM itself."""

    on_loss: OnLoss = OnLoss.RECOMPUTE
    listen: str = "127.0.0.1:0"
    """Address at which the lead serves peers and routers, or the first one of several leads. Each replica of a
    data-parallel engine takes the port after the last one's, and so does each rank that has a lead of its own.
    """
    data_paths: tuple[str, ...] = ()
    serve_flags: tuple[str, ...] = ()
    """More flags of `kvgrpc serve` for the lead: --advertise, --dial-allow, --config."""
    weights_revision: str = ""
    pairing_secret_file: str = ""
    """File with the secret that both engines share: command lines are shown, and vLLM logs its own. Empty: none."""
    proxy_ip: str = ""
    """IP address of the proxy with which this engine registers, at `proxy_port`; empty: it does not register."""
    proxy_port: int = 0
    http_port: int = 0
    """Port at which vLLM serves, as the proxy is told."""

    def proxy_of(self, config: "VllmConfig") -> Proxy | None:
        """Returns the proxy with which this engine registers; None: it does not register. Raises ValueError."""
        return Proxy.of(config.kv_transfer_config, self.proxy_ip, self.proxy_port, self.http_port)

    @classmethod
    def _made(cls, config: "VllmConfig", mode: str, stated: dict[str, Any], **more: Any) -> Self:
        """Makes the options of what is `stated` in a configuration, and of `more`, which a mode reads by itself. Raises
        ValueError for unknown and invalid ones.
        """
        transfer, model = config.kv_transfer_config, config.model_config
        stated.pop("on_loss", None)  # `choose_policy` has told vLLM
        check_keys(stated.keys() - ({of.name for of in fields(cls)} - more.keys()), mode)
        check_fields(transfer)
        found: dict[str, Any] = {
            "on_loss": OnLoss(transfer.kv_load_failure_policy),
            "weights_revision": f"{model.model}@{model.revision or ''}",
            **{name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()},
        }
        found |= {name: int(found[name]) for name in ("proxy_port", "http_port") if name in found}
        made = cls(**more, **found)
        made.proxy_of(config)
        return made


@dataclass(frozen=True, kw_only=True)
class BlockOptions(SharedOptions):
    """The settings of an engine that moves blocks."""

    defaults: Defaults = field(default_factory=Defaults)
    step_tokens: int = 2048
    """Maximum number of tokens that unfinished steps compute."""
    data_paths: tuple[str, ...] = ("cma", "nixl", "cuda_vmm", "collective")
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits of the lead that differ from its defaults, by name."""
    recompute_threshold_tokens: int = 64
    layers_per_part: int = 0
    """Number of layers that pushes hand over at once, as soon as they are computed; 0: all."""
    mirror: bool = False
    """True if no data path reaches the cache: each worker keeps a mirror of it in host memory."""
    copy_threads: int = 1
    across_engines: bool = False
    """True if this engine exchanges KV with engines of other programs, and with vLLM's that are set so, alone."""

    @property
    def lead_flags(self) -> tuple[str, ...]:
        limits = [word for name, value in self.limits.items() for word in ("--limit", f"{name}={value}")]
        return ("--data-paths", ",".join(self.data_paths), *limits, *self.serve_flags)

    def rules(self, layout: PoolLayout) -> Rules:
        """Returns the rules by which an engine with this pool gives and takes."""
        count, layers = self.layers_per_part, max(group.layers for group in layout.groups)
        ranges = tuple((first, min(count, layers - first)) for first in range(0, layers, count)) if count else ()
        back = TOKENS_BACK if self.across_engines else int(any(of.kind is GroupKind.STATE for of in layout.groups))
        return Rules((), self.on_loss, self.recompute_threshold_tokens, backoff_tokens=back, layer_ranges=ranges)

    @classmethod
    def of(cls, config: "VllmConfig") -> "BlockOptions":
        """Reads the options of an engine. Raises ValueError for unknown and invalid ones."""
        transfer = config.kv_transfer_config
        stated: dict[str, Any] = dict(transfer.kv_connector_extra_config or {})
        defaults = Defaults(
            ModeChoice(stated.pop("mode", "auto")),
            stated.pop("ttl_s", None),
            stated.pop("firm_ttl_s", None),
            float(stated.pop("offer_ttl_s", 0.0)),
            read_secret(stated.get("pairing_secret_file", "")),
        )
        stated["mirror"] = passes_host(transfer, current_platform.device_type, stated.get("mirror"))
        stated.setdefault("step_tokens", config.max_in_flight_tokens)
        made = cls._made(config, defaults.mode.value, stated, defaults=defaults)
        replica = config.parallel_config.data_parallel_index
        return made if not replica else replace(made, listen=_listen_of(made, replica))


def choose_policy(transfer: "KVTransferConfig") -> None:
    """Tells vLLM what becomes of requests whose KV does not come: what `on_loss` says, and without it they are computed
    here. The key of vLLM itself is `fail` if it is not set, and nothing says whether it was. vLLM reads that key once
    it has made its connector.

    Raises ValueError for an unknown policy, and if both keys are set and differ.
    """
    stated, own = (transfer.kv_connector_extra_config or {}).get("on_loss"), OnLoss(transfer.kv_load_failure_policy)
    chosen = OnLoss(stated or OnLoss.RECOMPUTE)
    if own is OnLoss.RECOMPUTE and chosen is not own:
        raise ValueError(
            f'kv_connector_extra_config: on_loss is "{chosen.value}", and kv_load_failure_policy "{own.value}": set one'
        )
    if chosen is not own:
        _log.info('kvgrpc: what does not come is computed here; "on_loss": "fail" makes it fail')
    transfer.kv_load_failure_policy = chosen.value


def _listen_of(options: BlockOptions, replica: int) -> str:
    """Returns the address at which the lead of a later replica serves: vLLM gives all replicas one configuration.
    Raises ValueError.
    """
    host, colon, port = options.listen.rpartition(":")
    first = int(port) if colon and port.isdecimal() else PORT_MAX
    following = first + replica if first else 0
    if following > PORT_MAX:
        raise ValueError(
            f"listen: {options.listen} leaves no port for replica {replica} of this data-parallel engine; write "
            f"host:port with a port of {PORT_MAX - replica} at most, or 0"
        )
    words = [word for flag in options.serve_flags for word in flag.split("=", 1)]
    for flag, value in pairwise([*words, ""]):
        if flag == "--advertise" and value.rpartition(":")[2] != "0":
            raise ValueError(
                f"serve_flags: every replica of a data-parallel engine would say that it serves at {value}; write port "
                "0 there, which means the port of each one's own `listen`"
            )
    return f"{host}:{following}"


def export_traces(config: "VllmConfig") -> None:
    """Makes leads of this process export traces to where vLLM does, and as vLLM does: without TLS, unless the endpoint
    is https or the environment says otherwise.
    """
    if endpoint := config.observability_config.otlp_traces_endpoint:
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
        if "OTEL_EXPORTER_OTLP_INSECURE" not in os.environ:
            os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "true")
