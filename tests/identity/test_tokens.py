"""Bearer tokens: which are taken, and which are not."""

import base64
import hmac
import json
import time
from pathlib import Path

import pytest

from kvgrpc.config import Config
from kvgrpc.config_security import TokenConfig
from kvgrpc.errors import InvalidRequest, Unauthenticated
from kvgrpc.service.identity.names import NAME_BYTES_MAX
from kvgrpc.service.identity.tokens import TOKEN_BYTES_MAX, TokenVerifier
from tests.identity.issuer import AUDIENCE, ISSUER, Issuer, bearer, unsigned

ISSUER_KEY = Issuer()


@pytest.fixture
def verifier(tmp_path: Path) -> TokenVerifier:
    return TokenVerifier(ISSUER_KEY.config(tmp_path / "key.pem"))


def test_the_subject_of_a_token_is_the_name_of_its_caller(verifier: TokenVerifier) -> None:
    assert verifier.name_of(bearer(ISSUER_KEY.token("system:serviceaccount:llm:router"))) == (
        "jwt:system:serviceaccount:llm:router"
    )


def test_a_subject_that_looks_like_another_kind_of_name_is_none(verifier: TokenVerifier) -> None:
    assert verifier.name_of(bearer(ISSUER_KEY.token("spiffe://a/b"))) == "jwt:spiffe://a/b"


def bad_tokens() -> dict[str, str]:
    """Returns tokens that no server may take."""
    good, now = ISSUER_KEY.claims(), time.time()
    es256 = {"alg": "ES256", "kid": "first"}
    signed = unsigned(good, {"alg": "HS256", "kid": "first"}).rpartition(".")[0]
    by_public_key = hmac.digest(ISSUER_KEY.public_pem, signed.encode(), "sha256")
    return {
        "no algorithm": unsigned(good, {"alg": "none"}),
        "no algorithm, in other letters": unsigned(good, {"alg": "nOnE", "kid": "first"}),
        "the public key as a secret": f"{signed}.{_text(by_public_key)}",
        "an algorithm of another kind of key": unsigned(good, {"alg": "RS256", "kid": "first"}, b"x" * 64),
        "an algorithm that is not configured": unsigned(good, {"alg": "ES512", "kid": "first"}, b"x" * 64),
        "no signature": unsigned(good, es256),
        "a wrong signature": unsigned(good, es256, b"\x01" * 64),
        "another issuer's key": Issuer().token(),
        "a foreign audience": ISSUER_KEY.token(aud="another server"),
        "no audience": ISSUER_KEY.token(aud=None),
        "a foreign issuer": ISSUER_KEY.token(iss="https://other.test"),
        "no issuer": ISSUER_KEY.token(iss=None),
        "no end": ISSUER_KEY.token(exp=None),
        "an end that is no time": ISSUER_KEY.token(exp="tomorrow"),
        "an end that is past": ISSUER_KEY.token(exp=now - 60),
        "a beginning that is to come": ISSUER_KEY.token(nbf=now + 60),
        "no subject": ISSUER_KEY.token(sub=None),
        "an empty subject": ISSUER_KEY.token(""),
        "a subject with a space": ISSUER_KEY.token("a b"),
        "a subject with a line": ISSUER_KEY.token("a\nb"),
        "a subject that is too long": ISSUER_KEY.token("a" * NAME_BYTES_MAX),
        "claims of a megabyte": ISSUER_KEY.token(more="x" * (1 << 20)),
        "a list in a list in a list": unsigned({"a": json.loads("[" * 500 + "]" * 500)}, es256),
        "no token": "",
        "three dots": "...",
        "no JSON": "YQ.YQ.YQ",
        "letters of other alphabets": "тест.тест.тест",
    }


def _text(data: bytes) -> str:
    return unsigned({}, {}, data).rpartition(".")[2]


def test_a_bad_token_is_refused_and_its_claims_are_not_repeated(verifier: TokenVerifier) -> None:
    wrong = []
    for what, token in bad_tokens().items():
        try:
            wrong.append((what, verifier.name_of(bearer(token))))
        except Unauthenticated as error:
            if "test" in str(error):
                wrong.append((what, str(error)))
    assert wrong == []


@pytest.mark.parametrize("value", ["", "Basic abc", "Bearer", "bearer", "\0", "Bearer  "])
def test_metadata_that_is_no_token_is_refused(verifier: TokenVerifier, value: str) -> None:
    with pytest.raises(Unauthenticated):
        verifier.name_of(value)


