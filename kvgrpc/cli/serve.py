"""`kvgrpc serve`: one server until it is told to stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvgrpc import open_files
from kvgrpc.cli.log_format import configure as configure_log
from kvgrpc.errors import Exhausted, KVGrpcError
from kvgrpc.service.polling import poll_in_place

if TYPE_CHECKING:
    from kvgrpc.cli.reload import Reload
    from kvgrpc.config import Config
    from kvgrpc.server import Server

EXIT_CONFIG = 2
EXIT_BIND = 3
EXIT_POOL = 4
_STOPS = (signal.SIGTERM, signal.SIGINT)


_POOL_PANEL, _TLS_PANEL, _PATHS_PANEL, _ENGINE_PANEL = "Embedded pool", "TLS", "Data paths", "Attached engine"
_FLEET_PANEL = "Fleet"


def serve(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    config: Path | None = typer.Option(None, help="TOML file with any of these settings."),
    listen: str | None = typer.Option(None, help="host:port to bind; port 0 takes a free one."),
    port: int | None = typer.Option(None, help="The same as --listen 127.0.0.1:PORT."),
    admin_listen: str | None = typer.Option(
        None, help="host:port to bind for AdminService, reflection and channelz alone."
    ),
    advertise: str | None = typer.Option(None, help="host:port that peers dial, if it is another one."),
    engine_id: str | None = typer.Option(None, help="Id of the engine; by default a random one."),
    weights_revision: str | None = typer.Option(
        None, help="Revision of the model's weights. Engines with other weights exchange no KV."
    ),
    dial_allow: str | None = typer.Option(None, help="Hosts and networks that may be dialled; by default loopback."),
    private_networks: str | None = typer.Option(
        None, help="Hosts and networks on which KV may travel in plain text.", rich_help_panel=_TLS_PANEL
    ),
    read_blocks: bool | None = typer.Option(None, help="Let ReadBlocks return bytes."),
    drain_s: float | None = typer.Option(None, help="Seconds that SIGTERM leaves to transfers and leases."),
    limit: list[str] | None = typer.Option(
        None, help="A limit as NAME=VALUE, such as lease_ttl_s=60; may be repeated."
    ),
    log_level: str | None = typer.Option(None, help="debug, info, warning or error; by default info."),
    log_format: str | None = typer.Option(None, help="Form of the log's lines: text or json."),
    check: bool = typer.Option(False, "--check", help="Only check the configuration, and print it as it takes effect."),
    trace_ring_spans: int | None = typer.Option(None, help="Spans to keep for kvgrpc trace; 0: none."),
    ready_file: str | None = typer.Option(None, help="JSON file to write once the server serves."),
    metrics: str | None = typer.Option(
        None, help="host:port of the HTTP endpoint for metrics and probes, such as 127.0.0.1:9464."
    ),
    tls_dir: str | None = typer.Option(
        None, help="Folder with tls.crt, tls.key and ca.crt: mutual TLS.", rich_help_panel=_TLS_PANEL
    ),
    roles: str | None = typer.Option(None, help="TOML file with the roles of callers.", rich_help_panel=_TLS_PANEL),
    insecure: bool | None = typer.Option(
        None, help="Allow a bind off loopback without TLS.", rich_help_panel=_TLS_PANEL
    ),
    fleet_registry: str | None = typer.Option(
        None,
        help="Registry: etcd://HOST:PORT,..., file:PATH, or another one (docs/fleet.md).",
        rich_help_panel=_FLEET_PANEL,
    ),
    fleet_role: str | None = typer.Option(
        None, help="What this engine does: prefill, decode or both.", rich_help_panel=_FLEET_PANEL
    ),
    fleet_model: str | None = typer.Option(
        None, help="Name of the model, for the registry.", rich_help_panel=_FLEET_PANEL
    ),
    no_pool: bool = typer.Option(
        False, "--no-pool", help="No embedded pool: wait for an engine.", rich_help_panel=_POOL_PANEL
    ),
    layers: int | None = typer.Option(None, help="Number of layers.", rich_help_panel=_POOL_PANEL),
    kv_heads: int | None = typer.Option(None, help="Number of KV heads.", rich_help_panel=_POOL_PANEL),
    head_dim: int | None = typer.Option(None, help="Elements of a head.", rich_help_panel=_POOL_PANEL),
    block_tokens: int | None = typer.Option(None, help="Tokens of a block.", rich_help_panel=_POOL_PANEL),
    blocks: int | None = typer.Option(None, help="Number of blocks.", rich_help_panel=_POOL_PANEL),
    dtype: str | None = typer.Option(
        None, help="Data type: float16, bfloat16, float32, ...", rich_help_panel=_POOL_PANEL
    ),
    device: str | None = typer.Option(None, help="Memory: host, or a GPU such as cuda:0.", rich_help_panel=_POOL_PANEL),
    data_paths: str | None = typer.Option(
        None,
        help="Data paths to use, best first: shm,cma,nixl,cuda_vmm,collective; also window.",
        rich_help_panel=_PATHS_PANEL,
    ),
    copy_threads: int | None = typer.Option(
        None, help="Threads that copy for shm and cma.", rich_help_panel=_PATHS_PANEL
    ),
    shared_dir: str | None = typer.Option(
        None,
        help="Folder that servers in other network namespaces of this host mount, too.",
        rich_help_panel=_PATHS_PANEL,
    ),
    bandwidth_limit_bytes_per_s: float | None = typer.Option(
        None, help="Maximum rate of what this server moves.", rich_help_panel=_PATHS_PANEL
    ),
    source_writes: bool | None = typer.Option(
        None, help="Write pushes over nixl, in place of reads by the destination.", rich_help_panel=_PATHS_PANEL
    ),
    checksums: bool | None = typer.Option(
        None, help="Compare each received block with its source, by CRC-32C.", rich_help_panel=_PATHS_PANEL
    ),
    session_socket: str | None = typer.Option(
        None, help="Unix socket where an engine attaches.", rich_help_panel=_ENGINE_PANEL
    ),
    exit_with_engine: bool | None = typer.Option(
        None, help="End with the attached engine.", rich_help_panel=_ENGINE_PANEL
    ),
    launched: int | None = typer.Option(None, hidden=True),
) -> None:
    """Serve one engine: the gRPC API and the data paths, by default with a pool of its own on loopback.

    Example: [bold]kvgrpc serve --port 50051 --engine-id prefill --blocks 1024[/bold]

    The server prints one line when it serves: [bold]kvgrpc serving ADDRESS engine ID[/bold]. Settings come from
    --config, then from KVGRPC_* variables, then from flags.

    Exit codes: 0 stopped by a signal; 1 a defect; 2 the configuration is not usable; 3 the address is taken; 4 the
    pool does not fit into memory.
    """
    flags = {k: v for k, v in locals().items() if k not in (*_NOT_SETTINGS, *_POOL, *_FLEET)}
    fleet = {f"KVGRPC_{k}".upper(): v for k, v in locals().items() if k in _FLEET and v is not None}
    pool = {k: v for k, v in locals().items() if k in _POOL and v is not None}
    from kvgrpc import config_sources  # here, so that other commands do not import numpy
    from kvgrpc.cli.reload import Reload, ignore_until_served

    for number in _STOPS:
        signal.signal(number, lambda *_: sys.exit(0))  # until `_serve` stops in order
    if port is not None:
        flags["listen"] = f"127.0.0.1:{port}"
    try:
        environment = (
            os.environ
            | _limits(limit or [])
            | ({"KVGRPC_TLS_DIR": tls_dir} if tls_dir else {})
            | ({"KVGRPC_IDENTITY_ROLES": roles} if roles else {})
            | fleet
        )
        flags = _with_pool(config, environment, flags, pool, no_pool=no_pool)
        settings = config_sources.load(config, environment, flags)
    except KVGrpcError as error:
        raise typer.Exit(report(EXIT_CONFIG, error)) from None
    configure_log(settings)
    open_files.raise_limit()
    poll_in_place(os.environ)
    if check:
        from kvgrpc.cli.effective_config import shown

        typer.echo(shown(settings))
        raise typer.Exit
    if launched is not None:
        raise typer.Exit(_serve_engine(settings, launched))
    reload = None
    if config is not None:
        ignore_until_served()
        reload = Reload(settings, partial(config_sources.load, config, environment, flags))
    raise typer.Exit(asyncio.run(_serve(settings, reload=reload)))


_NOT_SETTINGS = ("config", "port", "no_pool", "limit", "launched", "tls_dir", "roles", "check")
_FLEET = ("fleet_registry", "fleet_role", "fleet_model")
_POOL = ("layers", "kv_heads", "head_dim", "block_tokens", "blocks", "dtype", "device")


def _limits(said: Sequence[str]) -> dict[str, str]:
    """Returns limit flags as the variables that set the same limits. Raises InvalidRequest."""
    from kvgrpc.config_errors import invalid

    found = {}
    for word in said:
        name, equals, value = word.partition("=")
        if not equals:
            raise invalid("limit", f"{word!r} is not NAME=VALUE")
        found[f"KVGRPC_LIMITS_{name}".upper()] = value
    return found


def _with_pool(
    path: Path | None, environment: Mapping[str, str], flags: dict[str, Any], pool: dict[str, Any], *, no_pool: bool
) -> dict[str, Any]:
    """Returns the flags with the pool as file, variables and defaults state it, changed field by field by the flags."""
    from kvgrpc import config_sources
    from kvgrpc.config import PoolConfig

    if no_pool:
        return flags | {"pool": False}
    if not pool:
        return flags
    base = config_sources.load(path, environment, flags).pool or PoolConfig()
    fields = {name: getattr(base, name) for name in _POOL}
    return flags | {"pool": fields | pool}


def _serve_engine(settings: "Config", launched: int) -> int:
    """Serves as a child of the engine's process, which made the socket's folder and waits at a pipe for the address."""
    from kvgrpc.engine.session.socket_folder import remove_if_left

    os.set_inheritable(launched, False)
    try:
        return asyncio.run(_serve(settings, launched))
    finally:
        remove_if_left(Path(settings.session_socket).parent)


async def _serve(settings: "Config", launched: int | None = None, reload: "Reload | None" = None) -> int:
    from kvgrpc import __version__
    from kvgrpc.server import Server
    from kvgrpc.service import telemetry
    from kvgrpc.service.address_in_use import AddressInUse
    from kvgrpc.service.heap import calm_collector

    try:
        server = Server(settings)
    except KVGrpcError as error:
        return report(EXIT_CONFIG, error)
    telemetry.configure(server.config.engine_id, __version__, settings.trace_ring_spans)
    stopping, signals = asyncio.Event(), list[signal.Signals]()
    loop = asyncio.get_running_loop()
    for number in _STOPS:
        loop.add_signal_handler(number, _told_to_stop, stopping, server, signals, number)
    try:
        await server.start()
    except AddressInUse as error:
        return report(EXIT_BIND, error)
    except Exhausted as error:
        return report(EXIT_POOL, error)
    except KVGrpcError as error:
        return report(EXIT_CONFIG, error)
    calm_collector()
    if reload is not None:
        loop.add_signal_handler(signal.SIGHUP, reload.apply, server)
    typer.echo(f"kvgrpc serving {server.address} engine {server.config.engine_id}")
    if launched is not None:
        with suppress(BrokenPipeError):
            os.write(launched, server.address.encode())
        # The engine holds the other end while it lives: without this, the end of one that never attached is unnoticed.
        loop.add_reader(launched, _gone, launched, stopping)
    ends = [stopping.wait(), *([server.engine_over()] if settings.exit_with_engine else [])]
    await asyncio.wait([asyncio.ensure_future(end) for end in ends], return_when=asyncio.FIRST_COMPLETED)
    drain_s = settings.drain_s if reload is None else reload.settings.drain_s
    await server.stop(drain_s, signals[0].name if signals else "the engine is gone")
    telemetry.flush()
    return 0


def _told_to_stop(
    stopping: asyncio.Event, server: "Server", signals: list[signal.Signals], number: signal.Signals
) -> None:
    """Stops the server in order; when told again, without waiting for work in progress. Adds to `signals`."""
    if stopping.is_set():
        server.hurry()
    signals.append(number)
    stopping.set()


def _gone(launched: int, stopping: asyncio.Event) -> None:
    asyncio.get_running_loop().remove_reader(launched)
    stopping.set()


def report(code: int, error: KVGrpcError, command: str = "serve") -> int:
    """Prints why a server does not serve. Returns the exit code."""
    typer.echo(f"kvgrpc {command}: {error.sentence}", err=True)
    return code
