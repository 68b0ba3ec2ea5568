"""Two halves of a process group exchange values, or their wait ends."""

import threading

import pytest

from kvgrpc.core.values.sends import Values
from kvgrpc.datapath.base import DataPathFailed
from kvgrpc.datapath.collective.rendezvous import Rendezvous

LONG_S = 20.0


def test_a_side_tells_what_it_has_before_it_waits_and_once_only() -> None:
    told: list[Values] = []
    side = Rendezvous(told.append, LONG_S)
    side.put("0/0", b"here")
    assert side.take("0/0") == b"here"
    assert not told, "its own it need not wait for"
    side.learn((("0/1", b"there"),))
    assert side.take("0/1") == b"there"
    side.tell()
    assert told == [(("0/0", b"here"),)]
    assert side.has(["0/0", "0/1"])
    assert not side.has(["0/2"])


def test_sides_exchange_all_that_they_have_to_tell_also_where_that_is_nothing() -> None:
    told: list[Values] = []
    side = Rendezvous(told.append, LONG_S)
    side.learn(())
    assert side.exchange((("0", b"here"), ("1", b"too"))) == ()
    assert told == [(("0", b"here"), ("1", b"too"))]


def test_who_waits_is_woken_by_what_the_other_side_told() -> None:
    telling = threading.Event()
    side = Rendezvous(lambda _: telling.set(), LONG_S)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(side.take("0/1")))
    waiting.start()
    assert telling.wait(LONG_S)
    side.learn((("0/1", b"there"),))
    waiting.join(LONG_S)
    assert found == [b"there"]


def test_a_wait_ends_when_the_other_side_does_not_come() -> None:
    side = Rendezvous(lambda _: None, wait_s=0.0)
    with pytest.raises(DataPathFailed, match="did not come"):
        side.take("0/1")


def test_a_wait_ends_when_it_is_given_up() -> None:
    side = Rendezvous(lambda _: side.give_up("the path was closed"), LONG_S)
    with pytest.raises(DataPathFailed, match="the path was closed"):
        side.wait(["0/1"])
    side.give_up("and again")
    with pytest.raises(DataPathFailed, match="the path was closed"):
        side.wait(["0/1"])
