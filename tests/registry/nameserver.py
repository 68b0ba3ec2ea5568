"""A real name server on loopback, over UDP and TCP, whose zone the test changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from kvgrpc.registry.dns import DnsSettings

UDP_BYTES = 512


class NameServer(asyncio.DatagramProtocol):
    """Answers what `zone` says: the records of a name and a type, with their time to live."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.code: dns.rcode.Rcode = dns.rcode.NOERROR
        """Answer to all questions, if it is an error."""
        self.silent = False
        self.drop = 0
        """Number of packets that are lost from now on."""
        self.asked: list[str] = []
        self._transport: asyncio.DatagramTransport | None = None

    @property
    def port(self) -> int:
        assert self._transport is not None
        port: int = self._transport.get_extra_info("sockname")[1]
        return port

    def settings(self, name: str, port: int = 0, **changes: float) -> DnsSettings:
        assert self._transport is not None
        host, at = self._transport.get_extra_info("sockname")
        times = {"timeout_s": 1.0, "look_min_s": 0.05, "look_max_s": 0.1, **changes}
        return DnsSettings(name, port, (host,), at, **times)

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override] # of UDP
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self.drop or self.silent:
            self.drop = max(0, self.drop - 1)
            return
        assert self._transport is not None
        reply = self.answer(data)
        try:
            wire = reply.to_wire(max_size=UDP_BYTES)
        except dns.exception.TooBig:
            reply.answer.clear()
            reply.flags |= dns.flags.TC
            wire = reply.to_wire()
        self._transport.sendto(wire, addr)

    async def over_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        wire = self.answer(await reader.readexactly(size)).to_wire()
        writer.write(len(wire).to_bytes(2, "big") + wire)
        await writer.drain()
        writer.close()

    def answer(self, data: bytes) -> dns.message.Message:
        asked = dns.message.from_wire(data)
        reply = dns.message.make_response(asked)
        question = asked.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked.append(f"{name} {kind}")
        if self.code != dns.rcode.NOERROR:
            reply.set_rcode(self.code)
        elif (name, kind) in self.zone:
            ttl, records = self.zone[name, kind]
            reply.answer.append(dns.rrset.from_text_list(question.name, ttl, "IN", kind, records))
        elif not any(name == known for known, _ in self.zone):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        return reply


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    made = NameServer()
    over_tcp = await asyncio.start_server(made.over_tcp, "127.0.0.1", 0)
    port = over_tcp.sockets[0].getsockname()[1]
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: made, ("127.0.0.1", port))
    try:
        yield made
    finally:
        transport.close()
        over_tcp.close()
        await over_tcp.wait_closed()
