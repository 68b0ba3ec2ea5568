"""Keys and values in separate arrays arrive in the array of their kind, wherever they lie at the source."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgrpc.core.values.layout import PoolLayout, Region, TensorKind
from kvgrpc.engine import content
from tests.engine.conftest import Attach, Leads
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, layout
from tests.engine.support import Side, received, tokens

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
HALF = LAYER_BYTES // 2
KEYS_FIRST, VALUES_FIRST = (TensorKind.K, TensorKind.V), (TensorKind.V, TensorKind.K)


def apart(tensors: tuple[TensorKind, TensorKind]) -> PoolLayout:
    """Returns the usual pool with two arrays for each layer, in that order."""
    whole = layout()
    regions = [
        Region(0, layer, 1, (2 * layer + i) * BLOCKS * HALF, HALF, HALF, tensor)
        for layer in range(LAYERS)
        for i, tensor in enumerate(tensors)
    ]
    return PoolLayout(whole.groups, tuple(regions), whole.total_bytes)


def arrays(side: Side) -> NDArray[np.uint8]:
    """Returns the arrays of an engine, shape [layers * 2, blocks, bytes]."""
    return side.ranks[0].memory.reshape(2 * LAYERS, BLOCKS, HALF)


def test_keys_and_values_of_every_layer_arrive_in_their_own_arrays(leads: Leads, attach: Attach) -> None:
    source, destination = (attach(lead, pool=apart(KEYS_FIRST)) for lead in leads)
    arrays(source)[:] = np.random.default_rng(1).integers(0, 256, arrays(source).shape, dtype=np.uint8)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    received(destination.finish(pull))
    assert np.array_equal(arrays(destination)[:, TARGET], arrays(source)[:, SOURCE])


@pytest.mark.parametrize("there", [apart(VALUES_FIRST), layout()], ids=["values first", "together"])
def test_keys_and_values_arrive_in_their_own_arrays_wherever_they_lie_at_the_source(
    leads: Leads, attach: Attach, there: PoolLayout
) -> None:
    source, destination = attach(leads[0], pool=there), attach(leads[1], pool=apart(KEYS_FIRST))
    memory = source.ranks[0].memory
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.shape, dtype=np.uint8)
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    received(destination.finish(pull))
    if there == layout():  # [layers, blocks, keys and values]
        expected = memory.reshape(LAYERS, BLOCKS, 2, HALF).transpose(0, 2, 1, 3)
    else:
        expected = memory.reshape(LAYERS, 2, BLOCKS, HALF)[:, ::-1]
    assert np.array_equal(arrays(destination)[:, TARGET], expected.reshape(2 * LAYERS, BLOCKS, HALF)[:, SOURCE])
