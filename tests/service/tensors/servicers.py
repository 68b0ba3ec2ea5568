"""TensorService of peers that are no leads: they refuse, or lie."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from kvgrpc.core.tensors.descriptions import LeadAddress
from kvgrpc.v1 import tensor_pb2_grpc


@asynccontextmanager
async def serving(servicer: Any) -> AsyncIterator[LeadAddress]:
    """Serves it, and yields its address."""
    server = grpc.aio.server()
    tensor_pb2_grpc.add_TensorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield LeadAddress(f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
