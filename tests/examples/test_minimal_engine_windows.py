"""The minimal engine with a sliding window in every second layer: KV moved between such engines gives the tokens of
one, and nothing before the window moves.

Before each test all KV is NaN, so that a read of a block that did not come shows in the tokens.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from examples.minimal_engine import chat, push
from examples.minimal_engine.engine import MinimalEngine, Request, TransferFailed
from examples.minimal_engine.model import decode
from examples.minimal_engine.windows import GroupBlocks
from kvgrpc.core.values.groups import Group, GroupKind
from kvgrpc.engine import HandOver
from kvgrpc.engine.transfers.handles import Handle
from tests.engine.support import new_key
from tests.examples.led_engines import Pair, led_pair

WINDOW = 32
BLOCK = 16
COUNT = 12
TEXT = (
    "Every second layer sees the last tokens only, so of a long prompt it needs its end, and that alone is moved; " * 2
)
FULL = Group("full", GroupKind.FULL_ATTENTION, 3, 4, 32, 4, 32, "float32")
WINDOWED = Group("window", GroupKind.SLIDING_WINDOW, 3, 4, 32, 4, 32, "float32", window_tokens=8)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with led_pair(tmp_path_factory.mktemp("leads"), ranks=request.param, windows=(WINDOW, WINDOW)) as pair:
        yield pair


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """Yields P and D without any KV. Afterwards every block must have come back."""
    for engine in engines:
        engine.blocks.forget()
        for rank in engine.ranks:
            rank.memory.view(np.float32)[:] = math.nan
    yield engines
    for engine in engines:
        while engine.given:
            engine.step(timeout_s=1.0)
        assert engine.blocks.used_blocks == 0
        engine.blocks.check_integrity()


@pytest.fixture(scope="module")
def single() -> MinimalEngine:
    """Returns one engine with the same model that does both."""
    return MinimalEngine(window_tokens=WINDOW)


def text(tokens: int) -> str:
    """Returns a prompt of this many tokens, the first of which is BOS."""
    return TEXT[: tokens - 1]


def alone(single: MinimalEngine, prompt: str, count: int = COUNT) -> list[int]:
    single.blocks.forget()
    request = single.begin(prompt)
    made = single.decode(request, count)
    single.release(request)
    return made


def handed(engine: MinimalEngine, prompt: str) -> HandOver:
    return engine.prefill(engine.begin(prompt), transfer_key=new_key())


def generate(engine: MinimalEngine, prompt: str) -> list[int]:
    request = engine.begin(prompt)
    made = engine.decode(request, COUNT)
    engine.release(request)
    return made


def check_moved(pair: Pair, transfer: Handle, full_blocks: int, window_blocks: int) -> None:
    """Checks that this many blocks of each group came, in three layers each, and every rank got its share."""
    _, d = pair
    nbytes = 3 * (full_blocks + window_blocks) * d.model.config.block_bytes(BLOCK)
    assert d.moved(transfer) == {rank: nbytes // len(d.ranks) for rank in range(len(d.ranks))}


def check_bare(engine: MinimalEngine, request: Request, first: int) -> None:
    """Checks that windowed layers are empty before block `first`, and nothing else is."""
    for number, layer in enumerate(engine.kv):
        empty = [bool(layer[block].isnan().all()) for block in request.table]
        assert empty == [bool(number % 2) and i < first for i in range(len(empty))]


@pytest.mark.parametrize(("tokens", "first"), [(20, 0), (WINDOW, 0), (WINDOW + 1, 0), (WINDOW + BLOCK, 1), (150, 7)])
def test_a_pull_brings_windowed_layers_the_end_of_the_prompt_alone(
    pair: Pair, single: MinimalEngine, tokens: int, first: int
) -> None:
    p, d = pair
    target = d.begin(text(tokens))
    blocks = len(target.table)
    pull = d.receive(target, handed(p, text(tokens)).grant)
    check_moved(pair, pull, blocks, blocks - first)
    check_bare(d, target, first)
    assert d.decode(target, COUNT) == alone(single, text(tokens))
    d.release(target)


@pytest.mark.parametrize(("tokens", "full_blocks", "window_blocks"), [(70, 2, 2), (90, 3, 3), (150, 7, 3)])
def test_a_pull_after_a_prefix_that_is_held_brings_what_each_group_lacks(
    pair: Pair, single: MinimalEngine, tokens: int, full_blocks: int, window_blocks: int
) -> None:
    p, d = pair
    generate(d, text(60))
    target = d.begin(text(tokens))
    assert target.have_tokens == 48
    pull = d.receive(target, handed(p, text(tokens)).grant)
    check_moved(pair, pull, full_blocks, window_blocks)
    assert d.decode(target, COUNT) == alone(single, text(tokens))
    d.release(target)


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
@pytest.mark.parametrize(
    ("held", "tokens", "full_blocks", "window_blocks"), [(1, 20, 2, 2), (1, 150, 10, 3), (60, 150, 7, 3)]
)
def test_a_push_brings_the_same_whole_or_layer_by_layer(
    pair: Pair, single: MinimalEngine, held: int, tokens: int, full_blocks: int, window_blocks: int, *, layerwise: bool
) -> None:
    p, d = pair
    key = new_key()
    generate(d, text(held))
    target = d.begin(text(tokens))
    reservation = push.reserve(d, target, transfer_key=key)
    push.prefill(p, p.begin(text(tokens)), reservation.grant, layerwise=layerwise, transfer_key=key)
    logits = push.receive(d, target, reservation)
    check_moved(pair, reservation, full_blocks, window_blocks)
    assert d.decode(target, COUNT, logits) == alone(single, text(tokens))
    d.release(target)


def test_a_prefix_whose_window_did_not_come_is_not_found(pair: Pair, single: MinimalEngine) -> None:
    p, d = pair
    target = d.begin(text(150))
    d.receive(target, handed(p, text(150)).grant)
    assert d.decode(target, COUNT) == alone(single, text(150))
    d.release(target)
    for prompt, have_tokens in ((text(200), 144), (text(130) + "?", 0), (text(100), 0), (text(20), 0)):
        request = d.begin(prompt)
        assert request.have_tokens == have_tokens
        assert d.decode(request, COUNT) == alone(single, prompt)
        d.release(request)


def test_a_conversation_comes_back_by_its_windows_end_and_goes_on(pair: Pair, single: MinimalEngine) -> None:
    p, d = pair
    prompt = text(100)
    target = d.begin(prompt)
    d.receive(target, handed(p, prompt).grant)
    prompt += decode(d.decode(target, 50)) + " And then?"
    key = new_key()
    offer = chat.offer(d, target, transfer_key=key)
    turn = p.begin(prompt)
    assert turn.have_tokens == 96
    assert chat.take_history(p, turn, offer.grant, transfer_key=key) == 149 - 96
    again = p.prefill(turn, transfer_key=new_key())
    target = d.begin(prompt)
    d.receive(target, again.grant)
    assert d.decode(target, COUNT) == alone(single, prompt)
    d.release(target)


@pytest.mark.parametrize("windows", [(WINDOW, 0), (WINDOW, 2 * WINDOW)])
def test_an_engine_with_another_window_or_none_is_refused(
    tmp_path_factory: pytest.TempPathFactory, windows: tuple[int, int]
) -> None:
    with led_pair(tmp_path_factory.mktemp("leads"), windows=windows) as (p, d):
        target = d.begin(text(40))
        with pytest.raises(TransferFailed, match="weights"):
            d.receive(target, handed(p, text(40)).grant)
        assert generate(d, text(40)) != generate(p, text(40))


def test_layers_of_both_groups_have_a_number_together_and_without_a_window_their_own() -> None:
    both, one = GroupBlocks(8, 4, [FULL, WINDOWED]), GroupBlocks(8, 4, [FULL])
    expected = [(0, False), (0, True), (1, False), (1, True)]
    assert [(both.number(layer), both.completes(layer)) for layer in range(4)] == expected
    assert [(one.number(layer), one.completes(layer)) for layer in range(2)] == [(0, True), (1, True)]


def test_a_bare_block_is_whole_again_once_it_is_recycled() -> None:
    blocks = GroupBlocks(5, 4, [FULL, WINDOWED])
    table, _ = blocks.allocate(range(20))
    blocks.filled(table, 20, 0)
    blocks.register(table, range(20))
    blocks.release(table)
    assert blocks.find(range(20)) == table
    assert blocks.find(range(16)) == []
    other, _ = blocks.allocate([99] * 20)
    assert sorted(other) == sorted(table)
    blocks.register(other, [99] * 20)
    assert blocks.find([99] * 8) == other[:2]
