"""The configuration of a server: one frozen value, checked once. `kvgrpc/config_sources.py` reads it."""

import math
import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvgrpc.config_errors import invalid
from kvgrpc.config_fleet import FleetConfig
from kvgrpc.config_security import IdentityConfig, TlsConfig, TokenConfig
from kvgrpc.core.policy.values import OnLoss, Rules
from kvgrpc.core.tensors.rows import TensorLimits
from kvgrpc.core.tensors.store_layout import PAGE_BYTES, PAGE_BYTES_MAX, PAGE_BYTES_MIN, PAGES_MAX, store_layout
from kvgrpc.core.values.layout import LAYERS_MAX, Group, GroupKind, PoolLayout, uniform_layout
from kvgrpc.core.values.limits import Limits
from kvgrpc.core.values.networks import PrivateNetworks, is_loopback, is_named, unreadable
from kvgrpc.errors import InvalidRequest, KVGrpcError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}
HOST = "host"
_DEVICE = re.compile(rf"{HOST}|cuda:(0|[1-9][0-9]{{0,2}})")
DATA_PATHS = ("shm", "cma", "nixl", "cuda_vmm", "collective")
"""Data paths to choose from, best first; cuda_vmm comes after nixl, because no GPU has run it yet."""
WINDOW = "window"
"""Data path in place of shm that shows no peer the pool; only for operators who name it."""
WHOLE_POOL = frozenset({"shm", "cma", "nixl", "cuda_vmm"})
"""Data paths by which a peer reaches the whole pool."""
COPY_THREADS_MAX, RING_SPANS_MAX = 256, 100_000
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
NAMES_BYTES_MAX = 140
"""Maximum size of engine id and address together, in bytes: a grant carries both twice and has at most 512 bytes."""
SOCKET_PATH_BYTES_MAX = 107
"""Maximum size of a unix socket's path that the kernel takes, in bytes."""


@dataclass(frozen=True)
class PoolConfig:
    """The embedded pool: one group of full attention, K and V of a layer packed in a block."""

    layers: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    block_tokens: int = 16
    blocks: int = 512
    dtype: str = "float16"
    device: str = HOST
    """Memory of the pool: the host's, or a GPU's, as "cuda:0"."""

    def layout(self) -> PoolLayout:
        """Returns the layout, with one region for each layer. Raises InvalidRequest."""
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "blocks"):
            most = LAYERS_MAX if name == "layers" else (1 << 31) - 1
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
                raise invalid(f"pool.{name}", f"is a whole number from 1 to {most}")
        if self.dtype not in DTYPE_BYTES:
            raise invalid("pool.dtype", f"{self.dtype} is not one of {', '.join(DTYPE_BYTES)}")
        if not _DEVICE.fullmatch(str(self.device)):
            raise invalid("pool.device", f"{self.device!r} is neither {HOST} nor a GPU such as cuda:0")
        shape = self.kv_heads, self.head_dim, self.dtype
        group = Group("full", GroupKind.FULL_ATTENTION, self.layers, self.block_tokens, self.blocks, *shape)
        per_layer = 2 * self.block_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return uniform_layout(group, per_layer)


