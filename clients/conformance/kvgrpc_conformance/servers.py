"""Runs real servers: each is a process of `kvgrpc serve` behind two proxies, for clients and for other servers."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from grpc import aio

from kvgrpc.tls import Tls, TlsFiles

from .process import bound, stop, tail
from .proxy import Proxy
from .values import Json

READY_S = 60.0
BASE: dict[str, Json] = {
    "data_paths": ["shm"],
    "copy_threads": 1,
    "drain_s": 1.0,
    "pool": {"layers": 2, "kv_heads": 1, "head_dim": 16, "block_tokens": 16, "blocks": 64},
}
"""Settings of every server, unless a case states others. A block has 2 KiB."""


class ServerFailedError(Exception):
    """Raised when a server did not start, or ended."""


class Server:
    """One server through all its lives. A restart keeps both addresses."""

    def __init__(self, name: str, settings: Mapping[str, Json], folder: Path) -> None:
        self.name = name
        self.clients, self.peers = Proxy(), Proxy()
        self._settings = {**BASE, "engine_id": name, **settings}
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._logged = 0

    @property
    def address(self) -> str:
        """Address of the server for clients."""
        return self.clients.address

    @property
    def peer_address(self) -> str:
        """Address of the server for other servers. Grants name this one."""
        return self.peers.address

    @property
    def under_tls(self) -> bool:
        """True if callers of the server need a certificate."""
        return "tls" in self._settings

    def channel(self) -> aio.Channel:
        """Returns a channel of the runner's own, with the server's certificate where one is needed."""
        if not self.under_tls:
            return aio.insecure_channel(self.address)
        files = TlsFiles.in_folder(Path(self._settings["tls"]["dir"]))
        return aio.secure_channel(self.address, Tls(files).channel_credentials())

    async def start(self) -> None:
        """Starts the proxies and the first life. Raises ServerFailedError."""
        self._folder.mkdir(parents=True)
        await self.clients.start()
        await self.peers.start()
        await self.begin()

    async def begin(self) -> None:
        """Begins a life. Raises ServerFailedError."""
        port = free_port()
        config = self._folder / "server.toml"
        config.write_text(to_toml({**self._settings, "listen": f"127.0.0.1:{port}", "advertise": self.peers.address}))
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *bound(sys.executable, "-m", "kvgrpc", "serve", "--config", str(config), "--log-level", "warning"),
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")},
            )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), READY_S)
        except TimeoutError:
            line = b""
        if not line.startswith(b"kvgrpc serving"):
            await stop(self._process, signal.SIGKILL)
            raise ServerFailedError(f"server {self.name} did not start: {self.log()}")
        self.clients.target = self.peers.target = port

    async def end(self, number: int = signal.SIGTERM) -> None:
        """Ends the current life; `begin` begins another one."""
        if self._process is not None:
            await stop(self._process, number)
            self._process = None

    async def close(self) -> None:
        """Ends the server and its proxies."""
        await self.end()
        await self.clients.close()
        await self.peers.close()

    def mark_log(self) -> None:
        """Marks the present end of the log, because earlier lines belong to another case."""
        log = self._folder / "log"
        self._logged = log.stat().st_size if log.exists() else 0

    def log(self) -> str:
        """Returns the last lines that it logged since then, at level warning and above."""
        return tail(self._folder / "log", self._logged)

    def alive(self) -> bool:
        """Returns whether its process lives."""
        return self._process is not None and self._process.returncode is None


def free_port() -> int:
    """Returns a port that nobody listens at. A server takes it a moment later; no other program looks for it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def to_toml(settings: Mapping[str, Json]) -> str:
    """Returns settings as TOML, with tables last as TOML requires. JSON writes these values as TOML does."""
    values = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not isinstance(value, Mapping)]
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    for key, table in tables.items():
        values += [f"[{key}]", *(f"{name} = {json.dumps(value)}" for name, value in table.items())]
    return "\n".join(values) + "\n"
