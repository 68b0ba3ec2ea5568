"""Calls that are refused before bytes move: each has its code and reason, and changes nothing."""

from typing import Any

import pytest

from kvgrpc.service.rpc.method import STANDING_BYTES_MAX
from kvgrpc.v1 import common_pb2, tensor_pb2
from tests.service.api import refused
from tests.service.engines import Engine, wait_until
from tests.service.tensors.conftest import Begin
from tests.service.tensors.stores import PAGE, PAGES, STORED, TENSORS, Store, data_of, described, name_of
from tests.service.values import dur, new_key

Pair = tuple[Store, Store]
DATA = data_of(2 * PAGE)
KEY = bytes(range(16))
INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tensor": name_of(KEY, "")}, INVALID),
        ({"description": described(2 * PAGE, dtype="")}, INVALID),
        ({"description": described(2 * PAGE, shape_sizes=[1 << 31] * 4)}, INVALID),
        ({"description": described(2 * PAGE, shape_sizes=[1] * 513)}, ("OUT_OF_RANGE", "LIMIT_EXCEEDED")),
        ({"description": described(3 * PAGE)}, ("INVALID_ARGUMENT", "BLOCK_COUNT_MISMATCH")),
        ({"description": described((PAGES + 1) * PAGE)}, ("OUT_OF_RANGE", "LIMIT_EXCEEDED")),
        ({"allocation_id": "b-0-0"}, ("NOT_FOUND", "BLOCK_NOT_ALLOCATED")),
        ({"allocation_id": ""}, INVALID),
        ({"ttl": dur(0.0)}, ("INVALID_ARGUMENT", "TTL_INVALID")),
        ({"timeout": dur(0.0)}, INVALID),
        ({"consumers": [common_pb2.PeerAddress()]}, INVALID),
        ({"consumers": [common_pb2.PeerAddress(address="a:1")] * 2}, INVALID),
        ({"consumers": [common_pb2.PeerAddress(address="a:1")] * 65}, ("OUT_OF_RANGE", "LIMIT_EXCEEDED")),
        ({"consumers": [common_pb2.PeerAddress(address="192.0.2.1:1")]}, ("PERMISSION_DENIED", "DIAL_REFUSED")),
        ({"grant": common_pb2.Grant(token=b"forged"), "allocation_id": None}, ("INVALID_ARGUMENT", "GRANT_INVALID")),
    ],
)
def test_a_put_that_is_wrong_is_refused_and_leaves_its_pages(
    stores: Pair, key: bytes, fields: dict[str, Any], error: tuple[str, str]
) -> None:
    p, _ = stores
    allocation = p.place(DATA)
    request = p.request(key, DATA, **({"allocation_id": allocation} | fields))
    with refused(p.api, *error):
        p.api.tensors.PutTensor(request)
    assert (p.listed(), p.used()) == ({}, 2)
    p.put(key, DATA, allocation_id=allocation)
    assert p.release_tensors(key) == 1


def test_a_get_that_is_wrong_is_refused(stores: Pair, key: bytes) -> None:
    _, d = stores
    with refused(d.api, *INVALID):
        d.get_tensor(b"short")
    with refused(d.api, *INVALID):
        d.get_tensor(key, as_offer=True, source=d)
    with refused(d.api, "PERMISSION_DENIED", "DIAL_REFUSED"):
        wanted = d.wanted(key)
        wanted.source.address = "192.0.2.1:1"
        d.api.tensors.GetTensor(wanted)
    with refused(d.api, *INVALID):
        d.release_tensors(b"")
    foreign = tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=[name_of(new_key())])
    with refused(d.api, *INVALID):
        d.api.tensors.ReleaseTensors(foreign)


def test_a_long_release_that_is_kept_while_its_source_is_told_is_refused(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    names = [name_of(key, f"{'n' * 200}{number}") for number in range(80)]
    request = tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=[name_of(key), *names])
    assert request.ByteSize() > STANDING_BYTES_MAX
    there = tensor_pb2.ReleaseTensorsRequest(source=common_pb2.PeerAddress(address=p.address))
    there.MergeFrom(request)
    with refused(d.api, "OUT_OF_RANGE", "LIMIT_EXCEEDED"):
        d.api.tensors.ReleaseTensors(there)
    assert d.listed() == {"a": STORED}
    assert d.api.tensors.ReleaseTensors(request).released_count == 1
    p.release_tensors(key)


def test_a_release_at_a_source_that_may_not_be_dialled_releases_nothing(stores: Pair, key: bytes) -> None:
    p, d = stores
    p.put(key, DATA, [d])
    for address, error in (("192.0.2.1:1", ("PERMISSION_DENIED", "DIAL_REFUSED")), ("", INVALID)):
        with refused(d.api, *error):
            d.give_back(key, address)
    assert d.listed() == {"a": STORED}
    d.release_tensors(key)


@pytest.mark.parametrize("source", [False, True])
def test_what_never_comes_ends_the_wait_with_its_phase(stores: Pair, key: bytes, source: bool) -> None:
    p, d = stores
    refusal = d.api.refusal(lambda: d.get_tensor(key, source=p if source else None, timeout=dur(0.2)))
    assert (refusal.code, refusal.reason, refusal.metadata["phase"]) == ("DEADLINE_EXCEEDED", "DEADLINE", "tensor")


