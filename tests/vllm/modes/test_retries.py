"""A request that comes again under the name of an ended one is served or computed: it never fails, and never waits for
what cannot come.
"""

from typing import Any

import pytest

from kvgrpc.core.policy.values import ModeChoice
from tests.vllm.cores import Core, request_of
from tests.vllm.engines import PREFILL, wait_until
from tests.vllm.modes.legs import Made, came, compute, decode_leg, holds_the_kv

NAME = {"transfer_id": "xfer-7c1e"}


def forgets(core: Core) -> None:
    """Clears the memory of the last try."""
    for layer in core.memory.values():
        layer.zero_()


@pytest.mark.parametrize("p_mode", ModeChoice)
@pytest.mark.parametrize("named", [False, True])
def test_both_legs_again_one_after_the_other_are_served(made: Made, p_mode: ModeChoice, named: bool) -> None:
    p, d = made(p_mode, ModeChoice.AUTO)
    name: dict[str, Any] = NAME if named else {}
    for number in range(3):
        answer = compute(p, request_of(f"cmpl-same-0-0000000{number}", {**PREFILL, **name}))
        mine = f"cmpl-same-0-1000000{number}"
        blocks = d.begin(request_of(mine, {**answer, **name}))
        wait_until(lambda m=mine: p.step() and d.step() and m in d.told.loaded)  # type: ignore[misc]
        assert not d.told.failed
        assert holds_the_kv(d, blocks)
        forgets(d)
        wait_until(lambda: p.step() and p.used() == 0)


@pytest.mark.parametrize("p_mode", [ModeChoice.AUTO, ModeChoice.PUSH])
@pytest.mark.parametrize("first", ["P", "D"])
def test_both_legs_again_at_once_are_computed_at_once(made: Made, p_mode: ModeChoice, first: str) -> None:
    """The name alone decides this: the transfer under it is over."""
    p, d = made(p_mode, ModeChoice.AUTO)
    before = request_of("d0", {**decode_leg(p), **NAME})
    blocks = d.begin(before)
    d.step()
    compute(p, request_of("p0", {**PREFILL, **NAME}))
    assert came(p, d, "d0")
    d.hooks.finished(before, (blocks,))
    if first == "P":
        compute(p, request_of("p1", {**PREFILL, **NAME}))
    d.begin(request_of("d1", {**decode_leg(p), **NAME}))
    d.step()
    if first == "D":
        compute(p, request_of("p1", {**PREFILL, **NAME}))
    wait_until(lambda: p.step() and d.step() and "d1" in d.told.loaded)
    assert d.told.failed == {"d1"}
    assert p.hooks.reset(), "nobody comes for what it has under another name"
    assert p.used() == 0


def test_decodes_leg_again_with_what_was_taken_is_computed(made: Made) -> None:
    p, d = made(ModeChoice.PULL, ModeChoice.PULL)
    answer = compute(p, request_of("p", PREFILL))
    before = request_of("d0", answer)
    blocks = d.begin(before)
    assert came(p, d, "d0")
    d.hooks.finished(before, (blocks,))
    d.begin(request_of("d1", answer))
    wait_until(lambda: p.step() and d.step() and d.told.failed == {"d1"})
