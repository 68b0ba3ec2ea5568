"""`kvgrpc fleet`: a server of FleetService alone, until it is told to stop."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvgrpc import open_files
from kvgrpc.cli.log_format import configure as configure_log
from kvgrpc.cli.serve import EXIT_BIND, EXIT_CONFIG, report
from kvgrpc.errors import KVGrpcError

if TYPE_CHECKING:
    from kvgrpc.config import Config

_STOPS = (signal.SIGTERM, signal.SIGINT)
LISTEN = "127.0.0.1:50050"
"""Address to bind unless another one is stated."""


def fleet(  # noqa: PLR0913, PLR0917 - one argument per option, all by name
    config: Path | None = typer.Option(None, help="TOML file with settings of kvgrpc serve."),
    registry: str | None = typer.Option(
        None, help="Registry: etcd://HOST:PORT,..., file:PATH, or another one (docs/fleet.md)."
    ),
    listen: str | None = typer.Option(None, help=f"host:port to bind; by default {LISTEN}."),
    dial_allow: str | None = typer.Option(
        None, help="Hosts and networks of leads that may be asked; by default loopback."
    ),
    metrics: str | None = typer.Option(None, help="host:port of the HTTP endpoint for metrics and probes."),
    ready_file: str | None = typer.Option(None, help="JSON file to write once the server serves."),
    tls_dir: str | None = typer.Option(None, help="Folder with tls.crt, tls.key and ca.crt: mutual TLS."),
    roles: str | None = typer.Option(None, help="TOML file with the roles of callers."),
    insecure: bool | None = typer.Option(None, help="Allow a bind off loopback without TLS."),
) -> None:
    """Serve the engines of a registry to routers: FleetService, without an engine.

    Example: [bold]kvgrpc fleet --registry etcd://10.0.0.9:2379 --dial-allow 10.0.0.0/8[/bold]

    It asks all leads for their health. Settings come from --config, then from KVGRPC_* variables, then from flags;
    those of an engine change nothing, and SIGHUP reloads nothing. Exit codes: 0 stopped by a signal; 2 the
    configuration is not usable; 3 the address is taken.
    """
    from kvgrpc import config_sources  # here, so that other commands do not import numpy

    given = {
        "listen": listen, "dial_allow": dial_allow, "metrics": metrics, "ready_file": ready_file, "insecure": insecure,
    }  # fmt: skip
    tables = {"KVGRPC_FLEET_REGISTRY": registry, "KVGRPC_TLS_DIR": tls_dir, "KVGRPC_IDENTITY_ROLES": roles}
    environment = {**os.environ, **{name: text for name, text in tables.items() if text}}
    for number in _STOPS:
        signal.signal(number, lambda *_: sys.exit(0))  # until `_serve` stops in order
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        settings = config_sources.load(config, environment, given | {"pool": False}, {"listen": LISTEN})
    except KVGrpcError as error:
        raise typer.Exit(report(EXIT_CONFIG, error, "fleet")) from None
    configure_log(settings)
    open_files.raise_limit()
    raise typer.Exit(asyncio.run(_serve(settings)))


async def _serve(settings: "Config") -> int:
    from kvgrpc import __version__
    from kvgrpc.service import telemetry
    from kvgrpc.service.address_in_use import AddressInUse
    from kvgrpc.service.heap import calm_collector
    from kvgrpc.service.rpc.fleet_server import FleetServer

    stopping = asyncio.Event()
    for number in _STOPS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        server = FleetServer(settings, __version__)
        await server.start()
    except AddressInUse as error:
        return report(EXIT_BIND, error, "fleet")
    except KVGrpcError as error:
        return report(EXIT_CONFIG, error, "fleet")
    calm_collector()
    port = server.address.rpartition(":")[2]
    telemetry.configure(f"{socket.gethostname()}:{port}", __version__)
    typer.echo(f"kvgrpc fleet serving {server.address} registry {settings.fleet.registry}")
    await stopping.wait()
    await server.stop()
    telemetry.flush()
    return 0
