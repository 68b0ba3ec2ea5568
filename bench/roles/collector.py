"""Role "collector" of a child process: it takes spans by OTLP and forgets them, so that exports cost what they cost."""

from typing import Any

import grpc.aio

from bench.roles.role import Answer

EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


class Collector:
    """The commands of this role are its public coroutine methods."""

    def __init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._nbytes = 0

    async def perform(self, command: str, arguments: dict[str, Any], fds: list[int]) -> Answer:  # noqa: ARG002
        """Performs one command."""
        answer: Answer = await getattr(self, command)(**arguments)
        return answer

    async def start(self) -> Answer:
        """Serves. Returns the endpoint that exporters are given."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        export: Any = grpc.unary_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, {"Export": export}),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return {"endpoint": f"http://127.0.0.1:{port}"}, []

    async def received(self) -> Answer:
        """Returns the number of bytes of spans that have come."""
        return {"nbytes": self._nbytes}, []

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _export(self, request: bytes, _: Any) -> bytes:
        self._nbytes += len(request)
        return b""
