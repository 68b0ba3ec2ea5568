"""Settings of TLS, identities and tokens."""

from dataclasses import dataclass, fields
from pathlib import Path

from kvgrpc.config_errors import invalid

TOKEN_ALGORITHMS = ("ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "EdDSA")
"""Algorithms of tokens to choose from: those with a public key."""
TOKEN_LEEWAY_MAX_S = 300.0
"""Maximum difference of clocks that may be forgiven, in seconds."""


@dataclass(frozen=True)
class TlsConfig:
    """TLS of this server, for its listener and for what it dials. Without any file the server speaks plain text."""

    dir: str = ""
    """Folder with `tls.crt`, `tls.key` and `ca.crt`, as Kubernetes and cert-manager name them."""
    cert: str = ""
    """Path of the certificate chain, in place of the folder's."""
    key: str = ""
    """Path of the key, in place of the folder's."""
    ca: str = ""
    """Path of the CAs that sign callers and peers, in place of the folder's."""
    workload_api: str = ""
    """Address of a SPIFFE Workload API, unix:///PATH, which gives all three in place of files."""

    @property
    def given(self) -> bool:
        """True if the server speaks TLS. Raises InvalidRequest."""
        return self.files() is not None or bool(self.workload_api)

    def files(self) -> tuple[Path, Path, Path] | None:
        """Returns the paths of the certificate, the key and the CAs; None: there are none. Raises InvalidRequest."""
        found = [given or (self.dir and str(Path(self.dir, name))) for given, name in self._named()]
        if not any(found):
            return None
        if self.workload_api:
            raise invalid("tls.workload_api", "gives what files give: leave it out, or dir, cert, key and ca")
        for path, (_, name) in zip(found, self._named(), strict=True):
            if not path:
                raise invalid("tls", f"lacks a path for {name}: set tls.dir, or each of tls.cert, tls.key and tls.ca")
        cert, key, ca = map(Path, found)
        return cert, key, ca

    def _named(self) -> tuple[tuple[str, str], ...]:
        return (self.cert, "tls.crt"), (self.key, "tls.key"), (self.ca, "ca.crt")


@dataclass(frozen=True)
class IdentityConfig:
    """Paths of the files that say what callers may do. Without a file whoever TLS or a token lets in has all roles."""

    roles: str = ""
    """Path of a TOML file with the roles and the tenants of callers."""
    policy: str = ""
    """Path of an authorization policy of gRPC in JSON, which calls must pass, too."""

    def check(self) -> None:
        """Raises InvalidRequest for a wrong field."""
        for item in fields(self):
            if not isinstance(getattr(self, item.name), str):
                raise invalid(f"identity.{item.name}", "is text")


@dataclass(frozen=True)
class TokenConfig:
    """Bearer tokens that this server takes. Without keys it takes none."""

    keys: str = ""
    """Path of a public key in PEM, or of a JSON Web Key Set."""
    algorithms: str = "ES256,RS256,EdDSA"
    """Algorithms that a token may be signed with."""
    issuer: str = ""
    audience: str = ""
    leeway_s: float = 30.0
    """Difference of clocks that is forgiven, in seconds."""

    def algorithm_names(self) -> tuple[str, ...]:
        """Returns the algorithms."""
        return tuple(name.strip() for name in self.algorithms.split(",") if name.strip())

    def check(self) -> None:
        """Raises InvalidRequest for a wrong field."""
        unknown = [name for name in self.algorithm_names() if name not in TOKEN_ALGORITHMS]
        if unknown or not self.algorithm_names():
            raise invalid("tokens.algorithms", f"choose from {', '.join(TOKEN_ALGORITHMS)}: public keys only")
        for name in ("issuer", "audience") if self.keys else ():
            if not getattr(self, name):
                raise invalid(f"tokens.{name}", "is required with tokens.keys: a token for another server is refused")
        if not 0 <= self.leeway_s <= TOKEN_LEEWAY_MAX_S:
            raise invalid("tokens.leeway_s", f"is from 0 to {TOKEN_LEEWAY_MAX_S:g}")
