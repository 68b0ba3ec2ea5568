"""Authorization: what the gate adds to a call whose caller has a certificate, and a row in a file of roles."""

import statistics
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvgrpc.config import Config
from kvgrpc.config_security import IdentityConfig, TlsConfig
from kvgrpc.service.identity.gate import Gate
from kvgrpc.tls import Tls, TlsFiles

METHOD = "kvgrpc.v1.TransferService/AcknowledgeTransfers"
_ROLES = '[[callers]]\nname = "*"\nroles = ["router"]\n'
_CALL_S = 30.0


class _Gated(grpc.GenericRpcHandler):
    """Answers each call with the nanoseconds that the gate took."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def service(self, _: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._admit)

    async def _admit(self, _: bytes, context: Any) -> bytes:
        began = time.perf_counter_ns()
        self._gate.admit(context, METHOD, b"")
        return (time.perf_counter_ns() - began).to_bytes(8, "big")


def _gate(folder: Path) -> Gate:
    roles = folder / "roles.toml"
    roles.write_text(_ROLES)
    return Gate(Config(tls=TlsConfig(dir=str(folder)), identity=IdentityConfig(roles=str(roles))))


async def authorization_us(files: TlsFiles, calls: int) -> float:
    """Returns the median time of the gate over a connection with mutual TLS, in microseconds."""
    tls = Tls(files)
    server = grpc.aio.server(handlers=[_Gated(_gate(files.cert.parent))])
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    try:
        async with grpc.aio.secure_channel(f"localhost:{port}", tls.channel_credentials()) as channel:
            call: Any = channel.unary_unary(f"/{METHOD}")
            took = [int.from_bytes(await call(b"", timeout=_CALL_S), "big") for _ in range(calls)]
    finally:
        await server.stop(None)
    return statistics.median(took) / 1e3
