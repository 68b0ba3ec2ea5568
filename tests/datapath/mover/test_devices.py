"""The thread that calls the libraries is set to its rank's device before its first call."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgrpc.core.values.endpoints import MemoryKind, Segment
from kvgrpc.datapath.host.memory import PrivateMemory
from kvgrpc.datapath.mover import Mover
from tests.datapath.movers import Held
from tests.datapath.peers import DEADLINE_S


def devices_of(*segments: Segment, fail: bool = False) -> list[tuple[str, Any]]:
    """Returns the device calls and the offer of the mover's thread for such memory, in order."""
    seen: list[tuple[str, Any]] = []
    path, offered = Held(), threading.Event()
    offer: Callable[..., Any] = path.offer

    def offers(*given: Any) -> Any:
        seen.append((threading.current_thread().name, "offer"))
        return offer(*given)

    def set_device(number: int) -> None:
        seen.append((threading.current_thread().name, number))
        if fail:
            raise RuntimeError("no such device")

    path.offer = offers  # type: ignore[method-assign,assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "set_device", set_device)
        mover = Mover(3, PrivateMemory(segments), [path], lambda _: offered.set())
        mover.start()
        mover.offer("key")
        assert offered.wait(DEADLINE_S)
        assert mover.close(0.0)
    return seen


def cuda(device: int) -> Segment:
    return Segment(1 << 20, 64, MemoryKind.CUDA, device)


@pytest.mark.parametrize("fail", [False, True])
def test_it_is_the_device_that_the_memory_is_on(fail: bool) -> None:
    assert devices_of(cuda(5), cuda(5), fail=fail) == [("kvgrpc-mover-3", 5), ("kvgrpc-mover-3", "offer")]


@pytest.mark.parametrize("segments", [[Segment(1 << 20, 64)], [cuda(0), cuda(1)]], ids=["host", "two devices"])
def test_for_other_memory_it_is_left_as_it_is(segments: list[Segment]) -> None:
    assert devices_of(*segments) == [("kvgrpc-mover-3", "offer")]
