"""The minimal engine with its heads split over two ranks: KV moved between such engines gives the tokens of one."""

from collections.abc import Iterator

import pytest
import torch

from examples.minimal_engine import push
from examples.minimal_engine.engine import MinimalEngine, Request
from examples.minimal_engine.model import MinimalModel
from examples.minimal_engine.ranks import SplitLayer, layers_in
from tests.engine.support import new_key
from tests.examples.led_engines import Pair, led_pair

PROMPT = "The cache of the prompt lies in halves, one in the memory of each rank."
COUNT = 12


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with led_pair(tmp_path_factory.mktemp("leads"), ranks=2) as pair:
        yield pair


def alone() -> list[int]:
    """Returns the tokens of an engine of one rank that moves nothing."""
    engine = MinimalEngine()
    return engine.decode(engine.begin(PROMPT), COUNT)


def whole_bytes(engine: MinimalEngine, request: Request) -> int:
    """Returns the size of the prompt's blocks on all ranks together, in bytes."""
    return len(request.table) * len(engine.kv) * engine.model.config.block_bytes(engine.blocks.block_tokens)


def test_a_split_layer_is_to_the_model_what_a_whole_one_is() -> None:
    model = MinimalModel()
    memories = [torch.zeros(6 * 4 * model.config.block_bytes(16) // 2, dtype=torch.uint8).numpy() for _ in range(2)]
    whole = [torch.zeros(model.config.kv_shape(4, 16)) for _ in range(6)]
    split = layers_in(memories, model.config, 4, 16)
    logits = [model.forward(range(50), 0, [3, 0, 1, 2], kv) for kv in (whole, split)]
    assert torch.equal(*logits)
    assert all(isinstance(layer, SplitLayer) for layer in split)
    assert all(torch.equal(one[:], other) for one, other in zip(split, whole, strict=True))
    assert all(memory.any() for memory in memories)


def test_a_pull_brings_each_rank_its_half_and_gives_the_tokens_of_one_engine(pair: Pair) -> None:
    p, d = pair
    source, target = p.begin(PROMPT), d.begin(PROMPT)
    handover = p.prefill(source, transfer_key=new_key())
    pull = d.receive(target, handover.grant)
    half = whole_bytes(d, target) // 2
    assert d.decode(target, COUNT) == alone()
    assert d.moved(pull) == {0: half, 1: half}
    while p.given:
        p.step(timeout_s=1.0)


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_push_fills_both_ranks_and_gives_the_tokens_of_one_engine(pair: Pair, *, layerwise: bool) -> None:
    p, d = pair
    key = new_key()
    target = d.begin(PROMPT)
    reservation = push.reserve(d, target, transfer_key=key)
    push.prefill(p, p.begin(PROMPT), reservation.grant, layerwise=layerwise, transfer_key=key)
    logits, half = push.receive(d, target, reservation), whole_bytes(d, target) // 2
    assert d.decode(target, COUNT, logits) == alone()
    assert d.moved(reservation) == {0: half, 1: half}