OTHERS = {"dtype": "int8", "shape_sizes": [1, 2 * PAGE], "scalar": True, "layer": 3, "content_digest": b"other"}


@pytest.mark.parametrize("expected", [{name: value} for name, value in OTHERS.items()], ids=str)
@pytest.mark.parametrize("fetched", [False, True])
def test_another_tensor_than_is_expected_is_refused_before_bytes_move(
    stores: Pair, key: bytes, expected: dict[str, Any], fetched: bool
) -> None:
    p, d = stores
    p.put(key, DATA, [] if fetched else [d])
    wanted = d.wanted(key, source=p if fetched else None, expected=tensor_pb2.ExpectedTensor(**expected))
    moved = len(d.transfers_state())
    with refused(d.api, "FAILED_PRECONDITION", "CONTENT_MISMATCH"):
        d.api.tensors.GetTensor(wanted)
    assert len(d.transfers_state()) == moved
    assert d.get_tensor(key, source=p) == DATA
    for store in stores:
        store.release_tensors(key)


def test_a_put_of_what_a_waiting_engine_does_not_expect_is_refused_at_both(stores: Pair, key: bytes) -> None:
    p, d = stores
    wanted = d.wanted(key, expected=tensor_pb2.ExpectedTensor(dtype="float32"))
    call = d.api.tensors.GetTensor.future(wanted)
    wait_until(lambda: d.status().waiting_count == 1)
    with refused(p.api, "FAILED_PRECONDITION", "CONTENT_MISMATCH"):
        p.put(key, DATA, [d])
    assert d.api.refusal(call.result).reason == "CONTENT_MISMATCH"
    wait_until(lambda: p.used() == 0)


@pytest.mark.parametrize(
    "lie",
    [
        {"description": described(2 * PAGE, dtype="int8")},
        {"description": described(2 * PAGE, shape_sizes=[2, PAGE])},
        {"description": described(2 * PAGE, content_digest=b"another prompt")},
        {"tensor": "b"},
    ],
    ids=str,
)
def test_a_relayed_description_that_is_not_the_sources_moves_nothing(
    stores: Pair, key: bytes, lie: dict[str, Any]
) -> None:
    p, d = stores
    p.put(key, DATA)
    offer = p.api.tensors.GetTensor(p.wanted(key, as_offer=True))
    told: dict[str, Any] = {"tensor": name_of(key), "description": offer.tensor.description} | lie
    if told["tensor"] == "b":
        told["tensor"] = name_of(key, "b")
    relayed = tensor_pb2.PutTensorRequest(grant=offer.grant, timeout=dur(10.0), **told)
    with refused(d.api, "FAILED_PRECONDITION", "CONTENT_MISMATCH"):
        d.api.tensors.PutTensor(relayed)
    assert (d.listed(), d.used()) == ({}, 0)
    p.release_tensors(key)


def test_tensors_of_other_weights_are_refused(begin: Begin, stores: Pair, key: bytes) -> None:
    _, d = stores
    (other,) = begin(TENSORS, flags=("--weights-revision", "other"))
    with refused(other.api, "FAILED_PRECONDITION", "WEIGHTS_MISMATCH"):
        other.put(key, DATA, [d])
    wait_until(lambda: other.used() == 0)


def test_stores_with_other_pages_are_refused_when_they_meet(begin: Begin, stores: Pair, key: bytes) -> None:
    p, _ = stores
    (other,) = begin(TENSORS.replace(str(PAGE), str(2 * PAGE)).replace(str(PAGES * PAGE), str(PAGES * 2 * PAGE)))
    with refused(p.api, "FAILED_PRECONDITION", "INCOMPATIBLE_POOLS"):
        p.put(key, DATA, [other])
    wait_until(lambda: p.used() == 0)


def test_an_engine_whose_pool_is_no_store_moves_no_tensors(source: Engine, stores: Pair, key: bytes) -> None:
    p, _ = stores
    calls: list[Any] = [
        lambda: source.api.tensors.PutTensor(p.request(key, DATA, allocation_id="b-1")),
        lambda: source.api.tensors.GetTensor(p.wanted(key)),
        lambda: source.api.tensors.GetStagingStatus(tensor_pb2.GetStagingStatusRequest()),
    ]
    for call in calls:
        with refused(source.api, "FAILED_PRECONDITION", "POOL_KIND_MISMATCH"):
            call()


def test_a_wrong_engine_at_the_address_is_refused(stores: Pair, key: bytes) -> None:
    p, d = stores
    place = common_pb2.PeerAddress(address=d.address, engine_id="somebody-else")
    with refused(p.api, "FAILED_PRECONDITION", "WRONG_ENGINE"):
        p.put(key, DATA, consumers=[place])
    d.release_tensors(key)


def test_a_tensor_of_its_own_is_given_by_no_store(stores: Pair, key: bytes) -> None:
    p, _ = stores
    p.put(key, DATA)
    with refused(p.api, "ALREADY_EXISTS", "TRANSFER_EXISTS"):
        p.get_tensor(key)
    p.release_tensors(key)
