"""TLS from the SPIFFE Workload API: an agent on this host gives this process a certificate, its key and CAs, and renews
them.

They are kept as three files in memory that have no name in any file system. So everything that reads files of TLS, and
reads them again, takes these: a server, a channel, and Python's own TLS, which takes a certificate from a file only.
"""

import functools
import logging
import os
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kvgrpc.errors import InvalidRequest, invalid
from kvgrpc.tls import CA, CERT, KEY, Origin, TlsFiles, identity_of

if TYPE_CHECKING:
    from spiffe import X509Bundle
    from spiffe.workloadapi.x509_context import X509Context

_log = logging.getLogger(__name__)

FIELD = "tls.workload_api"
START_S = 10.0
"""Maximum time for the first identity to come, in seconds: an agent may start at the same time as its workloads."""
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
"""First and longest pause before the agent is dialled anew, in seconds. The pause doubles until an identity comes."""


class SvidFiles:
    """The identity of this process by one Workload API, in files that follow it until `close`.

    An update that is empty or not usable, or an agent that is gone, leaves the files as they are.
    """

    def __init__(self, address: str) -> None:
        """Waits for the first identity. Raises InvalidRequest for a wrong address, if none comes in time, and if the
        library is missing.
        """
        parts = urlsplit(address)
        if parts.scheme != "unix" or parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise invalid(FIELD, f"{address!r} is not unix:///PATH")
        try:
            import spiffe  # noqa: F401 - whether it is there
        except ImportError as error:
            raise invalid(FIELD, "needs a library: pip install 'kvgrpc[spiffe]'") from error
        self.address = address
        self.updates = 0
        """Number of identities that came into use."""
        self.error = ""
        """Why the agent's last word is not in use; empty if it is in use."""
        self._memory = [os.memfd_create(f"kvgrpc {name}") for name in (CERT, KEY, CA)]
        cert, key, ca = (Path(f"/proc/self/fd/{descriptor}") for descriptor in self._memory)
        self.files = TlsFiles(cert, key, ca)
        self._first, self._closed = threading.Event(), threading.Event()
        self._writing = threading.Lock()
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Reasons why streams ended."""
        self._thread = threading.Thread(target=self._follow, name="workload-api", daemon=True)
        self._thread.start()
        if not self._first.wait(START_S):
            self.close()
            raise invalid(FIELD, f"{address} gave no identity within {START_S:g} s: {self.error or 'it says nothing'}")

    def close(self) -> None:
        """Leaves the agent, and ends the files. Nobody may read their paths any more."""
        if self._closed.is_set():
            return
        with self._writing:
            self._closed.set()
        self._ends.put("")
        self._thread.join()
        for descriptor in self._memory:
            os.close(descriptor)

    def _follow(self) -> None:
        pause = PAUSE_S
        while not self._closed.is_set():
            before = self.updates
            why = self._stream()
            if self._closed.is_set():
                return
            self._keep_old(why)
            pause = PAUSE_S if self.updates > before else min(2 * pause, PAUSE_MAX_S)
            self._closed.wait(pause)

    def _stream(self) -> str:
        """Follows one stream to its end. Returns why it ended."""
        from spiffe import WorkloadApiClient
        from spiffe.errors import PySpiffeError

        try:
            with WorkloadApiClient(self.address) as client:
                stream = client.stream_x509_contexts(
                    self._take, lambda error: self._ends.put(str(error)), retry_connect=False
                )
                try:
                    return self._ends.get()
                finally:
                    stream.cancel()
        except PySpiffeError as error:  # no socket lies there
            return str(error)

    def _take(self, update: "X509Context") -> None:
        """Takes an update into use, or says why not. A thread of the library calls it."""
        try:
            parts = _parts(update)
            found = identity_of(*parts, *[Origin(FIELD, f"the answer of {self.address}")] * 3)
        except InvalidRequest as error:
            self._keep_old("; ".join(row.description for row in error.violations))
            return
        with self._writing:
            if self._closed.is_set():
                return
            for descriptor, data in zip(self._memory, parts, strict=True):
                # A reader in between sees parts that do not fit together, and reads again later.
                os.pwrite(descriptor, data, 0)
                os.ftruncate(descriptor, len(data))
            self.updates, self.error = self.updates + 1, ""
        self._first.set()
        names, until = ", ".join(found.names), found.not_after.isoformat()
        _log.info("%s gave an identity: %s until %s", self.address, names, until)

    def _keep_old(self, why: str) -> None:
        if why != self.error and self.updates:
            _log.warning("%s gives nothing new, so the identity of before stays in use: %s", self.address, why)
        self.error = why


def _parts(update: "X509Context") -> tuple[bytes, bytes, bytes]:
    """Returns chain, key and CAs as PEM: the first identity, and the CAs of its trust domain and of federated ones."""
    svid = update.default_svid
    chain = b"".join(one.public_bytes(Encoding.PEM) for one in svid.cert_chain)
    key = svid.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return chain, key, b"".join(sorted(map(_pem, update.x509_bundle_set.bundles)))


def _pem(bundle: "X509Bundle") -> bytes:
    return b"".join(sorted(one.public_bytes(Encoding.PEM) for one in bundle.x509_authorities))


@functools.cache
def shared(address: str) -> SvidFiles:
    """Returns the files by a Workload API that all clients of this process share. Raises as SvidFiles."""
    return SvidFiles(address)
