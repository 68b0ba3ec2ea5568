"""docs/integrating.md on layouts: its code runs, and the core bridges and refuses what the page says."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest

from kvgrpc.core.tensors.store_layout import store_layout
from kvgrpc.core.values.bridge import RUN_BYTES_MIN, STAGED_AT_ONCE_BYTES, STAGING_BYTES, Bridge, BridgeSide
from kvgrpc.core.values.compatibility import CHECKSUMS, compare
from kvgrpc.core.values.head_shares import check_heads
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, Section, TensorKind, uniform_layout
from kvgrpc.core.values.obstacles import ROWS_MAX, differences
from kvgrpc.errors import InvalidRequest
from tests.client.serving import served
from tests.core.nodes import describe
from tests.docs.pages import DOCS, code, plain, section, tables

PAGE = DOCS / "integrating.md"
TEXT = section(PAGE, "## What the KV cache looks like")
*POOLS, ASKED = code(TEXT, "python")
PICTURES = sorted(set(re.findall(r"\]\(([\w-]+\.svg)\)", TEXT)))


@cache
def described() -> dict[str, Any]:
    """Returns the names that the page's code defines, up to the call of a server."""
    found: dict[str, Any] = {}
    for program in POOLS:
        exec(compile(program, PAGE, "exec"), found)
    return found


