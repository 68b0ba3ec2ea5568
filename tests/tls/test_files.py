"""TLS files: what is refused at the start, and what a change of the files does."""

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from kvgrpc.errors import InvalidRequest
from kvgrpc.tls import FILE_BYTES_MAX, Tls, TlsFiles, read
from tests.tls.authority import Authority, Name

CA = Authority()


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return CA.issue(tmp_path / "own")


def _key_of_another(files: TlsFiles) -> None:
    shutil.copy(CA.issue(files.key.parent / "other").key, files.key)


SPOILED: dict[str, tuple[Callable[[TlsFiles], object], str, str]] = {
    "no certificate": (lambda files: files.cert.unlink(), "tls.cert", "cannot be read: No such file"),
    "no key": (lambda files: files.key.unlink(), "tls.key", "cannot be read: No such file"),
    "no CA": (lambda files: files.ca.unlink(), "tls.ca", "cannot be read: No such file"),
    "half a certificate": (
        lambda files: files.cert.write_bytes(files.cert.read_bytes()[:200]), "tls.cert", "holds no certificate",
    ),
    "half a key": (lambda files: files.key.write_bytes(files.key.read_bytes()[:80]), "tls.key", "no private key"),
    "an empty CA": (lambda files: files.ca.write_bytes(b""), "tls.ca", "holds no certificate"),
    "the key of another": (_key_of_another, "tls.key", "is not the key of the certificate"),
    "a file that is too long": (
        lambda files: files.ca.write_bytes(b"x" * (FILE_BYTES_MAX + 1)), "tls.ca", f"more than {FILE_BYTES_MAX} bytes",
    ),
    "an expired certificate": (
        lambda files: CA.issue(files.cert.parent, ends=timedelta(seconds=-1)), "tls.cert", "is valid from",
    ),
    "a certificate of tomorrow": (
        lambda files: CA.issue(files.cert.parent, begins=timedelta(minutes=50)), "tls.cert", "is valid from",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_files_that_are_not_usable_are_refused_by_name(files: TlsFiles, case: str) -> None:
    spoil, field, why = SPOILED[case]
    spoil(files)
    with pytest.raises(InvalidRequest) as refused:
        Tls(files)
    (violation,) = refused.value.violations
    assert violation.field == field
    assert why in violation.description


@pytest.mark.parametrize("case", SPOILED)
def test_files_that_become_unusable_leave_the_old_identity_and_say_why(files: TlsFiles, case: str) -> None:
    tls = Tls(files)
    before = tls.identity
    spoil, _, why = SPOILED[case]
    spoil(files)
    assert not tls.look()
    assert tls.identity is before
    assert why in tls.error


def test_usable_files_come_into_use_after_unusable_ones(files: TlsFiles) -> None:
    tls = Tls(files)
    files.key.write_bytes(b"")
    tls.look()
    CA.issue(files.cert.parent, [x509.DNSName("renewed")])
    assert tls.look()
    assert (tls.identity.names, tls.error, tls.changes) == (("renewed",), "", 1)


def test_files_that_are_written_again_with_the_same_content_are_no_change(files: TlsFiles) -> None:
    tls = Tls(files)
    files.cert.write_bytes(files.cert.read_bytes())
    assert not tls.look()
    assert tls.changes == 0


def test_names_are_the_alternative_names_uris_first(tmp_path: Path) -> None:
    names: list[Name] = [x509.DNSName("p.example"), x509.UniformResourceIdentifier("spiffe://example/p")]
    assert read(CA.issue(tmp_path, names)).names == ("spiffe://example/p", "p.example")


def test_no_secret_is_in_the_text_of_an_identity(files: TlsFiles) -> None:
    shown = repr(read(files))
    assert "PRIVATE" not in shown
    assert "BEGIN" not in shown
