"""Forwards bytes from a port to a server. The connections can be cut."""

import asyncio
from contextlib import suppress

CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards from `address` to `target`, a port of this host. While it is cut, new connections are closed at once."""

    def __init__(self) -> None:
        self.target = 0
        self.address = ""
        self._cut = False
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens at a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Ends every connection, and closes new ones at once until `uncut`."""
        self._cut = True
        for writer in self._open:
            writer.transport.abort()

    def uncut(self) -> None:
        """Forwards again."""
        self._cut = False

    async def close(self) -> None:
        """Ends the proxy and its connections."""
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted connections are closed in the loop's next round

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._forwarded(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forwarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        # The connection is recorded before the first await, so that a cut in between does not miss it.
        self._open.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        self._open.add(there_writer)
        if self._cut:
            writer.transport.abort()
        try:
            await asyncio.gather(_forward(reader, there_writer), _forward(there_reader, writer))
        finally:
            for one in (writer, there_writer):
                one.transport.abort()
                self._open.discard(one)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    # The end of either side ends both, because gRPC never closes half of a connection.
    writer.transport.abort()
