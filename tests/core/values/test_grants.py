"""Grants: an issuer accepts those that it signed, and nothing else."""

import hmac
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.grants import (
    GRANT_BYTES_MAX,
    AccessKind,
    Claims,
    OnAbort,
    from_json,
    mint,
    read_claims,
    signing_key,
    to_json,
    verify,
)
from kvgrpc.errors import Aborted, InvalidRequest, PermissionDenied, PreconditionFailed, Reason
from kvgrpc.v1 import common_pb2
from kvgrpc.wire import values
from tests.core.nodes import refused
from tests.core.values import vectors

CASES: list[dict[str, Any]] = json.loads((vectors.FOLDER / "grant.json").read_text(encoding="utf-8"))["cases"]
KEY = signing_key(b"s" * 32)
CLAIMS = Claims(AccessKind.READ, "p", 7, "host:1", "l-1", b"k" * 16, 30.0, 3, 40)
TOKEN = mint(CLAIMS, KEY)


def claims_of(case: dict[str, Any]) -> Claims:
    return Claims(
        AccessKind[case["access"]],
        case["engine_id"],
        int(case["incarnation"], 16),
        case["address"],
        case["lease_id"],
        bytes.fromhex(case["transfer_key"]),
        case["ttl_ms"] / 1000,
        case["block_count"],
        case["token_count"],
        OnAbort[case["on_abort"]],
        case["tenant"],
        case.get("request_time_us", 0),
    )


def message(claims: Claims, token: bytes) -> bytes:
    """Returns the encoded Grant message."""
    made = common_pb2.Grant(
        token=token,
        access=common_pb2.ACCESS_KIND_READ,
        engine_id=claims.engine_id,
        incarnation=claims.incarnation,
        address=claims.address,
        lease_id=claims.lease_id,
        block_count=claims.block_count,
        token_count=claims.token_count,
    )
    made.ttl.seconds, made.ttl.nanos = int(claims.ttl_s), 999_999_999
    return made.SerializeToString()


