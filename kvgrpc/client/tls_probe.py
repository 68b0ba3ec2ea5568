"""Finds out by a TLS handshake of its own why a server cannot be reached. gRPC says UNAVAILABLE for all causes.

A server ends the connection of a caller whose certificate it refuses, without a word. So what is wrong with the
client's own certificate is found here, by a handshake in memory against the client's own CAs.
"""

import asyncio
import contextlib
import re
import ssl
import time

from kvgrpc.client.credentials import Credentials, TlsPaths
from kvgrpc.errors import InvalidRequest

TIMEOUT_S = 1.0
"""Maximum time of a probe, in seconds."""
AGAIN_S = 5.0
"""Time between two probes of a client, in seconds. The last finding holds in between."""
NOT_CONNECTED = "failed to connect to all addresses"
"""Begin of gRPC's own text for a connection that was not made."""
_TARGET = re.compile(r"(?:dns:(?:///)?|ipv[46]:)?(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d+)")
_EXPIRED, _NOT_YET = 10, 9
_OTHER_NAME = (62, 64)


class TlsProbe:
    """The probes of one client."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address, self._credentials = address, credentials
        self._found = ""
        self._again_at = 0.0

    async def why(self, details: str, timeout_s: float) -> str:
        """Returns the cause of an UNAVAILABLE with these details, as far as it is TLS; else an empty text."""
        if not details.startswith(NOT_CONNECTED) or timeout_s <= 0:
            return ""
        now = time.monotonic()
        if now >= self._again_at:
            self._again_at = now + AGAIN_S
            self._found = await why_unreachable(self._address, self._credentials, min(timeout_s, TIMEOUT_S))
        return self._found


async def why_not_connected(own: Credentials, address: str, details: str) -> str:
    """Returns what TLS prevents at a server, if gRPC's details say that no connection was made, or an empty text."""
    return await why_unreachable(address, own) if details.startswith(NOT_CONNECTED) else ""


async def why_unreachable(address: str, credentials: Credentials, timeout_s: float = TIMEOUT_S) -> str:
    """Returns what is wrong between client and server as far as TLS goes, or an empty text. It never raises for what
    the server does.
    """
    target = _TARGET.fullmatch(address)
    if target is None:
        return ""
    try:
        paths = credentials.paths
        context = _trusting() if paths is None else paths.context()
    except InvalidRequest as error:
        return error.sentence
    try:
        async with asyncio.timeout(timeout_s):
            ended = await _handshake(target["six"] or target["host"], int(target["port"]), context)
    except OSError as error:  # among them TimeoutError and ssl.SSLError
        return _failed(error, paths, address)
    if paths is None:
        return f"{address} speaks TLS, and this client plain text: give it a certificate"
    return _refused_client(paths, address) if ended else ""


def _failed(error: OSError, paths: TlsPaths | None, address: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _refused_server(error, address)
    if isinstance(error, ssl.SSLError) and paths is not None:
        return f"{address} speaks plain text, and this client TLS"
    return ""


def _trusting() -> ssl.SSLContext:
    """Returns a context that trusts everybody: a client without TLS asks only whether the server has it."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.set_alpn_protocols(["h2"])
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


async def _handshake(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Returns whether the server ended the connection after the handshake. Raises OSError, ssl.SSLError among them."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    try:
        return not await reader.read(1)  # a gRPC server that takes the caller speaks first
    except ConnectionError:
        return True
    finally:
        writer.transport.abort()


def _refused_server(error: ssl.SSLCertVerificationError, address: str) -> str:
    if error.verify_code == _EXPIRED:
        return f"the certificate of {address} has expired"
    if error.verify_code == _NOT_YET:
        return f"the certificate of {address} is not valid yet"
    if error.verify_code in _OTHER_NAME:
        return f"the certificate of {address} has another name"
    return f"the certificate of {address} is of a CA that this client does not trust: {error.verify_message}"


def _refused_client(paths: TlsPaths, address: str) -> str:
    if paths.cert is None:
        return f"{address} asks its callers for a certificate, and this client has none"
    found = _own_fault(paths)
    if found:
        return f"{address} refuses this client: {found}"
    return f"{address} refuses this client's {_own(paths)}: it is perhaps of a CA that the server lacks"


def _own(paths: TlsPaths) -> str:
    return f"certificate {f'by {paths.origin}' if paths.origin else f'in {paths.cert}'}"


def _own_fault(paths: TlsPaths) -> str:
    """Returns what is wrong with the client's own certificate by its own CAs, or an empty text."""
    try:
        _judge(paths)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            return f"the {_own(paths)} has expired"
        if error.verify_code == _NOT_YET:
            return f"the {_own(paths)} is not valid yet"
        return f"the {_own(paths)} is of a CA that {paths.origin or paths.ca} does not hold"
    except (OSError, InvalidRequest):  # the files have just changed; ssl.SSLError is an OSError
        return f"the {_own(paths)} is not usable"
    return ""


def _judge(paths: TlsPaths) -> None:
    """Does a handshake in memory whose server verifies the client's certificate. Raises ssl.SSLError."""
    assert paths.cert is not None
    assert paths.key is not None
    judge = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    judge.load_cert_chain(paths.cert, paths.key, password="")  # no prompt for an encrypted key
    judge.load_verify_locations(paths.ca)
    judge.verify_mode = ssl.CERT_REQUIRED
    shows = paths.context()
    shows.check_hostname, shows.verify_mode = False, ssl.CERT_NONE
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, client = judge.wrap_bio(there, back, server_side=True), shows.wrap_bio(back, there)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
