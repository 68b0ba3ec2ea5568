"""Every mode of P with every mode of D, behind routers that run the legs in turn or at once: each pair moves KV or
computes, and none fails a request.
"""

import pytest

from kvgrpc.core.policy.values import ModeChoice
from tests.vllm.cores import PROMPT, request_of
from tests.vllm.engines import PREFILL, wait_until
from tests.vllm.modes.legs import AT_D, AT_P, Made, came, compute, decode_leg, holds_the_kv

SECRET = b"known to P and D"
MODES = pytest.mark.parametrize("d_mode", ModeChoice)


@MODES
@pytest.mark.parametrize("p_mode", ModeChoice)
def test_one_leg_after_the_other_moves_the_kv_whatever_the_modes_are(
    made: Made, p_mode: ModeChoice, d_mode: ModeChoice
) -> None:
    p, d = made(p_mode, d_mode)
    answer = compute(p, request_of(AT_P, PREFILL))
    assert (answer["do_remote_prefill"], answer["remote_engine_id"]) == (True, "P")
    assert ("kvgrpc_grant" in answer) is (p_mode is not ModeChoice.PUSH)
    blocks = d.begin(request_of(AT_D, answer))
    assert came(p, d, AT_D)
    assert holds_the_kv(d, blocks)


@MODES
@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("p_mode", ModeChoice)
def test_both_legs_at_once_move_the_kv_where_prefill_pushes(
    made: Made, p_mode: ModeChoice, d_mode: ModeChoice, first: str
) -> None:
    """Only the request id pairs the legs. A P that is set to pull answers with a grant, which such a router drops."""
    p, d = made(p_mode, d_mode)
    if first == "P":
        compute(p, request_of(AT_P, PREFILL))
    blocks = d.begin(request_of(AT_D, decode_leg(p)))
    d.step()
    if first == "D":
        compute(p, request_of(AT_P, PREFILL))
    if p_mode is ModeChoice.PULL:
        wait_until(lambda: p.step() and d.step() and d.told.failed == {AT_D})
        return
    assert came(p, d, AT_D)
    assert holds_the_kv(d, blocks)


@pytest.mark.parametrize("p_mode", ModeChoice)
def test_a_name_for_both_legs_moves_the_kv_whatever_the_modes_are(made: Made, p_mode: ModeChoice) -> None:
    p, d = made(p_mode, ModeChoice.PULL)
    blocks = d.begin(request_of("d", {**decode_leg(p), "transfer_id": "xfer-7c1e"}))
    d.step()
    compute(p, request_of("p", {**PREFILL, "transfer_id": "xfer-7c1e"}))
    assert came(p, d, "d")
    assert holds_the_kv(d, blocks)


@pytest.mark.parametrize("p_mode", [ModeChoice.AUTO, ModeChoice.PUSH])
def test_a_request_of_another_prompt_under_the_same_id_gets_nothing(made: Made, p_mode: ModeChoice) -> None:
    """Clients may choose ids."""
    p, d = made(p_mode, ModeChoice.AUTO)
    compute(p, request_of(AT_P, PREFILL))
    other = request_of(AT_D, decode_leg(p), prompt_token_ids=PROMPT[::-1], all_token_ids=PROMPT[::-1])
    blocks = d.begin(other)
    wait_until(lambda: p.step() and d.step() and d.told.failed == {AT_D})
    assert not any(bool(layer[blocks].any()) for layer in d.memory.values())
    again = d.begin(request_of("cmpl-7c1e-0-00000000", decode_leg(p)))
    wait_until(lambda: p.step() and d.step() and len(d.told.loaded) == 2)
    assert d.told.failed == {AT_D}
    assert holds_the_kv(d, again)


@pytest.mark.parametrize("p_mode", [ModeChoice.AUTO, ModeChoice.PUSH])
def test_engines_with_one_pairing_secret_find_each_other(made: Made, p_mode: ModeChoice) -> None:
    p, d = made(p_mode, ModeChoice.AUTO, SECRET, SECRET)
    blocks = d.begin(request_of(AT_D, decode_leg(p)))
    d.step()
    compute(p, request_of(AT_P, PREFILL))
    assert came(p, d, AT_D)
    assert holds_the_kv(d, blocks)


@pytest.mark.parametrize("d_secret", [b"", SECRET[::-1]])
def test_who_does_not_know_prefills_pairing_secret_gets_nothing(made: Made, d_secret: bytes) -> None:
    p, d = made(ModeChoice.PUSH, ModeChoice.AUTO, SECRET, d_secret)
    compute(p, request_of(AT_P, PREFILL))
    blocks = d.begin(request_of(AT_D, decode_leg(p)))
    wait_until(lambda: p.step() and d.step() and d.told.failed == {AT_D})
    assert not any(bool(layer[blocks].any()) for layer in d.memory.values())


def test_a_request_that_prefill_never_gets_is_computed_by_decode_soon(made: Made) -> None:
    p, d = made(ModeChoice.AUTO, ModeChoice.AUTO)
    d.begin(request_of(AT_D, decode_leg(p)))
    wait_until(lambda: p.step() and d.step() and d.told.failed == {AT_D})
    wait_until(lambda: p.used() == 0)


@pytest.mark.parametrize("p_mode", [ModeChoice.AUTO, ModeChoice.PUSH])
def test_a_request_id_that_comes_again_is_served_by_the_next_answer(made: Made, p_mode: ModeChoice) -> None:
    p, d = made(p_mode, ModeChoice.AUTO)
    for digits in ("00000000", "11111111"):
        name = f"cmpl-same-0-{digits}"
        blocks = d.begin(request_of(name, compute(p, request_of(name, PREFILL))))
        wait_until(lambda n=name: p.step() and d.step() and n in d.told.loaded)  # type: ignore[misc]
        assert holds_the_kv(d, blocks)
    assert not d.told.failed
