"""An engine's block ids and token ids become the messages that its lead receives."""

from array import array
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from kvgrpc.core.values.block_ids import FEW_IDS
from kvgrpc.engine.transfers.handles import FEW_TOKENS, content, named_blocks
from kvgrpc.errors import InvalidRequest

MANY = FEW_IDS + 1
FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    np.array,
    lambda ids: np.array(ids, dtype=np.int32),
    lambda ids: np.array(ids, dtype=np.uint64),
]


@pytest.mark.parametrize("form", FORMS, ids=["list", "tuple", "array", "int32", "uint64"])
@pytest.mark.parametrize("count", [2, MANY])
def test_ids_are_runs_in_whatever_sequence_they_come(form: Callable[[list[int]], Any], count: int) -> None:
    (row,) = named_blocks(form([7, *range(100, 99 + count)]), 5).groups
    assert (list(row.runs.starts), list(row.runs.counts)) == ([7, 100], [1, count - 1])


@pytest.mark.parametrize("count", [2, MANY])
@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70, 1.5, "7", None])
def test_what_is_no_id_is_refused_among_few_and_among_many(wrong: Any, count: int) -> None:
    for ids in ([*range(1, count), wrong], [0, wrong, *range(2, count)]):
        with pytest.raises(InvalidRequest):
            named_blocks(ids, 5)


@pytest.mark.parametrize("form", [*FORMS, lambda ids: array("q", ids)], ids=[*"ltaiu", "array.array"])
@pytest.mark.parametrize("count", [2, FEW_TOKENS + 1])
def test_token_ids_are_the_same_content_in_whatever_sequence_they_come(
    form: Callable[[list[int]], Any], count: int
) -> None:
    ids = [2**31 - 1, *range(1, count)]
    assert list(content(form(ids), adapter="a").message.tokens.token_ids) == ids
    for wrong in (-1, 2**32):
        with pytest.raises(InvalidRequest):
            content(cast(Any, np.array([*range(1, count), wrong])))
