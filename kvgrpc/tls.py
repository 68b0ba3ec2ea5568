"""TLS of one process: its certificate, its key and the CAs that it trusts. All three are files, read again on request.

A change of the files takes effect at the next handshake of a server, and in the next channel of a client. Connections
that are open go on with what they began with. Files that do not fit together, or that cannot be read, change nothing:
the process keeps what it has, and `error` says why.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kvgrpc.errors import InvalidRequest, invalid

_log = logging.getLogger(__name__)

FILE_BYTES_MAX = 1 << 20
"""Maximum size of each file, in bytes: far more than a chain of certificates or a bundle of CAs has."""
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
"""Names of the files in a folder, as in a Kubernetes secret of type kubernetes.io/tls and in those of cert-manager."""


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: the chain of this process's certificates, its key, and the CAs that sign its peers'."""

    cert: Path
    key: Path
    ca: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "TlsFiles":
        """Returns the files of a folder, by their usual names."""
        return cls(folder / CERT, folder / KEY, folder / CA)


@dataclass(frozen=True)
class Origin:
    """The place that a part of an identity comes from, for errors."""

    field: str
    """Name of the setting."""
    place: str


@dataclass(frozen=True)
class TlsIdentity:
    """A certificate chain with its key, and the CAs that this process trusts, all as PEM."""

    chain: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    names: tuple[str, ...]
    """Subject alternative names of the certificate: URIs first, then DNS names and addresses."""
    not_before: datetime
    not_after: datetime
    """End of the certificate, in UTC."""

    @property
    def digest(self) -> bytes:
        """Digest of all content, which differs where the content differs."""
        parts = (hashlib.sha256(part).digest() for part in (self.chain, self.key, self.ca))
        return hashlib.sha256(b"".join(parts)).digest()


def read(files: TlsFiles) -> TlsIdentity:
    """Reads the files. Raises InvalidRequest for a file that is missing, and as `identity_of`."""
    origins = Origin("tls.cert", str(files.cert)), Origin("tls.key", str(files.key)), Origin("tls.ca", str(files.ca))
    chain, key, ca = (
        _text(origin.field, path) for origin, path in zip(origins, (files.cert, files.key, files.ca), strict=True)
    )
    return identity_of(chain, key, ca, *origins)


def identity_of(chain: bytes, key: bytes, ca: bytes, of_chain: Origin, of_key: Origin, of_ca: Origin) -> TlsIdentity:
    """Returns the identity of three texts in PEM. Raises InvalidRequest for one that is no PEM, for a key of another
    certificate, and for a certificate that is not valid now.
    """
    certificate = _certificates(of_chain, chain)[0]
    _certificates(of_ca, ca)
    try:
        public = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise invalid(of_key.field, f"{of_key.place} holds no private key without a password") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise invalid(of_key.field, f"{of_key.place} is not the key of the certificate in {of_chain.place}")
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= datetime.now(UTC) <= ends:
        until = f"from {begins.isoformat()} to {ends.isoformat()}"
        raise invalid(of_chain.field, f"the certificate in {of_chain.place} is valid {until}, not now")
    return TlsIdentity(chain, key, ca, _names(certificate), begins, ends)


class Tls:
    """The identity of this process now. Threads of gRPC read it. `look` reads the files again."""

    def __init__(self, files: TlsFiles, close: Callable[[], None] | None = None) -> None:
        """`close` ends what keeps the files. Raises InvalidRequest for files that are not usable, and for a certificate
        that is not valid now.
        """
        self.files = files
        self._close = close
        self.identity = read(files)
        self.error = ""
        """The reason why the files as they are now are not in use; empty if they are."""
        self.changes = 0
        """Number of times that another identity came into use."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends what keeps the files. `look` must not be called any more."""
        if self._close is not None:
            self._close()

    def look(self) -> bool:
        """Reads the files, and returns whether another identity is in use now. Logs each new reason why not, once."""
        try:
            found = read(self.files)
        except InvalidRequest as error:
            why = "; ".join(row.description for row in error.violations)
            if why != self.error:
                _log.warning("the TLS files changed and are not usable, so the old ones stay: %s", why)
            self.error = why
            return False
        self.error = ""
        if found.digest == self.identity.digest:
            return False
        with self._lock:
            self.identity, self.changes = found, self.changes + 1
        _log.info("TLS has a new certificate: %s until %s", ", ".join(found.names), found.not_after.isoformat())
        return True

    def server_credentials(self, *, require_client: bool = True) -> grpc.ServerCredentials:
        """Returns credentials of a server. Each handshake uses the identity of its moment."""
        given = self.changes

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            with self._lock:
                if given == self.changes:
                    return None  # nothing new
                given = self.changes
                return _configuration(self.identity)

        with self._lock:
            first = _configuration(self.identity)
        return grpc.dynamic_ssl_server_credentials(
            first,
            fetch,  # type: ignore[arg-type]  # None is documented: nothing changed
            require_client_authentication=require_client,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials of a channel, which keeps the identity of this moment."""
        now = self.identity
        return grpc.ssl_channel_credentials(now.ca, now.key, now.chain)


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.chain)], identity.ca)


def _text(field_name: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(field_name, f"{path} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise invalid(field_name, f"{path} has more than {FILE_BYTES_MAX} bytes")
    return data


def _certificates(origin: Origin, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise invalid(origin.field, f"{origin.place} holds no certificate in PEM") from error


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    uris, names = (found.get_values_for_type(kind) for kind in (x509.UniformResourceIdentifier, x509.DNSName))
    return (*uris, *names, *addresses)