@dataclass(frozen=True)
class SchedulerConfig:
    """The policy settings of SchedulerService."""

    on_loss: str = "fail"
    recompute_threshold_tokens: int = 64
    prefill_backoff_tokens: int = 0
    layers_per_part: int = 0
    staged: bool = False

    def rules(self, groups: tuple[Group, ...]) -> Rules:
        most = max((group.layers for group in groups), default=0)
        step = self.layers_per_part
        ranges = tuple([(first, min(step, most - first)) for first in range(0, most, step)] if step else ())
        counts = self.recompute_threshold_tokens, self.prefill_backoff_tokens
        return Rules(groups, OnLoss(self.on_loss), *counts, ranges, self.staged)

    def check(self) -> None:
        """Raises InvalidRequest for a wrong field."""
        known = [value.value for value in OnLoss]
        if self.on_loss not in known:
            raise invalid("scheduler.on_loss", f"{self.on_loss!r} is not one of {', '.join(known)}")
        for name in ("recompute_threshold_tokens", "prefill_backoff_tokens", "layers_per_part"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise invalid(f"scheduler.{name}", "is a whole number from 0")
        if not isinstance(self.staged, bool):
            raise invalid("scheduler.staged", "is yes or no")


@dataclass(frozen=True)
class TensorsConfig:
    """The staging store of named tensors."""

    store_bytes: int = 0
    """Size of the embedded pool as a store, in bytes; 0: the pool is as `pool` says."""
    page_bytes: int = PAGE_BYTES
    spill_bytes: int = 0
    """Size of the memory outside the store, in bytes, for tensors that nobody has asked for."""
    known: int = TensorLimits.tensors
    waits: int = TensorLimits.waits

    def limits(self, spill_pages: int, limits: Limits) -> TensorLimits:
        times = limits.allocation_ttl_s, limits.lease_cap_s
        own = self.known, self.waits
        return TensorLimits(*own, limits.tombstones, limits.registration_timeout_s, spill_pages, *times)

    def layout(self) -> PoolLayout | None:
        """Returns the layout of the embedded store, if there is one. Raises InvalidRequest."""
        return store_layout(self.store_bytes, self.page_bytes) if self.store_bytes else None

    def check(self) -> None:
        """Raises InvalidRequest for a wrong field."""
        for item in fields(self):
            value, least = getattr(self, item.name), 0 if item.name in ("store_bytes", "spill_bytes") else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise invalid(f"tensors.{item.name}", f"is a whole number from {least}")
        try:
            store_layout(self.store_bytes or self.page_bytes, self.page_bytes)
        except InvalidRequest as error:
            (wrong,) = error.violations
            raise invalid(f"tensors.{wrong.field}", wrong.description) from error
        # Without a store of its own the server has an engine's, whose page size it does not know yet.
        smallest, largest = (self.page_bytes,) * 2 if self.store_bytes else (PAGE_BYTES_MIN, PAGE_BYTES_MAX)
        if self.spill_bytes and not smallest <= self.spill_bytes <= PAGES_MAX * largest:
            raise invalid("tensors.spill_bytes", f"is 0, or from {smallest} to {PAGES_MAX * largest}: whole pages")


@dataclass(frozen=True)
class Config:
    """A server's configuration."""

    listen: str = "127.0.0.1:50051"
    """Address to bind; port 0 takes a free one."""
    admin_listen: str = ""
    """Address to bind for AdminService, reflection and channelz alone; empty: they answer at `listen`."""
    advertise: str = ""
    """Address that grants name and peers dial. Derived from `listen` when empty and `listen` names an interface."""
    engine_id: str = ""
    """Id of the engine; empty: a random one."""
    weights_revision: str = ""
    pool: PoolConfig | None = field(default_factory=PoolConfig)
    """The embedded pool, used while no engine is attached. None: the server waits for an engine."""
    data_paths: tuple[str, ...] = DATA_PATHS
    """Data paths to use, best first."""
    copy_threads: int = 2
    """Number of threads that copy for shm and cma."""
    shared_dir: str = ""
    """Path of a folder where ranks of this host meet whose network namespaces differ; empty: none."""
    bandwidth_limit_bytes_per_s: float | None = None
    dial_allow: tuple[str, ...] = ("127.0.0.0/8", "::1/128", "localhost")
    """Hosts and networks that this server may dial: a grant names an address, and any caller may bring a grant."""
    private_networks: tuple[str, ...] = ()
    """Hosts and networks on which KV may travel in plain text while the server has TLS."""
    session_socket: str = ""
    """Path of the unix socket where an engine attaches; empty: none."""
    exit_with_engine: bool = False
    """True when the server ends with its engine, or if none comes: for a lead that an engine started for itself."""
    metrics: str = ""
    """Address of the HTTP endpoint for metrics and probes; empty: none."""
    ready_file: str = ""
    """Path of a file that gets the address when the server serves."""
    read_blocks: bool = False
    """True when ReadBlocks hands out bytes."""
    insecure: bool = False
    """True when a bind off loopback without TLS is allowed."""
    source_writes: bool = False
    """True when this server writes what it pushes over nixl, instead of letting its destinations read."""
    checksums: bool = False
    """True when this server compares each received block with its source before the block counts."""
    drain_s: float = 10.0
    """Time that SIGTERM leaves to work in progress, in seconds."""
    log_level: str = "info"
    log_format: str = "text"
    trace_ring_spans: int = 0
    """Number of spans that ended last, which the server keeps for ListSpans; 0: it keeps none."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tensors: TensorsConfig = field(default_factory=TensorsConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    identity: IdentityConfig = field(default_factory=IdentityConfig)
    tokens: TokenConfig = field(default_factory=TokenConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises InvalidRequest for the first wrong field, by its name."""
        self._check_addresses()
        self._check_networks()
        known = (*DATA_PATHS, WINDOW)
        unknown = [name for name in self.data_paths if name not in known]
        if unknown or not self.data_paths or len(set(self.data_paths)) < len(self.data_paths):
            named = ", ".join(self.data_paths) or "none"
            raise invalid("data_paths", f"{named}: choose from {', '.join(known)}, each once")
        opened = [name for name in self.data_paths if name in WHOLE_POOL]
        if WINDOW in self.data_paths and opened:
            raise invalid("data_paths", f"{WINDOW} hides the pool; {', '.join(opened)} would give them all of it")
        for name, least, most in (("copy_threads", 1, COPY_THREADS_MAX), ("trace_ring_spans", 0, RING_SPANS_MAX)):
            if not least <= getattr(self, name) <= most:
                raise invalid(name, f"is a whole number from {least} to {most}")
        limit = self.bandwidth_limit_bytes_per_s
        if limit is not None and not 0 < limit < math.inf:
            raise invalid("bandwidth_limit_bytes_per_s", "is positive, or left out")
        if not 0 <= self.drain_s < math.inf:
            raise invalid("drain_s", "is not negative")
        for name, choices in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS)):
            if getattr(self, name) not in choices:
                raise invalid(name, f"is one of {', '.join(choices)}")
        if self.ready_file and not Path(self.ready_file).parent.is_dir():
            raise invalid("ready_file", f"{self.ready_file} lies in no folder that there is")
        self._check_limits()
        self.scheduler.check()
        self.identity.check()
        self.tokens.check()
        self._check_fleet()
        self._check_pool()
        self._check_session()

    def _check_addresses(self) -> None:
        for name in ("listen", "admin_listen", "metrics"):
            if name != "listen" and not getattr(self, name):
                continue
            host, _ = split_address(getattr(self, name), name)
            if not self.tls.given and not is_loopback(host) and not self.insecure:
                raise invalid(name, f"{host} is not loopback and the server has no TLS: set tls.dir, or insecure")
        if self.advertise:
            split_address(self.advertise, "advertise")
        if len(f"{self.engine_id}{self.advertise or self.listen}".encode(errors="replace")) > NAMES_BYTES_MAX:
            raise invalid("engine_id", f"has, with the address that peers dial, at most {NAMES_BYTES_MAX} bytes")

    def _check_networks(self) -> None:
        for name in ("dial_allow", "private_networks"):
            if wrong := unreadable(getattr(self, name)):
                raise invalid(name, f"{wrong!r} is neither a host nor a network such as 10.0.0.0/8")

    def _check_limits(self) -> None:
        for limit in fields(Limits):
            value, whole = getattr(self.limits, limit.name), isinstance(limit.default, int)
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise invalid(f"limits.{limit.name}", f"is a positive {'whole ' if whole else ''}number")

    def _check_pool(self) -> None:
        self.tensors.check()
        if self.pool is not None:
            self.pool.layout()
        elif self.tensors.store_bytes:
            why = "makes the embedded pool a store; leave it out where the server has no embedded pool"
            raise invalid("tensors.store_bytes", why)

    def _check_fleet(self) -> None:
        self.fleet.check()
        if self.fleet.certificate_name and not self.tls.given:
            raise invalid("fleet.certificate_name", "needs TLS: set tls.dir")
        for field_name, named in (("registry", self.fleet.members), ("addresses", self.fleet.published_addresses)):
            for address in named:
                _, port = split_address(address, f"fleet.{field_name}")
                if not port:
                    raise invalid(f"fleet.{field_name}", f"{address!r} has no port")

    def _check_session(self) -> None:
        if self.exit_with_engine and not self.session_socket:
            raise invalid("exit_with_engine", "needs a session_socket: without one no engine attaches")
        if len(os.fsencode(self.session_socket)) > SOCKET_PATH_BYTES_MAX:
            raise invalid("session_socket", f"has at most {SOCKET_PATH_BYTES_MAX} bytes")

    def layout(self) -> PoolLayout | None:
        """Returns the layout of the embedded pool; None: there is none. Raises InvalidRequest."""
        return self.tensors.layout() or (self.pool.layout() if self.pool is not None else None)

    def networks(self) -> PrivateNetworks:
        """Returns the networks for data paths that do not encrypt. Without TLS all of them may be used."""
        return PrivateNetworks(self.private_networks) if self.tls.given else PrivateNetworks()

    def may_dial(self, address: str) -> bool:
        """Returns whether `address` (host:port) is on the dial list."""
        try:
            host, port = split_address(address, "address")
        except KVGrpcError:
            return False
        return port > 0 and is_named(host, self.dial_allow)


def split_address(address: str, field_name: str) -> tuple[str, int]:
    """Returns host and port of `host:port` or `[v6]:port`. Raises InvalidRequest."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 65536):
        raise invalid(field_name, f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


TABLES: dict[str, type[Any]] = {
    "pool": PoolConfig,
    "scheduler": SchedulerConfig,
    "tensors": TensorsConfig,
    "tls": TlsConfig,
    "identity": IdentityConfig,
    "tokens": TokenConfig,
    "fleet": FleetConfig,
    "limits": Limits,
}
"""Settings that are tables, by name."""
