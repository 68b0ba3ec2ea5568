"""A process that answers at a port of its own for each of some engines: health, and GetEngine with the present life."""

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from bench.fleet.child import Answerer, answer_lines, no_answer
from bench.fleet.engines import PresentLives, name_of
from kvgrpc.v1 import common_pb2, handshake_pb2

_SERVES: bytes = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()
_servers: list[grpc.aio.Server] = []


async def begin(job: dict[str, Any]) -> tuple[dict[str, Any], Answerer]:
    """Serves for the engines `first` to `first + count - 1`. Says their ports."""
    lives = PresentLives(Path(job["lives"]))
    ports = [await _serve(number, lives) for number in range(job["first"], job["first"] + job["count"])]
    return {"ports": ports}, no_answer


async def _serve(number: int, lives: PresentLives) -> int:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            _one("grpc.health.v1.Health", "Check", _health),
            _one("kvgrpc.v1.HandshakeService", "GetEngine", partial(_engine, number, lives)),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _servers.append(server)
    return port


def _one(service: str, method: str, answer: Any) -> grpc.GenericRpcHandler:
    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    return grpc.method_handlers_generic_handler(service, {method: handler})


async def _health(_request: bytes, _context: object) -> bytes:
    return _SERVES


async def _engine(number: int, lives: PresentLives, _request: bytes, _context: object) -> bytes:
    said: bytes = handshake_pb2.GetEngineResponse(
        header=common_pb2.ResponseHeader(engine_id=name_of(number), incarnation=lives[number]),
        status=handshake_pb2.EngineStatus(admission=handshake_pb2.ADMISSION_OPEN),
    ).SerializeToString()
    return said


if __name__ == "__main__":
    answer_lines(begin)