def test_clocks_may_differ_by_the_leeway_and_no_more(tmp_path: Path) -> None:
    verifier = TokenVerifier(ISSUER_KEY.config(tmp_path / "key.pem", leeway_s=100.0))
    now = time.time()
    assert verifier.name_of(bearer(ISSUER_KEY.token(exp=now - 50, nbf=now + 50)))
    for token in (ISSUER_KEY.token(exp=now - 150), ISSUER_KEY.token(nbf=now + 150)):
        with pytest.raises(Unauthenticated):
            verifier.name_of(bearer(token))


def test_a_token_that_was_taken_is_refused_after_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, token = TokenVerifier(ISSUER_KEY.config(tmp_path / "key.pem")), bearer(ISSUER_KEY.token())
    verifier.name_of(token)
    later = time.time() + 700
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(Unauthenticated):
        verifier.name_of(token)


def test_keys_of_a_set_are_found_by_id_and_change_with_the_file(tmp_path: Path) -> None:
    first, second, path = Issuer("first"), Issuer("second"), tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [first.row(), second.row()]}))
    verifier = TokenVerifier(TokenConfig(keys=str(path), issuer=ISSUER, audience=AUDIENCE))
    tokens = [bearer(one.token()) for one in (first, second)]
    assert [verifier.name_of(token) for token in tokens] == ["jwt:router"] * 2
    assert not verifier.look()
    path.write_text(json.dumps({"keys": [second.row()]}))
    assert verifier.look()
    assert verifier.name_of(tokens[1]) == "jwt:router"
    with pytest.raises(Unauthenticated):
        verifier.name_of(tokens[0])


def test_a_broken_key_file_keeps_the_old_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key.pem"
    verifier, token = TokenVerifier(ISSUER_KEY.config(path)), bearer(ISSUER_KEY.token())
    for content in (b"", b"{", b"nothing", b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', b'{"keys": []}'):
        path.write_bytes(content)
        assert not verifier.look()
        assert verifier.name_of(token) == "jwt:router"
    path.unlink()
    assert not verifier.look()
    assert verifier.name_of(token) == "jwt:router"
    assert "old content stays in use" in caplog.text


def test_a_set_with_a_secret_or_without_keys_stops_the_start(tmp_path: Path) -> None:
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "a"}
    private, twice, path = Issuer().row() | {"d": "c2VjcmV0"}, Issuer("same").row(), tmp_path / "jwks.json"
    odd = [twice | {"kid": ["a"]}, twice | {"alg": ["ES256"]}, twice | {"crv": 5}, twice | {"x": 5}, {"kty": []}]
    for keys in ([secret], [private], [twice, twice], "first", [3], [], *[[row] for row in odd]):
        path.write_text(json.dumps({"keys": keys}))
        with pytest.raises(InvalidRequest):
            TokenVerifier(TokenConfig(keys=str(path), issuer=ISSUER, audience=AUDIENCE))


def test_a_key_of_a_kind_that_nobody_knows_stops_the_start(tmp_path: Path) -> None:
    """An elliptic curve with its own parameters is well-formed PEM, and no library takes it."""
    path = tmp_path / "key.pem"
    body = base64.b64encode(bytes.fromhex("301306072a8648ce3d020106082a8648ce3d0301ff0303000400")).decode()
    for text in (f"-----BEGIN PUBLIC KEY-----\n{body}\n-----END PUBLIC KEY-----\n", "-----BEGIN PUBLIC KEY-----\n"):
        path.write_text(text)
        with pytest.raises(InvalidRequest):
            TokenVerifier(TokenConfig(keys=str(path), issuer=ISSUER, audience=AUDIENCE))


@pytest.mark.parametrize(
    "changed",
    [
        {"algorithms": "HS256"}, {"algorithms": "none"}, {"algorithms": "ES256,none"}, {"algorithms": ""},
        {"issuer": ""}, {"audience": ""}, {"leeway_s": -1.0}, {"leeway_s": 1e9}, {"leeway_s": float("nan")},
    ],
)  # fmt: skip
def test_settings_that_would_take_any_token_are_refused(changed: dict[str, object]) -> None:
    given = {"keys": "key.pem", "issuer": ISSUER, "audience": AUDIENCE} | changed
    with pytest.raises(InvalidRequest):
        Config(tokens=TokenConfig(**given))  # type: ignore[arg-type]  # of any type


def test_a_long_token_costs_no_signature(verifier: TokenVerifier) -> None:
    with pytest.raises(Unauthenticated, match=f"{TOKEN_BYTES_MAX}"):
        verifier.name_of(bearer("a" * (TOKEN_BYTES_MAX + 1)))
