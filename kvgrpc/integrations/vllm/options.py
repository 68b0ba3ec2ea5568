"""What vLLM is told about kvgrpc."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from kvgrpc.core.policy.values import Mode, OnLoss
from kvgrpc.integrations.derived_keys import read_secret
from kvgrpc.integrations.old_settings import check_fields, check_keys, passes_host
from kvgrpc.integrations.params import Defaults
from kvgrpc.integrations.vllm.registering import Proxy

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

_log = logging.getLogger(__name__)

PORT_MAX = 65_535


@dataclass(frozen=True)
class Options:
    """`kv_connector_extra_config`, with what vLLM itself is told."""

    defaults: Defaults
    on_loss: OnLoss = OnLoss.RECOMPUTE
    step_tokens: int = 2048
    """Tokens that steps compute which are not over."""
    listen: str = "127.0.0.1:0"
    """Where the lead serves peers and routers. Of each replica of a data-parallel engine, at the port after the last
    one's.
    """
    data_paths: tuple[str, ...] = ("cma", "nixl", "cuda_vmm", "collective")
    serve_flags: tuple[str, ...] = ()
    """More flags of `kvgrpc serve` for the lead: --advertise, --dial-allow, --config."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits of the lead that are others than its defaults, by name."""
    recompute_threshold_tokens: int = 64
    layers_per_part: int = 0
    """Pushes hand over so many layers at once, as soon as they are computed; 0: all."""
    mirror: bool = False
    """No data path reaches the cache: each worker keeps a mirror of it in host memory."""
    copy_threads: int = 1
    weights_revision: str = ""
    pairing_secret_file: str = ""
    """Where the secret is that both engines share: command lines are shown, and vLLM logs its own. Empty: nowhere."""
    proxy_ip: str = ""
    """With `proxy_port`: where a proxy listens for engines, with which this one registers. Empty: it does not."""
    proxy_port: int = 0
    http_port: int = 0
    """Where vLLM serves: what the proxy is told."""

    @property
    def lead_flags(self) -> tuple[str, ...]:
        """Of `kvgrpc serve`."""
        limits = [word for name, value in self.limits.items() for word in ("--limit", f"{name}={value}")]
        return ("--data-paths", ",".join(self.data_paths), *limits, *self.serve_flags)

    @classmethod
    def of(cls, config: "VllmConfig") -> "Options":
        """Raises ValueError for what is unknown, or wrong."""
        transfer = config.kv_transfer_config
        stated: dict[str, Any] = dict(transfer.kv_connector_extra_config or {})
        stated.pop("on_loss", None)  # `choose_policy` has told vLLM
        model = config.model_config
        defaults = Defaults(
            Mode(stated.pop("mode", "auto")),
            stated.pop("ttl_s", None),
            stated.pop("firm_ttl_s", None),
            float(stated.pop("offer_ttl_s", 0.0)),
            read_secret(stated.get("pairing_secret_file", "")),
        )
        fields: dict[str, Any] = {
            "on_loss": OnLoss(transfer.kv_load_failure_policy),
            "step_tokens": config.max_in_flight_tokens,
            "weights_revision": f"{model.model}@{model.revision or ''}",
            **{name: tuple(value) if isinstance(value, list) else value for name, value in stated.items()},
        }
        check_keys(fields.keys() - cls.__dataclass_fields__.keys(), defaults.mode.value)
        check_fields(transfer)
        fields["mirror"] = passes_host(transfer, current_platform.device_type, fields.get("mirror"))
        fields |= {name: int(fields[name]) for name in ("proxy_port", "http_port") if name in fields}
        replica = config.parallel_config.data_parallel_index
        made = cls(defaults, **fields)
        made.proxy_of(config)
        return made if not replica else replace(made, listen=_listen_of(made, replica))

    def proxy_of(self, config: "VllmConfig") -> Proxy | None:
        """With which this engine registers; None: with none. Raises ValueError."""
        return Proxy.of(config.kv_transfer_config, self.proxy_ip, self.proxy_port, self.http_port)


def choose_policy(transfer: "KVTransferConfig") -> None:
    """Tells vLLM what becomes of requests whose KV does not come: what `on_loss` says, and without it they are computed
    here. VLLM's own key for that is `fail` unless it is set, and nothing says which of the two it was. VLLM reads it
    once it has made its connector.

    Raises ValueError for a policy that there is not, and where both keys are set and differ.
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


def _listen_of(options: Options, replica: int) -> str:
    """Where the lead of another replica than the first serves: vLLM gives all of them one configuration. Raises
    ValueError.
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
    """Leads that this process starts export to where vLLM does, and as vLLM does: without TLS, unless the endpoint is
    https or the environment says otherwise.
    """
    if endpoint := config.observability_config.otlp_traces_endpoint:
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
        if "OTEL_EXPORTER_OTLP_INSECURE" not in os.environ:
            os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "true")
