"""`kvgrpc serve`: one server until it is told to stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
    config: Annotated[Path | None, typer.Option(help="TOML file with any of these settings.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port to bind; port 0 takes a free one.")] = None,
    port: Annotated[int | None, typer.Option(help="The same as --listen 127.0.0.1:PORT.")] = None,
    admin_listen: Annotated[
        str | None, typer.Option(help="host:port to bind for AdminService, reflection and channelz alone.")
    ] = None,
    advertise: Annotated[str | None, typer.Option(help="host:port that peers dial, if it is another one.")] = None,
    engine_id: Annotated[str | None, typer.Option(help="Id of the engine; by default a random one.")] = None,
    weights_revision: Annotated[
        str | None, typer.Option(help="Revision of the model's weights. Engines with other weights exchange no KV.")
    ] = None,
    dial_allow: Annotated[
        str | None, typer.Option(help="Hosts and networks that may be dialled; by default loopback.")
    ] = None,
    private_networks: Annotated[
        str | None,
        typer.Option(help="Hosts and networks on which KV may travel in plain text.", rich_help_panel=_TLS_PANEL),
    ] = None,
    read_blocks: Annotated[bool | None, typer.Option(help="Let ReadBlocks return bytes.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="Seconds that SIGTERM leaves to transfers and leases.")] = None,
    limit: Annotated[
        list[str] | None, typer.Option(help="A limit as NAME=VALUE, such as lease_ttl_s=60; may be repeated.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error; by default info.")] = None,
    log_format: Annotated[str | None, typer.Option(help="Form of the log's lines: text or json.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the configuration, and print it as it takes effect.")
    ] = False,
    trace_ring_spans: Annotated[int | None, typer.Option(help="Spans to keep for kvgrpc trace; 0: none.")] = None,
    ready_file: Annotated[str | None, typer.Option(help="JSON file to write once the server serves.")] = None,
    metrics: Annotated[
        str | None, typer.Option(help="host:port of the HTTP endpoint for metrics and probes, such as 127.0.0.1:9464.")
    ] = None,
    tls_dir: Annotated[
        str | None,
        typer.Option(help="Folder with tls.crt, tls.key and ca.crt: mutual TLS.", rich_help_panel=_TLS_PANEL),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(help="TOML file with the roles of callers.", rich_help_panel=_TLS_PANEL),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option(help="Allow a bind off loopback without TLS.", rich_help_panel=_TLS_PANEL),
    ] = None,
    fleet_registry: Annotated[
        str | None,
        typer.Option(
            help="Registry: etcd://HOST:PORT,..., file:PATH, or another one (docs/fleet.md).",
            rich_help_panel=_FLEET_PANEL,
        ),
    ] = None,
    fleet_role: Annotated[
        str | None, typer.Option(help="What this engine does: prefill, decode or both.", rich_help_panel=_FLEET_PANEL)
    ] = None,
    fleet_model: Annotated[
        str | None, typer.Option(help="Name of the model, for the registry.", rich_help_panel=_FLEET_PANEL)
    ] = None,
    no_pool: Annotated[
        bool, typer.Option("--no-pool", help="No embedded pool: wait for an engine.", rich_help_panel=_POOL_PANEL)
    ] = False,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", rich_help_panel=_POOL_PANEL)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Number of KV heads.", rich_help_panel=_POOL_PANEL)] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements of a head.", rich_help_panel=_POOL_PANEL)] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of a block.", rich_help_panel=_POOL_PANEL)] = None,
    blocks: Annotated[int | None, typer.Option(help="Number of blocks.", rich_help_panel=_POOL_PANEL)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data type: float16, bfloat16, float32, ...", rich_help_panel=_POOL_PANEL)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Memory: host, or a GPU such as cuda:0.", rich_help_panel=_POOL_PANEL)
    ] = None,
    data_paths: Annotated[
        str | None,
        typer.Option(
            help="Data paths to use, best first: shm,cma,nixl,cuda_vmm,collective; also window.",
            rich_help_panel=_PATHS_PANEL,
        ),
    ] = None,
    copy_threads: Annotated[
        int | None, typer.Option(help="Threads that copy for shm and cma.", rich_help_panel=_PATHS_PANEL)
    ] = None,
    shared_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder that servers in other network namespaces of this host mount, too.",
            rich_help_panel=_PATHS_PANEL,
        ),
    ] = None,
    bandwidth_limit_bytes_per_s: Annotated[
        float | None, typer.Option(help="Maximum rate of what this server moves.", rich_help_panel=_PATHS_PANEL)
    ] = None,
    source_writes: Annotated[
        bool | None,
        typer.Option(
            help="Write pushes over nixl, in place of reads by the destination.",
            rich_help_panel=_PATHS_PANEL,
        ),
    ] = None,
    checksums: Annotated[
        bool | None,
        typer.Option(
            help="Compare each received block with its source, by CRC-32C.",
            rich_help_panel=_PATHS_PANEL,
        ),
    ] = None,
    session_socket: Annotated[
        str | None, typer.Option(help="Unix socket where an engine attaches.", rich_help_panel=_ENGINE_PANEL)
    ] = None,
    exit_with_engine: Annotated[
        bool | None,
        typer.Option(help="End with the attached engine.", rich_help_panel=_ENGINE_PANEL),
    ] = None,
    launched: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:  # fmt: skip
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
        _fail(EXIT_CONFIG, error.sentence)
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


_NOT_SETTINGS = (
    "config",
    "port",
    "no_pool",
    "limit",
    "launched",
    "tls_dir",
    "roles",
    "check",
)

_FLEET = ("fleet_registry", "fleet_role", "fleet_model")
_POOL = ("layers", "kv_heads", "head_dim", "block_tokens", "blocks", "dtype", "device")


def _limits(said: Sequence[str]) -> dict[str, str]:
    """Returns limit flags as the variables that set the same limits. Raises InvalidRequest."""
    from kvgrpc.config_tables import invalid

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
        return _report(EXIT_CONFIG, error)
    telemetry.configure(server.config.engine_id, __version__, settings.trace_ring_spans)
    stopping, signals = asyncio.Event(), list[signal.Signals]()
    loop = asyncio.get_running_loop()
    for number in _STOPS:
        loop.add_signal_handler(number, _told_to_stop, stopping, server, signals, number)
    try:
        await server.start()
    except AddressInUse as error:
        return _report(EXIT_BIND, error)
    except Exhausted as error:
        return _report(EXIT_POOL, error)
    except KVGrpcError as error:
        return _report(EXIT_CONFIG, error)
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


def _report(code: int, error: KVGrpcError) -> int:
    typer.echo(f"kvgrpc serve: {error.sentence}", err=True)
    return code


def _fail(code: int, message: str) -> NoReturn:
    typer.echo(f"kvgrpc serve: {message}", err=True)
    raise typer.Exit(code)
