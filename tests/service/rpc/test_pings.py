"""Keepalive pings: a client that pings often, because a proxy drops idle connections, keeps its streams. A lead pings
no other lead for nothing.
"""

import asyncio
import contextlib

import grpc

from kvgrpc.core.values.limits import Limits
from kvgrpc.service.rpc.server import connector
from kvgrpc.v1 import handshake_pb2, handshake_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from tests.service.engines import Engine
from tests.service.http2 import PREFACE

PING_MS = 1_500
"""Time between pings in milliseconds: far below the 10 s in docs/routers.md, above the server's minimum of 1 s."""
OPEN_S = 9.0
"""Time of the watch in seconds, enough for six pings. gRPC ends a connection at the third ping that is too early."""


def test_pings_do_not_end_a_watch_on_which_nothing_happens(source: Engine) -> None:
    options = [
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with grpc.insecure_channel(source.address, options=options) as channel:
        stub = transfer_pb2_grpc.TransferServiceStub(channel)
        watch = stub.WatchTransfers(transfer_pb2.WatchTransfersRequest(), timeout=OPEN_S)
        ends = []
        try:
            for _ in watch:
                pass
        except grpc.RpcError as error:
            ends.append(error.code())
    assert ends == [grpc.StatusCode.DEADLINE_EXCEEDED]


PING, ACK = 6, 1


def pings(sent: bytes) -> int:
    """Returns the number of pings, without answers to pings, among the frames that a client sent."""
    at, found = len(PREFACE), 0
    while at + 9 <= len(sent):
        found += sent[at + 3] == PING and not sent[at + 4] & ACK
        at += 9 + int.from_bytes(sent[at : at + 3], "big")
    return found


async def test_what_another_lead_answers_costs_no_ping(source: Engine) -> None:
    sent = bytearray()
    relays: list[asyncio.Task[None]] = []
    host, _, port = source.address.rpartition(":")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.extend(filter(None, [asyncio.current_task()]))
        back, forth = await asyncio.open_connection(host, int(port))

        async def copy(of: asyncio.StreamReader, to: asyncio.StreamWriter, kept: bytearray) -> None:
            with contextlib.suppress(OSError):
                while data := await of.read(65_536):
                    kept += data
                    to.write(data)
            to.close()
            with contextlib.suppress(OSError):
                await to.wait_closed()

        await asyncio.gather(copy(reader, forth, sent), copy(back, writer, bytearray()))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server, connector(Limits(), None)(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as channel:
        stub = handshake_pb2_grpc.HandshakeServiceStub(channel)
        for _ in range(10):
            await stub.GetEngine(handshake_pb2.GetEngineRequest())
    await asyncio.gather(*relays)
    assert sent.startswith(PREFACE)
    assert pings(bytes(sent)) == 0