def test_the_committed_vectors_are_what_the_text_of_the_encoding_says() -> None:
    assert (vectors.FOLDER / "grant.json").read_text(encoding="utf-8") == vectors.text("grant.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_grants_are_those_of_the_committed_vectors(case: dict[str, Any]) -> None:
    claims, key = claims_of(case), signing_key(bytes.fromhex(case["session_secret"]))
    token = mint(claims, key)
    assert token.hex() == case["token"]
    assert verify(token, key, claims.engine_id, claims.incarnation, claims.access) == claims
    assert to_json(token) == case["kv_transfer_params"]
    assert from_json(case["kv_transfer_params"]) == token


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


@given(
    st.builds(
        Claims,
        access=st.sampled_from(AccessKind),
        engine_id=TEXT,
        incarnation=st.integers(0, 2**64 - 1),
        address=TEXT,
        lease_id=TEXT,
        transfer_key=st.binary(min_size=16, max_size=32),
        ttl_s=st.integers(0, 10**6).map(float),
        block_count=st.integers(0, 2**32 - 1),
        token_count=st.integers(0, 2**32 - 1),
        on_abort=st.sampled_from(OnAbort),
        tenant=TEXT,
        request_time_us=st.integers(0, 2**64 - 1),
    )
)
def test_what_is_minted_is_read_back_and_fits_into_a_grant_message(claims: Claims) -> None:
    token = mint(claims, KEY)
    assert read_claims(token) == claims
    assert verify(token, KEY, claims.engine_id, claims.incarnation, claims.access) == claims
    assert from_json(json.loads(json.dumps(to_json(token)))) == token
    assert len(message(claims, token)) <= GRANT_BYTES_MAX


def largest(**fields: Any) -> Claims:
    """Makes claims whose numbers take the most bytes."""
    numbers = {
        "incarnation": 2**64 - 1,
        "ttl_s": (2**32 - 1) / 1000,
        "block_count": 2**32 - 1,
        "token_count": 2**32 - 1,
    }
    return replace(CLAIMS, **{**numbers, **fields})


def test_the_longest_ids_that_are_minted_make_a_grant_message_within_the_bound() -> None:
    def claims(length: int) -> Claims:
        return largest(
            engine_id="e" * length, address="a" * length, lease_id="l" * 35, transfer_key=b"k" * 32, tenant="t" * 16
        )

    longest = 0
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        for length in range(1, 200):
            token = mint(claims(length), KEY)
            longest = length
            assert len(message(claims(length), token)) <= GRANT_BYTES_MAX
    assert longest >= 60


@pytest.mark.parametrize("field", ["engine_id", "address", "lease_id", "tenant", "transfer_key"])
def test_whatever_makes_a_grant_long_its_message_stays_within_the_bound(field: str) -> None:
    fits = []
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        for length in range(16, 257):
            long = b"x" * length if field == "transfer_key" else "x" * length
            fits.append(values.grant(mint(largest(**{field: long}), KEY)).ByteSize())
    assert len(fits) > 60
    assert max(fits) <= GRANT_BYTES_MAX


@pytest.mark.parametrize("field", ["tenant", "transfer_key"])
def test_what_the_message_does_not_repeat_may_be_as_long_as_its_length_byte_says(field: str) -> None:
    long = b"x" * 255 if field == "transfer_key" else "x" * 255
    claims = largest(**{field: long})
    assert read_claims(mint(claims, KEY)) == claims


def test_the_grant_message_repeats_what_the_token_says() -> None:
    made = values.grant(TOKEN)
    assert values.claims_of(made) == CLAIMS
    assert (made.engine_id, made.incarnation, made.address, made.lease_id) == ("p", 7, "host:1", "l-1")
    assert (made.ttl.seconds, made.block_count, made.token_count) == (30, 3, 40)
    assert made.access == common_pb2.ACCESS_KIND_READ


def test_a_ttl_too_long_for_the_hint_is_cut() -> None:
    assert read_claims(mint(replace(CLAIMS, ttl_s=1e12), KEY)).ttl_s == (2**32 - 1) / 1000


@pytest.mark.parametrize("field", ["engine_id", "address", "lease_id", "tenant"])
def test_text_too_long_for_its_length_byte_is_refused(field: str) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        mint(largest(**{field: "x" * 256}), KEY)


def test_a_token_changed_at_any_byte_to_any_other_is_refused() -> None:
    for at in range(len(TOKEN)):
        for byte in set(range(256)) - {TOKEN[at]}:
            forged = TOKEN[:at] + bytes([byte]) + TOKEN[at + 1 :]
            with pytest.raises((InvalidRequest, PermissionDenied, Aborted)) as caught:
                verify(forged, KEY, "p", 7, AccessKind.READ)
            assert caught.value.reason in FORGED


FORGED = {Reason.GRANT_INVALID, Reason.GRANT_FOREIGN, Reason.INCARNATION_CHANGED}


@given(st.integers(0, len(TOKEN)), st.integers(0, len(TOKEN)), st.binary(max_size=40))
def test_a_token_with_any_part_replaced_is_refused(start: int, end: int, part: bytes) -> None:
    forged = TOKEN[: min(start, end)] + part + TOKEN[max(start, end) :]
    if forged == TOKEN:
        return
    with pytest.raises((InvalidRequest, PermissionDenied, Aborted)) as caught:
        verify(forged, KEY, "p", 7, AccessKind.READ)
    assert caught.value.reason in FORGED


@pytest.mark.parametrize(
    ("at", "byte"),
    [(0, 2), (1, 0), (1, 3), (2, 0), (2, 3), (24, 0xFF)],
    ids=["version", "no access", "unknown access", "no on_abort", "unknown on_abort", "engine id that is not UTF-8"],
)
def test_what_no_mint_writes_is_no_grant_even_when_it_is_signed(at: int, byte: int) -> None:
    payload = bytearray(TOKEN[:-32])
    payload[at] = byte
    signed = bytes(payload) + hmac.digest(KEY, bytes(payload), "sha256")
    with refused(Reason.GRANT_INVALID, InvalidRequest):
        verify(signed, KEY, "p", 7, AccessKind.READ)


def test_a_token_cut_at_any_length_is_refused() -> None:
    for length in range(len(TOKEN)):
        with pytest.raises((InvalidRequest, PermissionDenied)):
            verify(TOKEN[:length], KEY, "p", 7, AccessKind.READ)


def test_a_token_with_something_after_it_is_refused() -> None:
    for tail in (b"\0", b"x" * 32, TOKEN):
        with pytest.raises((InvalidRequest, PermissionDenied)):
            verify(TOKEN + tail, KEY, "p", 7, AccessKind.READ)


@given(st.binary(max_size=400))
def test_no_bytes_break_the_reader(token: bytes) -> None:
    with refused(Reason.GRANT_INVALID, InvalidRequest):
        read_claims(token)


def test_a_token_is_verified_each_time_however_often_it_was_read_or_found_right() -> None:
    forged = TOKEN[:-1] + bytes([TOKEN[-1] ^ 1])
    assert read_claims(forged) == verify(TOKEN, KEY, "p", 7, AccessKind.READ)
    for _ in range(2):
        with refused(Reason.GRANT_INVALID, PermissionDenied):
            verify(forged, KEY, "p", 7, AccessKind.READ)
        with refused(Reason.GRANT_INVALID, PermissionDenied):
            verify(TOKEN, signing_key(b"t" * 32), "p", 7, AccessKind.READ)
        with refused(Reason.INCARNATION_CHANGED, Aborted):
            verify(TOKEN, KEY, "p", 8, AccessKind.READ)


def test_the_grant_of_another_engine_is_foreign() -> None:
    with refused(Reason.GRANT_FOREIGN, PermissionDenied):
        verify(TOKEN, KEY, "q", 7, AccessKind.READ)


def test_the_grant_of_an_earlier_life_tells_to_start_over() -> None:
    with refused(Reason.INCARNATION_CHANGED, Aborted):
        verify(TOKEN, KEY, "p", 8, AccessKind.READ)


def test_a_grant_signed_with_another_key_is_refused() -> None:
    with refused(Reason.GRANT_INVALID, PermissionDenied):
        verify(TOKEN, signing_key(b"t" * 32), "p", 7, AccessKind.READ)


def test_a_grant_of_the_other_kind_is_refused() -> None:
    with refused(Reason.GRANT_WRONG_ACCESS, PreconditionFailed):
        verify(TOKEN, KEY, "p", 7, AccessKind.WRITE)


def test_a_transfer_key_with_too_few_random_bits_is_no_grant() -> None:
    with refused(Reason.GRANT_INVALID, InvalidRequest):
        read_claims(mint(replace(CLAIMS, transfer_key=b"k" * 15), KEY))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"kvgrpc_grant": 7},
        {"kvgrpc_grant": None},
        {"kvgrpc_grant": True},
        {"kvgrpc_grant": TOKEN},
        {"kvgrpc_grant": [to_json(TOKEN)["kvgrpc_grant"]]},
        {"kvgrpc_grant": {"token": to_json(TOKEN)["kvgrpc_grant"]}},
        {"kvgrpc_grant": ""},
        {"kvgrpc_grant": str(to_json(TOKEN)["kvgrpc_grant"])[:-5]},
        {"kvgrpc_grant": "not base64!"},
        {"kvgrpc_grant": "\ud800"},
        {"kvgrpc_grant": "AAAA"},
        {"remote_block_ids": [1, 2]},
    ],
)
def test_parameters_without_a_grant_are_refused(params: dict[str, Any]) -> None:
    with refused(Reason.GRANT_INVALID, InvalidRequest):
        from_json(params)


def test_only_the_token_is_read_from_the_parameters() -> None:
    params = {**to_json(TOKEN), "remote_engine_id": "q", "remote_num_tokens": 1, "remote_host": "evil"}
    assert read_claims(from_json(params)) == CLAIMS
    unknown = {**to_json(TOKEN), "tp_size": 8, "router": {"nested": [1, None]}, "remote_block_ids": None}
    assert read_claims(from_json(unknown)) == CLAIMS
    assert read_claims(from_json({"kvgrpc_grant": params["kvgrpc_grant"]})) == CLAIMS


def test_an_address_without_a_port_is_all_host() -> None:
    for address, host, port in (("h:1", "h", 1), ("h", "h", 0), ("h:x", "h:x", 0), ("[::1]:9", "[::1]", 9)):
        params = to_json(mint(replace(CLAIMS, address=address), KEY))
        assert (params["remote_host"], params["remote_port"]) == (host, port)
