"""Keys and values in arrays of their own arrive where their kind lies; where that is elsewhere nothing is moved."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgrpc.core.values.layout import PoolLayout, Region, TensorKind
from kvgrpc.engine import content
from kvgrpc.errors import Reason
from tests.engine.conftest import Attach, Leads
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, layout
from tests.engine.support import Side, failure, received, tokens

PROMPT = tokens(40)
SOURCE, TARGET = [1, 2, 9], [30, 31, 5]
HALF = LAYER_BYTES // 2
KEYS_FIRST, VALUES_FIRST = (TensorKind.K, TensorKind.V), (TensorKind.V, TensorKind.K)


def apart(tensors: tuple[TensorKind, TensorKind]) -> PoolLayout:
    """The usual pool with two arrays for each layer, in that order."""
    whole = layout()
    regions = [
        Region(0, layer, 1, (2 * layer + i) * BLOCKS * HALF, HALF, HALF, tensor)
        for layer in range(LAYERS)
        for i, tensor in enumerate(tensors)
    ]
    return PoolLayout(whole.groups, tuple(regions), whole.total_bytes)


def arrays(side: Side) -> NDArray[np.uint8]:
    """The arrays of an engine, shape [layers * 2, blocks, bytes]."""
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
def test_engines_with_other_tensors_do_not_exchange_blocks(leads: Leads, attach: Attach, there: PoolLayout) -> None:
    source, destination = attach(leads[0], pool=there), attach(leads[1], pool=apart(KEYS_FIRST))
    handover = source.hand_over(SOURCE, PROMPT)
    pull = destination.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    assert failure(destination.finish(pull)).reason is Reason.INCOMPATIBLE_POOLS
