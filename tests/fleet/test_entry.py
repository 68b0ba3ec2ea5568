"""Entries: what is published is read again, and anything else is refused."""

import json

import pytest
from hypothesis import given, strategies as st

from kvgrpc.errors import InvalidRequest
from kvgrpc.fleet.entry import ENTRY_BYTES_MAX, ITEMS_MAX, TEXT_BYTES_MAX, EngineRole, read_entry
from tests.fleet.entries import ENTRY, entry


def test_a_published_entry_is_read_again() -> None:
    for one in (ENTRY, entry(role=EngineRole.DECODE, draining=True), entry(addresses=("[::1]:1", "p.example:2"))):
        assert read_entry(one.to_json()) == one


def test_an_unknown_key_is_left_out_so_that_later_versions_may_add_some() -> None:
    assert read_entry(json.dumps(json.loads(ENTRY.to_json()) | {"later": [1]}).encode()) == ENTRY


def test_a_wrong_entry_is_refused() -> None:
    wrong = [
        {"engine_id": ""}, {"engine_id": 1}, {"engine_id": "a\nb"}, {"engine_id": "x" * (TEXT_BYTES_MAX + 1)},
        {"addresses": []}, {"addresses": "10.0.0.1:1"}, {"addresses": ["a:1"] * (ITEMS_MAX + 1)},
        {"addresses": ["unix:/x"]}, {"addresses": ["unix:///x:1"]}, {"addresses": ["a"]}, {"addresses": ["a:0"]},
        {"addresses": ["a:65536"]}, {"addresses": ["a:b:1"]}, {"addresses": [":1"]}, {"incarnation": -1},
        {"incarnation": True}, {"incarnation": 1 << 63}, {"life": 0.5}, {"role": "king"}, {"role": []},
        {"draining": 1}, {"data_paths": [1]}, {"model": None},
    ]  # fmt: skip
    known = json.loads(ENTRY.to_json())
    taken = []
    for change in wrong:
        try:
            taken.append((change, read_entry(json.dumps(known | change).encode())))
        except InvalidRequest:
            continue
    assert taken == []


def test_an_entry_that_nobody_would_read_is_not_published() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {ENTRY_BYTES_MAX} bytes"):
        entry(addresses=tuple(f"{'a' * 245}:{port}" for port in range(1, 9)), model="m" * 250).to_json()


@given(st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_entry(data)


def test_deep_json_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        read_entry(b"[" * ENTRY_BYTES_MAX)
