"""Credentials of a client: its certificate, the CAs that it trusts, and a token. No secret is in their text.

Rules:
* The files of TLS are read when a client is made, in full: a file that is missing or fits no other raises at once.
* All files are read again while the client lives, so that whoever renews them need not restart it.
"""

import contextlib
import hashlib
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvgrpc.errors import FieldViolation, InvalidRequest, Reason

TOKEN_LOOK_S = 1.0
"""Time between two looks at the file of a token, in seconds."""
FILE_BYTES_MAX = 1 << 20
"""Maximum size of each file, in bytes."""
_VARIABLES = {name: f"KVGRPC_TLS_{name}".upper() for name in ("dir", "cert", "key", "ca", "workload_api")}


@dataclass(frozen=True)
class Credentials:
    """The certificate or token that a client shows, and the CAs that it trusts. Paths are those of a server's `[tls]`.
    Empty credentials are plain text.

    With `ca` alone the client checks the server and shows no certificate.
    """

    dir: str | Path = ""
    """Folder with `tls.crt`, `tls.key` and `ca.crt`, as Kubernetes and cert-manager name them."""
    cert: str | Path = ""
    """Path of the certificate chain, in place of the folder's."""
    key: str | Path = ""
    """Path of the key, in place of the folder's."""
    ca: str | Path = ""
    """Path of the CAs that sign servers, in place of the folder's."""
    workload_api: str = ""
    """Address of a SPIFFE Workload API, unix:///PATH, which gives all three in place of files. Needs `kvgrpc[spiffe]`.
    All clients of a process share one stream to it.
    """
    token: str = field(default="", repr=False)
    """Bearer token that every call carries."""
    token_file: str | Path = ""
    """Path of a file with the token, in place of `token`. It is read again while the client lives."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], token_file: str | Path = "") -> "Credentials":
        """Returns the credentials whose paths are in the variables that a server reads, too."""
        return cls(token_file=token_file, **{name: environment.get(key, "") for name, key in _VARIABLES.items()})

    @property
    def paths(self) -> "TlsPaths | None":
        """The paths of the files; None: plain text. Waits for a Workload API to answer. Raises InvalidRequest where a
        path lacks, and for a Workload API that gives no identity.
        """
        if self.workload_api:
            if self.dir or self.cert or self.key or self.ca:
                raise _unusable("tls.workload_api", "gives what files give: leave it out, or dir, cert, key and ca")
            from kvgrpc.workload_api import shared  # with libraries that few clients need

            kept = shared(self.workload_api).files
            return TlsPaths(kept.cert, kept.key, kept.ca, self.workload_api)
        cert, key, ca = (
            Path(given) if given else Path(self.dir, name) if self.dir else None
            for given, name in ((self.cert, "tls.crt"), (self.key, "tls.key"), (self.ca, "ca.crt"))
        )
        if (cert is None) != (key is None):
            lacks, has = ("certificate", "key") if cert is None else ("key", "certificate")
            raise _unusable("tls.cert" if cert is None else "tls.key", f"the {has} has a path, and the {lacks} none")
        if ca is None and cert is not None:
            raise _unusable("tls.ca", "the certificate has a path, and the CAs that sign servers none")
        return None if ca is None else TlsPaths(cert, key, ca)


@dataclass(frozen=True)
class TlsPaths:
    """Paths of PEM files. A client without a certificate has no `cert` and no `key`."""

    cert: Path | None
    key: Path | None
    ca: Path
    origin: str = ""
    """The Workload API that keeps the files, which have no names then; empty: an operator does."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns credentials of a channel, with the files as they are now. Raises InvalidRequest."""
        self.context()
        cert, key = (None if path is None else _read(name, path) for name, path in self._own())
        return grpc.ssl_channel_credentials(_read("tls.ca", self.ca), key, cert)

    def digest(self) -> bytes:
        """Returns a digest of the files as they are now. Raises InvalidRequest."""
        whole = hashlib.sha256(_read("tls.ca", self.ca))
        for name, path in self._own():
            if path is not None:
                whole.update(hashlib.sha256(_read(name, path)).digest())
        return whole.digest()

    def context(self) -> ssl.SSLContext:
        """Returns what Python's own TLS needs for the same. Raises InvalidRequest for files that are not usable."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.set_alpn_protocols(["h2"])
        try:
            made.load_verify_locations(cadata=_read("tls.ca", self.ca).decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise _unusable("tls.ca", f"{self.ca} holds no certificate in PEM") from error
        if self.cert is not None and self.key is not None:
            for name, path in self._own():
                _read(name, path)
            try:
                made.load_cert_chain(self.cert, self.key, password="")  # no prompt for an encrypted key
            except (ssl.SSLError, OSError, ValueError) as error:
                why = "do not fit together" if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH" else "are no PEM"
                raise _unusable("tls.cert", f"{self.cert} and its key in {self.key} {why}") from error
        return made

    def _own(self) -> tuple[tuple[str, Path | None], ...]:
        return ("tls.cert", self.cert), ("tls.key", self.key)


class BearerToken:
    """The token of a client, or none. Threads do not share it."""

    def __init__(self, credentials: Credentials) -> None:
        """Raises InvalidRequest for a token that no call can carry, and for a file that cannot be read."""
        self._path = Path(credentials.token_file) if credentials.token_file else None
        self._looked_at = time.monotonic()
        if self._path is None:
            self._token = _checked(credentials.token, "token") if credentials.token else ""
        elif credentials.token:
            raise _unusable("token", "token and token_file are both given: give one")
        else:
            self._token = _token_in(self._path)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call that is made now. A file that became unusable leaves the last token."""
        now = time.monotonic()
        if self._path is not None and now - self._looked_at >= TOKEN_LOOK_S:
            self._looked_at = now
            # Who writes the file may be half way. The server says when the last token no longer does.
            with contextlib.suppress(InvalidRequest):
                self._token = _token_in(self._path)
        return (("authorization", f"Bearer {self._token}"),) if self._token else ()

    def __repr__(self) -> str:
        return f"BearerToken({'of a file' if self._path else 'given' if self._token else 'none'})"


def _token_in(path: Path) -> str:
    try:
        text = _read("token_file", path).decode("ascii").strip()
    except UnicodeDecodeError:
        text = "\n"  # the error that it becomes does not show what the file holds
    return _checked(text, "token_file")


def _checked(token: str, name: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise _unusable(name, "a token is one word of printable ASCII")
    return token


def _unusable(name: str, description: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_FIELD, description, violations=(FieldViolation(name, description),))


def _read(name: str, path: Path | None) -> bytes:
    assert path is not None
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unusable(name, f"{path} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise _unusable(name, f"{path} has more than {FILE_BYTES_MAX} bytes")
    return data
