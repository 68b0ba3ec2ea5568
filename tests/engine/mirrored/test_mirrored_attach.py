"""A rank with a device attaches: it has its mirror before its lead hears of it."""

import fcntl
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvgrpc.engine import Engine, Rank
from kvgrpc.errors import AlreadyExists, PreconditionFailed, Reason
from tests.engine.conftest import Leads
from tests.engine.made import layout
from tests.engine.mirrored.fake_device import FakeDevice
from tests.engine.mirrored.sides import MirroredSide, mirrors
from tests.engine.support import refused

REFUSALS: list[Callable[[], Exception]] = [
    lambda: PreconditionFailed(Reason.FEATURE_UNAVAILABLE, "could not be page-locked"),
    lambda: RuntimeError("no such device"),
]
"""Makers of exceptions. Each test needs a new one, because a raised exception keeps its mirror alive."""
F_SEAL_FUTURE_WRITE = 0x10


@pytest.mark.parametrize("refusal", REFUSALS, ids=["typed", "any other"])
def test_a_device_that_refuses_its_mirror_leaves_nothing_and_the_engine_goes_on(
    leads: Leads, refusal: Callable[[], Exception]
) -> None:
    device = FakeDevice()
    device.refusals = [refusal()]
    with Engine.attach(leads[0].socket_path, pool=layout(), mirrored=True) as engine:
        held, threads = mirrors().keys(), set(threading.enumerate())
        with pytest.raises(type(refusal()), match=str(refusal())):
            Rank(engine.ticket, 0, device=device)
        assert not mirrors().keys() - held
        assert not set(threading.enumerate()) - threads
        with Rank(engine.ticket, 0, device=device):
            assert engine.poll() == []
            assert leads[0].status().header.incarnation == engine.incarnation


def test_an_attach_that_is_refused_leaves_no_mirror(source: MirroredSide) -> None:
    device = FakeDevice()
    held, threads = mirrors().keys(), set(threading.enumerate())
    with refused(Reason.ENGINE_ATTACHED, AlreadyExists):
        Rank(source.engine.ticket, 0, device=device)
    assert not mirrors().keys() - held
    assert not set(threading.enumerate()) - threads
    device.open(np.zeros(device.nbytes, dtype=np.uint8))  # the device has no mirror open
    source.round_trip()


def test_nobody_else_can_write_into_a_mirror(leads: Leads) -> None:
    before = mirrors()
    source = MirroredSide(leads[0])
    ((_, mirror),) = mirrors().items() - before.items()
    assert fcntl.fcntl(mirror, fcntl.F_GET_SEALS) & F_SEAL_FUTURE_WRITE
    with pytest.raises(PermissionError):
        os.pwrite(mirror, b"x", 0)
    source.close()
