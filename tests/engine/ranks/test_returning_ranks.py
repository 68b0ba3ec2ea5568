"""A remote rank whose lead died returns to the next lead, even if its first attempts fail."""

import hashlib
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import grpc
import numpy as np
import pytest

from kvgrpc.engine import Engine, Event, Rank, content
from kvgrpc.session.v1 import rank_pb2
from tests.chaos.network import Proxy
from tests.engine.conftest import Leads
from tests.engine.made import BLOCKS, LAYER_BYTES, LAYERS, layout, made_bytes
from tests.engine.private_side import PrivateSide, Teams
from tests.engine.ranks.conftest import TICKET, Connect
from tests.engine.ranks.moves import GRACE_S, PROMPT, SOURCE, TARGET, moved_by
from tests.engine.ranks.streams import RankStream
from tests.engine.session_client import Client
from tests.engine.support import kinds, new_key, received
from tests.service.conftest import TEST_S
from tests.service.engines import READY_S, wait_until

pytestmark = pytest.mark.timeout(TEST_S)

Begin = Callable[[], RankStream]


class Launched:
    """An engine with a lead of its own, and some of its two ranks. The second rank reaches the lead through a proxy."""

    def __init__(self, stack: ExitStack, *numbers: int) -> None:
        self.engine = stack.enter_context(Engine.launch(pool=layout(), private_memory=True, world_size=2))
        self.proxy = Proxy()
        stack.callback(self.proxy.close)
        self.lead = self.engine.address.rpartition(":")
        self.mend()
        self.memories = np.zeros((2, LAYERS, BLOCKS, LAYER_BYTES), np.uint8)
        tickets = self.engine.ticket, replace(self.engine.remote_ticket, address=self.proxy.address)
        self.ranks = [
            stack.enter_context(Rank(tickets[number], number, [self.memories[number]], data_paths=("cma",)))
            for number in numbers
        ]
        self.events: list[Event] = []

    def mend(self) -> None:
        self.proxy.target = self.lead[0], int(self.lead[2])

    def kill_lead(self) -> Callable[[], bool]:
        """Kills the lead. Returns a check whether the engine has begun its next life."""
        first = self.engine.incarnation
        os.kill(self.engine.lead_pid, signal.SIGKILL)

        def back() -> bool:
            self.poll()
            return self.engine.incarnation != first

        return back

    def poll(self) -> list[Event]:
        """Polls, and returns all events so far."""
        self.events += self.engine.poll(0.05)
        return self.events


def taken(begin: Begin, turn: Callable[[], object] = lambda: None) -> RankStream:
    """Returns the stream that holds a returning rank's place, once the lead refuses a second stream. `turn` runs before
    each look.
    """
    streams: list[RankStream] = []

    def found() -> bool:
        turn()
        for stream in [stream for stream in streams if stream.call.done()]:
            streams.remove(stream)
            if stream.call.code() is grpc.StatusCode.ALREADY_EXISTS:
                return True
        while len(streams) < 2:
            streams.append(begin())
        for stream in streams:
            stream.say()  # keeps the stream alive
        return False

    wait_until(found, READY_S)
    (holder,) = streams
    return holder


def test_a_rank_elsewhere_comes_back_and_gives_and_takes(stack: ExitStack, leads: Leads, teams: Teams) -> None:
    peer = PrivateSide(leads[1], teams[1], "cma")
    stack.callback(peer.close)
    side = Launched(stack, 0, 1)
    side.ranks[1].step_done(3)
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key())
    wait_until(side.kill_lead(), READY_S, what=lambda: side.events)
    assert kinds(side.events) == ["Failed", "BlocksReturned"]
    assert handover.over

    made = [made_bytes(SOURCE, 900 + rank) for rank in range(2)]
    for memory, new in zip(side.memories, made, strict=True):
        memory[:, SOURCE] = new
    handover = side.engine.finished_blocks(SOURCE, content(PROMPT), transfer_key=new_key(), after_step=4)
    side.engine.flush()
    pull = peer.engine.pull(handover.grant, content(PROMPT))
    pull.start(TARGET)
    for rank in side.ranks:
        rank.step_done(4)
    received(peer.finish(pull))
    assert peer.read_all(TARGET) == [hashlib.sha256(each.tobytes()).hexdigest() for each in made]
    assert moved_by(peer, pull) == [(0, "cma"), (1, "cma")]

    expected = peer.fill_all(SOURCE, 950)
    taking = side.engine.pull(peer.hand_over(SOURCE, PROMPT).grant, content(PROMPT))
    taking.start(TARGET)
    wait_until(lambda: bool(side.poll()) and taking.over, what=lambda: side.events)
    assert kinds(side.events)[2:] == ["BlocksReturned", "Received"]
    found = [hashlib.sha256(memory[:, TARGET].tobytes()).hexdigest() for memory in side.memories]
    assert found == expected


def test_a_rank_whose_lead_takes_another_stream_for_it_waits_until_that_is_gone(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """The other stream stands for the rank's own first attempt, lost in the network."""
    caplog.set_level(logging.DEBUG, "kvgrpc.engine.rank")
    side = Launched(stack, 1)
    side.proxy.target = ("127.0.0.1", 1)
    back = side.kill_lead()
    channel = stack.enter_context(grpc.insecure_channel(side.engine.address))

    def begin(rank: int = 1) -> RankStream:
        stream = RankStream(channel)
        stack.callback(stream.cut)
        stream.say(ticket=side.engine.ticket.secret, rank=rank, returns=True)
        return stream

    other = taken(begin, back)
    side.mend()

    def refused() -> bool:
        other.say()
        assert not back()
        return "rank 1 has a worker already" in caplog.text

    wait_until(refused)
    other.cut()
    zero = begin(0)

    def complete() -> bool:
        zero.say()
        return back()

    wait_until(complete)
    assert zero.hear().HasField("attached")
    side.ranks[0].step_done(1)  # the rank did not give up


@pytest.mark.parametrize(
    ("how", "reason"),
    [("cut", "CANCELLED"), ("end", "ENGINE_LOST"), ("silence", "DEADLINE"), ("report", "INVALID_FIELD")],
)
def test_a_rank_that_leaves_before_its_engine_is_back_may_come_again(
    scheduler: Client, connect: Connect, how: str, reason: str
) -> None:
    def begin() -> RankStream:
        return connect(ticket=TICKET, rank=1, returns=True)

    first = taken(begin)
    if how == "cut":
        first.cut()
    else:
        if how == "end":
            first.end()
        elif how == "report":
            first.say(reports=[rank_pb2.RankReport(step=rank_pb2.StepReport(step=1))])
        found = first.refusal()
        assert found.reason == reason
        assert how != "silence" or f"said nothing for {GRACE_S:g} s" in found.message
    second = taken(begin)
    connect(ticket=TICKET, rank=0, returns=True).hear()
    assert second.hear().HasField("attached")
    assert scheduler.receive().HasField("attached")
