"""Callers that leave in the moment of their answer hold nothing."""

import asyncio

import pytest

from kvgrpc.core.tensors.calls import Get
from kvgrpc.core.tensors.rows import Stage
from kvgrpc.core.tensors.values import ANY
from kvgrpc.core.values.owners import ANONYMOUS, ENGINE
from kvgrpc.service.lead import Lead
from tests.service.tensors.leads import life_of, named, stored


@pytest.mark.parametrize(("caller", "stage"), [(ANONYMOUS, Stage.STORED), (ENGINE, Stage.HELD)])
async def test_a_tensor_that_comes_as_its_caller_leaves_is_held_by_the_engine_alone(
    lead: Lead, caller: str, stage: Stage
) -> None:
    call = asyncio.ensure_future(lead.tensors.get(Get(named(), ANY, timeout_s=20.0), "", caller))
    await asyncio.sleep(0)
    tensor = stored(life_of(lead))
    lead.tensors._perform()
    assert tensor.stage is Stage.HELD
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tensor.stage is stage


async def test_a_tensor_that_one_caller_did_not_take_is_held_by_the_other_that_did(lead: Lead) -> None:
    calls = [asyncio.ensure_future(lead.tensors.get(Get(named(), ANY, timeout_s=20.0), "")) for _ in range(2)]
    await asyncio.sleep(0)
    tensor = stored(life_of(lead))
    lead.tensors._perform()
    calls[0].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert calls[1].result().tensors == (tensor,)
    assert tensor.stage is Stage.HELD