def on_ranks(pool: PoolLayout, ranks: int) -> BridgeSide:
    """Returns a pool of the page, which is one of two ranks, as one of `ranks` ranks."""

    def scaled(nbytes: int) -> int:
        return nbytes * 2 // ranks

    regions = tuple(
        replace(
            region,
            offset=scaled(region.offset),
            stride_bytes=scaled(region.stride_bytes),
            block_bytes=scaled(region.block_bytes),
            strides=region.strides and region.strides._replace(layer=scaled(region.strides.layer)),
        )
        for region in pool.regions
    )
    return BridgeSide(
        PoolLayout((replace(pool.groups[0], kv_heads=8 // ranks),), regions, scaled(pool.total_bytes)), ranks
    )


def side(cell: str, source: str = "") -> BridgeSide:
    """Returns the side that a cell of the table of bridges describes."""
    words = cell.replace("the same", source.partition(",")[0]).split(", ")
    ranks = next((int(word.split()[0]) for word in words if word.endswith("ranks")), 1)
    for packing, name in (("values beside keys", "mixed"), ("keys and values apart", "apart")):
        if packing in words:
            return on_ranks(described()[name], ranks)
    tokens = 32 if "32 tokens" in words else 16
    order = words[0].replace("-", "_")
    group = replace(described()["full"], kv_heads=8 // ranks, block_tokens=tokens, order=order)
    per_region = 32 if "all layers in one region" in words else 1
    return BridgeSide(uniform_layout(group, 2 * group.kv_heads * tokens * 256, per_region), ranks)


def test_the_pools_of_the_page_are_of_one_model_on_two_ranks() -> None:
    names = [name for name, made in described().items() if isinstance(made, PoolLayout)]
    assert names[:3] == ["pool", "apart", "mixed"]
    for name in names[:3]:
        check_heads(described()[name], 2)
        assert described()[name].total_bytes == 32 * 1024 * described()["BLOCK_BYTES"]
        assert all(
            found.bridgeable
            for found in differences(BridgeSide(described()[name], 2), BridgeSide(described()["pool"], 2))
        )


def test_groups_of_one_space_lie_on_the_same_bytes_and_apart_they_are_refused_there() -> None:
    shared = described()["shared"]
    first, second = shared.regions
    assert (first.offset, first.stride_bytes) == (second.offset, second.stride_bytes)
    assert f"offset 0, a block every {first.stride_bytes:,} bytes" in (DOCS / "block-space.svg").read_text()
    with pytest.raises(InvalidRequest):
        replace(shared, groups=tuple(replace(group, space="") for group in shared.groups))


@pytest.mark.parametrize("row", tables(section(PAGE, "### What is bridged"))[0], ids=lambda row: f"{row[0]}-{row[1]}")
def test_each_bridge_moves_what_its_row_says(row: list[str]) -> None:
    source, destination = side(row[0]), side(row[1], row[0])
    bridge = Bridge(source, destination)
    how = "re-packed" if bridge.repacked else "directly" if bridge.cuts_blocks(0) else "whole blocks"
    read = bridge.size_of_block(0, None).nbytes / bridge.bytes_of_block(0)
    assert row[2:] == [str(bridge.run_bytes(0)), how, f"{read:g}"]


def test_the_sizes_that_the_page_and_its_pictures_name_are_those_of_the_code() -> None:
    text = " ".join(TEXT.split())
    assert f"shorter than {RUN_BYTES_MIN:,} bytes" in text
    assert f"staging buffer* of {STAGING_BYTES >> 20} MiB, up to {STAGED_AT_ONCE_BYTES >> 20} MiB" in text
    assert f"more than {ROWS_MAX:,}" in text
    assert f"more than {STAGING_BYTES >> 20} MiB" in text
    for picture, source, destination in (
        ("heads.svg", "head-major", "head-major, 2 ranks"),
        ("block-factor.svg", "token-major, 32 tokens", "token-major"),
    ):
        run_bytes = Bridge(side(source), side(destination)).run_bytes(0)
        assert f"{run_bytes:,} bytes" in (DOCS / picture).read_text()


def test_check_compatibility_answers_what_the_page_shows() -> None:
    pool = ("--layers", "8", "--kv-heads", "8", "--head-dim", "64", "--blocks", "8", "--weights-revision", "w@1")
    with served(*pool, "--block-tokens", "32") as prefill, served(*pool) as decode:
        program = ASKED.replace("PREFILL", repr(prefill.address)).replace("DECODE", repr(decode.address))
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    (expected,) = code(TEXT, "text")
    assert (ran.stdout, ran.stderr) == (expected, "")


GROUP = Group("g", GroupKind.FULL_ATTENTION, 2, 16, 8, 4, 64, "bfloat16", "head_major")


def plainly(ranks: int = 1, nbytes: int = 0, **changes: Any) -> BridgeSide:
    group = replace(GROUP, **changes)
    return BridgeSide(
        uniform_layout(group, nbytes or 2 * group.block_tokens * group.kv_heads * group.head_dim * 2), ranks
    )


def opaque(ranks: int = 1, nbytes: int = 656, **changes: Any) -> BridgeSide:
    return plainly(ranks, nbytes, dtype="with_scales", **changes)


def of_groups(count: int, **changes: Any) -> BridgeSide:
    groups = tuple(replace(GROUP, name=str(i), layers=1, blocks=1, **changes) for i in range(count))
    nbytes = groups[0].kv_heads * 4096
    return BridgeSide(
        PoolLayout(groups, tuple(Region(i, 0, 1, i * nbytes, nbytes, nbytes) for i in range(count)), count * nbytes), 1
    )


def states(*totals: int) -> BridgeSide:
    """Returns a side with state sections of these sizes, in bytes."""
    group = Group("s", GroupKind.STATE, 1, 16, 8, 1, 6, "float32", sections=tuple(Section(n, n) for n in totals))
    nbytes = sum(totals)
    return BridgeSide(PoolLayout((group,), (Region(0, 0, 1, 0, nbytes, nbytes, TensorKind.STATE),), 8 * nbytes), 1)


ONE_HEAD = {"kv_heads": 1, "total_kv_heads": 1}


LARGE: dict[str, Any] = {"block_tokens": 4096, "layers": 64, "blocks": 2}
MANY: dict[str, Any] = {"layers": ROWS_MAX // 16, "blocks": 1, "total_kv_heads": 16}
LATENT = BridgeSide(
    PoolLayout((replace(GROUP, kind=GroupKind.MLA),), tuple(
        Region(0, i, 1, i * 8 * 8192, 8192, 8192, TensorKind.LATENT) for i in range(2)
    ), 1 << 20), 1,
)  # fmt: skip
REFUSED: list[list[tuple[str, BridgeSide, BridgeSide]]] = [
    [("pool.groups", of_groups(1), BridgeSide(store_layout(1 << 20), 1))],
    [("pool.groups", of_groups(1), of_groups(2))],
    [("kind", plainly(), LATENT)],
    [("layer_count", plainly(), plainly(layers=3))],
    [("head_dim", plainly(), plainly(head_dim=32))],
    [("state_sections", states(24, 6), states(24, 12))],
    [("dtype", plainly(), plainly(dtype="float16"))],
    [("window_tokens", plainly(), plainly(window_tokens=64))],
    [("block_tokens", plainly(block_tokens=16), plainly(block_tokens=24))],
    [("total_kv_head_count", plainly(kv_heads=1, total_kv_heads=1), plainly(2, kv_heads=1))],
    [
        ("block_tokens", opaque(), opaque(block_tokens=32)),
        ("kv_head_count", opaque(), opaque(kv_heads=2)),
        ("order", opaque(), opaque(order="token_major")),
        ("world_size", opaque(), opaque(2)),
        ("pool.regions", opaque(), opaque(nbytes=664)),
    ],
    [
        (
            "world_size",
            of_groups(ROWS_MAX // 256, **ONE_HEAD),
            of_groups(ROWS_MAX // 256, **ONE_HEAD)._replace(ranks=256),
        )
    ],
    [("pool.regions", plainly(kv_heads=16, **MANY), plainly(16, kv_heads=1, **MANY))],
    [("pool.regions", plainly(**LARGE), plainly(order="token_major", **LARGE))],
]


def refusing(here: BridgeSide, there: BridgeSide) -> set[str]:
    return {found.field.rpartition("].")[2] for found in differences(here, there) if not found.bridgeable}


def test_each_row_of_refusals_is_what_the_core_refuses() -> None:
    (*rows, checksums), *_ = tables(section(PAGE, "### What is refused"))
    assert [plain(row[0]).split(", ") for row in rows] == [[field for field, *_ in cases] for cases in REFUSED]
    for cases in REFUSED:
        for field, here, there in cases:
            assert field in refusing(here, there)
            assert field in refusing(there, here)
    compares = describe("a", pool=plainly().pool, features=(CHECKSUMS,), required_features=(CHECKSUMS,))
    other = describe("b", 2, pool=plainly(order="token_major").pool, features=(CHECKSUMS,))
    assert plain(checksums[0]) in {found.field for found in compare(compares, other) if not found.bridgeable}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_says_what_it_shows_and_runs_nothing(name: str) -> None:
    root = ElementTree.parse(DOCS / name).getroot()
    kinds = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"title", "desc"} <= kinds <= {"svg", "title", "desc", "defs", "marker", "path", "rect", "text", "line"}
    assert root.get("viewBox", "").startswith("0 0 960 ")
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "title desc")
