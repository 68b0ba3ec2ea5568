"""The mover's waits end in time, however little of a processor it gets."""

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvgrpc.core.actions import Operation
from kvgrpc.core.events import PostingEnded
from kvgrpc.datapath import back_off
from tests.datapath.movers import AT_SOURCE, DONE, WHOLE, Held, Rank
from tests.datapath.peers import DEADLINE_S

WAIT_S = 1e-6
FOR_S = 3.0
LONG_S = 5.0
"""Maximum time for a few turns, in seconds: many times what they take."""


@pytest.fixture
def crowd() -> Iterator[None]:
    """Keeps the interpreter and the processors busy with other threads."""
    over, before = threading.Event(), sys.getswitchinterval()

    def work() -> None:
        while not over.is_set():
            sum(range(50))

    threads = [threading.Thread(target=work) for _ in range(3)]
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    yield
    over.set()
    sys.setswitchinterval(before)
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("crowd")
def test_a_wait_that_is_over_before_it_begins_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait may be over before it begins if the mover is held up in between; waits this short make that likely."""
    monkeypatch.setattr(back_off, "NEEDED_S", ((0.0, 0.0), (float("inf"), WAIT_S)))
    held = Held()
    rank = Rank(lambda _: [held])
    rank.mover.connect("p", AT_SOURCE, ["held"])
    rank.mapped()
    rank.post("a", "p", WHOLE)
    end = time.monotonic() + FOR_S
    while time.monotonic() < end:
        # The command makes the mover wait anew; afterwards only its own clock wakes it.
        rank.mover.expect("x", Operation.READ)
        turns, limit = held.turns + 3, time.monotonic() + LONG_S
        while held.turns < turns:
            assert time.monotonic() < limit, "the mover looks at its posting no more"
            time.sleep(0)
    held.state = DONE
    assert rank.next(PostingEnded).done
    assert rank.mover.close(DEADLINE_S)
