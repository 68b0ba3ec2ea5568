"""A small agent that speaks the SPIFFE Workload API at a unix socket, with bytes of the public protocol."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from kvgrpc.tls import TlsFiles
from tests.tls.authority import Authority, Name

FETCH = "/SpiffeWorkloadAPI/FetchX509SVID"
HEADER = "workload.spiffe.io", "true"
"""Metadata that every call to an agent has: who makes an agent's host dial it cannot add it."""
HOLDERS = 8


@dataclass(frozen=True)
class Svid:
    """What an agent gives a workload, in DER."""

    spiffe_id: str
    chain: bytes
    key: bytes
    bundle: bytes


def svid(authority: Authority, folder: Path, name: str, **times: Any) -> Svid:
    """Returns a new identity of a trust domain, `name`.test, with the DNS name localhost."""
    spiffe_id = f"spiffe://{name}.test/lead"
    names: list[Name] = [x509.UniformResourceIdentifier(spiffe_id), x509.DNSName("localhost")]
    files = authority.issue(folder, names, **times)
    return Svid(spiffe_id, chain_of(files), key_of(files), authority.certificate.public_bytes(Encoding.DER))


def chain_of(files: TlsFiles) -> bytes:
    """Returns the certificate of files in DER."""
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).public_bytes(Encoding.DER)


def key_of(files: TlsFiles) -> bytes:
    """Returns the key of files in DER."""
    key = load_pem_private_key(files.key.read_bytes(), None)
    return key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


def answer(*svids: Svid, federated: Mapping[str, bytes] | None = None) -> bytes:
    """Returns an X509SVIDResponse, with the bundles of other trust domains."""
    rows = [
        _field(1, _field(1, one.spiffe_id.encode()), _field(2, one.chain), _field(3, one.key), _field(4, one.bundle))
        for one in svids
    ]
    others = (federated or {}).items()
    return b"".join((*rows, *(_field(3, _field(1, domain.encode()), _field(2, bundle)) for domain, bundle in others)))


def _field(number: int, *parts: bytes) -> bytes:
    """Returns a field of bytes, as protobuf encodes it."""
    data = b"".join(parts)
    return bytes((number << 3 | 2,)) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes((low | 0x80,)) + _varint(rest) if rest else bytes((low,))


def until(holds: Callable[[], bool], timeout_s: float = 20) -> None:
    """Returns when `holds`, which a thread of a library brings about."""
    ends = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.005)


class Agent(grpc.GenericRpcHandler):
    """An agent for one workload. `give` sends an answer to all streams, and it is the first of later ones."""

    def __init__(self, socket: Path) -> None:
        self.address = f"unix://{socket}"
        self.dials = 0
        """Number of streams that were begun."""
        self.open = 0
        """Number of open streams."""
        self._answer: bytes | None = None
        self._given = 0
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(HOLDERS), handlers=[self])
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        """Ends the agent, with its streams and its socket."""
        assert self._server is not None
        server, self._server = self._server, None
        with self._changed:
            self._changed.notify_all()
        server.stop(None).wait()

    def give(self, data: bytes) -> None:
        with self._changed:
            self._answer, self._given = data, self._given + 1
            self._changed.notify_all()

    def wait_for(self, holds: Any, timeout_s: float = 20) -> None:
        """Returns when `holds` of this agent is true."""
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self), timeout_s)

    def service(self, details: Any) -> Any:
        if details.method != FETCH:
            return None
        if HEADER not in details.invocation_metadata:
            return grpc.unary_stream_rpc_method_handler(_refused)
        return grpc.unary_stream_rpc_method_handler(self._serve)

    def _serve(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._changed:
            self.dials, self.open = self.dials + 1, self.open + 1
            self._changed.notify_all()
        context.add_callback(self._ended)
        sent = 0
        while (sent := self._next(sent, context)) and self._answer is not None:
            yield self._answer

    def _next(self, sent: int, context: grpc.ServicerContext) -> int:
        """Returns the number of the answer after that one, once there is one; 0 at the end of the stream."""
        with self._changed:
            self._changed.wait_for(lambda: self._given > sent or self._server is None or not context.is_active())
            return 0 if self._server is None or not context.is_active() else self._given

    def _ended(self) -> None:
        with self._changed:
            self.open -= 1
            self._changed.notify_all()


def _refused(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "security header missing from request")
