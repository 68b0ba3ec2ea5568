"""ReadBlocks of an attached engine: blocks that the server cannot read, or that have no parts, are refused."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from kvgrpc.core.values.layout import Group, GroupKind, uniform_layout
from kvgrpc.engine import Engine
from kvgrpc.v1 import common_pb2, pool_pb2
from tests.engine.conftest import SETTINGS, Attach
from tests.engine.made import BLOCK_TOKENS, layout
from tests.engine.support import Lead
from tests.service.values import group, named_blocks


@pytest.fixture(scope="module")
def lead(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Yields a lead that hands out bytes."""
    made = Lead(tmp_path_factory.mktemp("lead"), "R", "--read-blocks", "--data-paths", "shm", settings=SETTINGS)
    yield made.wait_ready()
    made.close()


def read(lead: Lead, first: int, count: int) -> bytes:
    blocks = named_blocks(lead.status().header.incarnation, group([3]))
    request = pool_pb2.ReadBlocksRequest(blocks=blocks, layers=common_pb2.LayerRange(first=first, count=count))
    (row,) = lead.api.pool.ReadBlocks(request).blocks
    return row.data


def test_memory_of_workers_cannot_be_read(lead: Lead) -> None:
    with Engine.attach(lead.socket_path, pool=layout(), private_memory=True):
        refusal = lead.api.refusal(lambda: read(lead, 0, 1))
    assert (refusal.code, refusal.reason) == ("UNIMPLEMENTED", "FEATURE_UNAVAILABLE")
    lead.wait_no_engine()


def test_layers_that_lie_together_are_read_together(lead: Lead, attach: Attach) -> None:
    four = Group("full", GroupKind.FULL_ATTENTION, 4, BLOCK_TOKENS, 8, 1, 1, "uint8")
    side = attach(lead, pool=uniform_layout(four, 64, layers_per_region=2))
    memory = side.ranks[0].memory
    memory[:] = np.arange(len(memory)) % 251
    for cut in ((0, 1), (1, 2), (0, 3)):
        refusal = lead.api.refusal(partial(read, lead, *cut))
        assert (refusal.code, refusal.reason, refusal.fields) == ("INVALID_ARGUMENT", "INVALID_FIELD", ("layers",))
    block = memory.reshape(2, 8, 128)[:, 3]
    assert read(lead, 2, 2) == block[1].tobytes()
    assert read(lead, 0, 4) == block.tobytes()
