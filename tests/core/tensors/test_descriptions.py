"""Names and descriptions of tensors: what is valid, what is compared, and the content that a tensor's lease has."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.core.tensors.descriptions import (
    ANY,
    Description,
    ExpectedTensor,
    Get,
    NamedTensor,
    Put,
    Release,
    TensorId,
    content_of,
)
from kvgrpc.core.tensors.store_layout import page_bytes_of, pages_for, store_layout
from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.errors import InvalidRequest, PreconditionFailed, Reason

KEY = b"k" * 16
FILE = json.loads((Path(__file__).parents[3] / "proto" / "vectors" / "tensor.json").read_text())
VECTORS = FILE["cases"]
PLAIN = Description("float32", (2, 3), 24, 1, b"prompt")


def changed(**fields: Any) -> Description:
    same: dict[str, Any] = {"dtype": "float32", "shape": (2, 3), "nbytes": 24, "layer": 1, "content_digest": b"prompt"}
    return Description(**(same | fields))


@pytest.mark.parametrize(
    ("key", "name", "part"),
    [(b"short", "a", 0), (KEY, "", 0), (KEY, "n" * 257, 0), (KEY, "ü" * 129, 0), (KEY, "a", -1), (KEY, "a", 1 << 32)],
)
def test_a_name_that_is_none_is_refused(key: bytes, name: str, part: int) -> None:
    with pytest.raises(InvalidRequest):
        TensorId(key, name, part)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dtype": "float128"}, "description.dtype"),
        ({"dtype": "x" * 100_000}, "description.dtype"),
        ({"shape": (0, 3)}, "description.shape_sizes"),
        ({"shape": (1,) * 17}, "description.shape_sizes"),
        ({"shape": (1 << 62, 1 << 62, 1 << 62)}, "description.shape_sizes"),
        ({"nbytes": 25}, "description.nbytes"),
        ({"nbytes": -24}, "description.nbytes"),
        ({"layer": -1}, "description.layer"),
        ({"layer": 1 << 16}, "description.layer"),
        ({"content_digest": b"d" * 65}, "description.content_digest"),
    ],
)
def test_a_description_that_describes_no_tensor_is_refused_by_its_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        changed(**fields)
    assert [violation.field for violation in raised.value.violations] == [named]


def test_a_tensor_without_dimensions_has_one_element() -> None:
    assert Description("complex128", (), 16).nbytes == 16


@pytest.mark.parametrize(
    "expected",
    [
        ExpectedTensor(),
        ExpectedTensor("float32", (2, 3), 1, b"prompt"),
        ExpectedTensor(shape=(2, 3)),
        ExpectedTensor(content_digest=b"prompt"),
    ],
)
def test_what_is_expected_and_comes_is_taken(expected: ExpectedTensor) -> None:
    expected.check(PLAIN)


@pytest.mark.parametrize(
    ("expected", "field"),
    [
        (ExpectedTensor(dtype="float16"), "dtype"),
        (ExpectedTensor(shape=(3, 2)), "shape_sizes"),
        (ExpectedTensor(shape=()), "shape_sizes"),
        (ExpectedTensor(layer=0), "layer"),
        (ExpectedTensor(content_digest=b"other"), "content_digest"),
    ],
)
def test_another_tensor_than_is_expected_is_refused_with_how_it_differs(expected: ExpectedTensor, field: str) -> None:
    with pytest.raises(PreconditionFailed) as raised:
        expected.check(PLAIN)
    assert raised.value.reason is Reason.CONTENT_MISMATCH
    assert [violation.field for violation in raised.value.violations] == [f"expected.{field}"]


def tensor_of(case: dict[str, Any]) -> NamedTensor:
    id_ = TensorId(bytes.fromhex(case["transfer_key"]), case["tensor_name"], case["part"])
    what = Description(
        case["dtype"], tuple(case["shape_sizes"]), case["nbytes"], case["layer"], bytes.fromhex(case["content_digest"])
    )
    return NamedTensor(id_, what)


@pytest.mark.parametrize("bundle", FILE["bundles"], ids=lambda bundle: bundle["name"])
def test_contents_of_bundles_are_those_of_the_vectors(bundle: dict[str, Any]) -> None:
    cases = [case for name in bundle["tensors"] for case in VECTORS if case["name"] == name]
    made = content_of([tensor_of(case) for case in cases], cases[0]["weights_revision"], 3)
    assert (made.opaque.hex(), made.tokens) == (bundle["opaque_id"], 3)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_contents_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    made = content_of([tensor_of(case)], case["weights_revision"], 3)
    assert (made.opaque.hex(), made.tokens) == (case["opaque_id"], 3)


def test_every_field_of_a_tensor_makes_another_content() -> None:
    ids = [TensorId(KEY, "a"), TensorId(KEY, "b"), TensorId(KEY, "a", 1), TensorId(b"o" * 16, "a")]
    found = [content_of([NamedTensor(id_, PLAIN)], "w", 1) for id_ in ids]
    others = [changed(dtype="int32"), changed(shape=(3, 2)), changed(shape=(6,)), changed(layer=None), changed(layer=2)]
    others += [changed(content_digest=b""), changed(content_digest=b"promp")]
    found += [content_of([NamedTensor(ids[0], other)], "w", 1) for other in others]
    found += [content_of([NamedTensor(ids[0], PLAIN)], "v", 1), content_of([NamedTensor(ids[0], PLAIN)], "", 1)]
    assert len({content.opaque for content in found}) == len(found)


def test_a_store_has_as_many_whole_pages_as_fit() -> None:
    layout = store_layout(5 * 65536 + 1)
    assert (layout.groups[0].blocks, layout.block_bytes(0), layout.total_bytes) == (5, 65536, 5 * 65536)
    assert page_bytes_of(layout) == 65536


def test_stores_differ_by_their_pages_and_not_by_their_sizes() -> None:
    prints = [store_layout(nbytes, page).fingerprint() for nbytes, page in ((1 << 20, 65536), (1 << 22, 65536))]
    assert prints[0] == prints[1] != store_layout(1 << 20, 4096).fingerprint()


@pytest.mark.parametrize(
    ("nbytes", "page"), [(1 << 20, 1000), (1 << 20, 2048), (100, 4096), (1 << 62, 4096), (1, 1 << 31)]
)
def test_a_store_of_no_pages_is_refused(nbytes: int, page: int) -> None:
    with pytest.raises(InvalidRequest):
        store_layout(nbytes, page)


def test_a_pool_of_blocks_is_no_store() -> None:
    group = Group("full", GroupKind.FULL_ATTENTION, 2, 16, 8, 1, 8, "float16")
    assert page_bytes_of(uniform_layout(group, 512)) == 0
    assert page_bytes_of(uniform_layout(Group("pages", GroupKind.MLA, 1, 1, 8, 1, 5000, "uint8"), 5000)) == 0


@pytest.mark.parametrize(("nbytes", "pages"), [(1, 1), (4096, 1), (4097, 2)])
def test_a_tensor_takes_whole_pages(nbytes: int, pages: int) -> None:
    assert pages_for(nbytes, 4096) == pages


def test_a_call_that_says_nothing_more_asks_for_what_is_usual() -> None:
    id_ = TensorId(KEY, "a")
    put, get = Put(id_, PLAIN, "b-1"), Get(id_, ANY)
    assert (put.consumers, put.consumer_count, put.asynchronous, get.as_offer) == ((), 1, False, False)
    assert Release(KEY).names == ()
