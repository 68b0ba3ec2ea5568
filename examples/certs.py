"""`python -m examples.certs`: a small CA, and a folder of TLS files for each party. For trying TLS, and for tests.

The CA's key lies unencrypted beside its certificate. Whoever reads it can join: use a CA of yours in production.
"""

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvgrpc.tls import CA, TlsFiles

Name = x509.DNSName | x509.UniformResourceIdentifier | x509.IPAddress

CA_DAYS = 365
CA_KEY = "ca.key"
SKEW = timedelta(hours=1)
"""Time before now at which certificates begin, for machines whose clocks differ."""
PARTIES = ("p", "d", "router")
_CA_USAGE = x509.KeyUsage(
    digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
    key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
)  # fmt: skip

_PARTY_USAGE = x509.KeyUsage(
    digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
    key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


class Authority:
    """A CA that signs itself."""

    def __init__(self, name: str = "kvgrpc trial CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + timedelta(days=CA_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_CA_USAGE, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @classmethod
    def kept_in(cls, folder: Path) -> "Authority":
        """Returns the CA of a folder, which is made and written there if the folder has none. Raises OSError, and
        ValueError for files that hold none.
        """
        made, certificate, key = cls(), folder / CA, folder / CA_KEY
        if certificate.exists():
            found = load_pem_private_key(key.read_bytes(), None)
            if not isinstance(found, ec.EllipticCurvePrivateKey):
                raise ValueError(f"{key} is no key that this program made")
            made._key, made.certificate = found, x509.load_pem_x509_certificate(certificate.read_bytes())
            return made
        folder.mkdir(parents=True, exist_ok=True)
        _write_key(key, made._key)
        certificate.write_bytes(made.pem)
        return made

    @property
    def pem(self) -> bytes:
        """The CA's certificate."""
        return self.certificate.public_bytes(Encoding.PEM)

    def issue(
        self,
        folder: Path,
        names: Sequence[Name] = (x509.DNSName("localhost"),),
        begins: timedelta = -SKEW,
        ends: timedelta = timedelta(hours=1),
    ) -> TlsFiles:
        """Writes a new key, its certificate with those names, and this CA into the folder, as Kubernetes would."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_PARTY_USAGE, critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True)
        files = TlsFiles.in_folder(folder)
        files.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        _write_key(files.key, key)
        files.ca.write_bytes(self.pem)
        return files


def named(text: str) -> Name:
    """Returns a name by its form: a URI, an IP address, or else a DNS name."""
    if "://" in text:
        return x509.UniformResourceIdentifier(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def usual_names(party: str) -> list[Name]:
    """Returns the names of a party on this machine."""
    return [named(text) for text in (f"spiffe://kvgrpc.example/{party}", "localhost", "127.0.0.1")]


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the folders that the arguments ask for. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="make certs",
        description="Make a CA for trying TLS, and a folder with tls.crt, tls.key and ca.crt a party.",
    )
    parser.add_argument(
        "parties", nargs="*", default=PARTIES, metavar="PARTY[=NAME,...]",
        help="a folder's name, and the names in its certificate: URIs, DNS names and IP addresses. Without names: "
        f"spiffe://kvgrpc.example/PARTY, localhost and 127.0.0.1. Default: {' '.join(PARTIES)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("certs"), help="folder of the parties' folders (certs)")
    parser.add_argument("--days", type=float, default=30.0, help="how long the parties' certificates are valid (30)")
    given = parser.parse_args(arguments)
    try:
        authority = Authority.kept_in(given.out / "ca")
        for party in given.parties:
            name, _, texts = party.partition("=")
            if not name or Path(name).name != name or name == "ca":
                parser.error(f"{name or party!r} is no name for a party's folder")
            names = [named(text) for text in texts.split(",")] if texts else usual_names(name)
            authority.issue(given.out / name, names, ends=timedelta(days=given.days))
            print(f"{given.out / name}: {', '.join(str(one.value) for one in names)}")
    except (OSError, ValueError, OverflowError) as error:
        print(f"make certs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
