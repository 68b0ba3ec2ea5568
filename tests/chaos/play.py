"""The plays: a pull, a push, or a push layer by layer, brought to a step, and checks of its end on each survivor."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvgrpc.core.values.limits import Limits
from kvgrpc.v1 import transfer_pb2
from kvgrpc.v1.common_pb2 import TRANSFER_PHASE_SETTLE, TRANSFER_PHASE_WIRE
from kvgrpc.v1.transfer_pb2 import WAITING_FOR_BLOCKS, WAITING_FOR_PARTS
from tests.chaos.cast import Player
from tests.service.engines import CANCELLED, FAILED, SUCCEEDED, wait_until
from tests.service.values import prompt

COUNT = 16
TOKENS = prompt(COUNT * 16)
BLOCKS, TARGET = list(range(COUNT)), list(range(20, 20 + COUNT))
OVER = (SUCCEEDED, FAILED, CANCELLED)
KV, NEW, NEXT = 7, 100, 50
"""Bytes in blocks: the KV that moves, what the engine writes afterwards, and the KV of the next request."""
SLACK_S = 10.0
"""Slack that a busy machine may add to a bound, in seconds."""

SPARE, FREE = list(range(40, 44)), list(range(44, 48))
"""Blocks that no play uses; the next request uses them."""
ENDS = ("Received", "BlocksReturned")
"""Events after which an engine has all its blocks back."""

MIDWAY, SETTLE = "bytes on their way", "before the settle"
STEPS = {
    "pull": ("before they have met", "waiting for blocks", MIDWAY, SETTLE),
    "push": ("registered", "between two parts", MIDWAY, SETTLE),
    "layers": ("between two layers", MIDWAY, SETTLE),
    "written push": ("between two parts", MIDWAY, SETTLE),
    "written layers": ("between two layers", MIDWAY, SETTLE),
}
"""Steps by mode. In a written mode the source writes; in the others the destination reads."""


def bound_s(mode: str, limits: Limits) -> float:
    """Returns the longest time, in seconds, that a transfer of this mode may take to end after a fault: the sum of its
    consecutive waits. Memory that only a re-key brings back takes one more re-key.
    """
    waits = limits.peer_grace_s + limits.transfer_timeout_s + limits.settle_timeout_s
    if mode == "pull":
        return waits + max(limits.lease_cap_s, limits.connect_timeout_s + limits.queue_timeout_s)
    rekey = limits.peer_grace_s + limits.transfer_timeout_s if mode.startswith("written") else 0.0
    return waits + limits.registration_timeout_s + rekey


@dataclass
class Play:
    """One transfer from P to D."""

    source: Player
    destination: Player
    mode: str
    limits: Limits
    name: str = "first"
    grant: str = ""
    _asked: list[Player] = field(default_factory=list)

    @property
    def written(self) -> bool:
        return self.mode.startswith("written")

    def bring_to(self, step: str) -> None:
        """Plays up to a step. P's blocks are full of KV, D's of zeros."""
        self.source.paint(BLOCKS, KV)
        if self.mode == "pull":
            self._pull(step)
        else:
            self._push(step)

    def _pull(self, step: str) -> None:
        self.grant = self._ask(self.source, "hand_over", blocks=BLOCKS, tokens=TOKENS)
        if step == "before they have met":
            return
        self._ask(self.destination, "pull", grant=self.grant, tokens=TOKENS)
        self._until(lambda: self.received.waiting_for == WAITING_FOR_BLOCKS)
        if step == "waiting for blocks":
            return
        self.destination.ask("start", name=self.name, blocks=TARGET)
        self._until(lambda: self._on_the_wire() or self.received.state in OVER)
        if step == SETTLE:
            self._hold_the_settle()

    def _hold_the_settle(self) -> None:
        """Holds the lead that would answer the settle, once the mover no longer needs it."""
        mover, other = (self.source, self.destination) if self.written else (self.destination, self.source)
        other.hold()

        def waits() -> bool:
            end = mover.transfer(self.name)
            return end.phases[-1].phase == TRANSFER_PHASE_SETTLE or end.state in OVER

        self._until(waits)

    def go_on(self) -> None:
        """Continues whoever was held. D makes its pull only now if it has not made one."""
        self.source.let_go()
        self.destination.let_go()
        if self.mode == "pull" and self.destination not in self._asked and self.destination.sound("scheduler"):
            self._ask(self.destination, "pull", grant=self.grant, tokens=TOKENS)
            self.destination.ask("start", name=self.name, blocks=TARGET)

    def knows(self, player: Player) -> bool:
        """Checks whether the player's engine has the transfer."""
        return player in self._asked

    def _ask(self, player: Player, op: str, **request: object) -> str:
        self._asked.append(player)
        return str(player.ask(op, name=self.name, **request))

    def _push(self, step: str) -> None:
        key = os.urandom(16).hex()
        grant = self._ask(self.destination, "reserve", blocks=TARGET, tokens=TOKENS, key=key)
        self._ask(self.source, "push", key=key, tokens=TOKENS, grant=grant)
        self._until(lambda: bool(self.source.ask("id", name=self.name)))
        if step == "registered":
            return
        if step == "between two parts":
            self._part(BLOCKS[:2], last=False)
            self._until(lambda: self.received.waiting_for == WAITING_FOR_PARTS and self.received.moved_bytes > 0)
        elif step == "between two layers":
            self._part(BLOCKS, layers=[0, 1], last=False)
            self._until(lambda: len(self.received.layers_done) == 1)
        elif self.mode.endswith("layers"):
            self._part(BLOCKS, layers=[0, 1], last=False)
            self._part(BLOCKS, layers=[1, 1], last=True)
            self._until(self._on_the_wire)
        else:
            self._part(BLOCKS, last=True)
            self._until(self._on_the_wire)
        if step == SETTLE:
            self._hold_the_settle()

    def _part(self, blocks: list[int], *, last: bool, layers: list[int] | None = None) -> None:
        self.source.ask("part", name=self.name, blocks=blocks, layers=layers, last=last)

    def _on_the_wire(self) -> bool:
        ends = (self.received, self.source.transfer(self.name))
        return any(end.phases and end.phases[-1].phase == TRANSFER_PHASE_WIRE for end in ends)

    @property
    def received(self) -> transfer_pb2.Transfer:
        return self.destination.transfer(self.name)

    def _until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, what=lambda: self.received)


def check_over(player: Player, name: str, within_s: float, *, proved: bool = False) -> str:
    """Returns the last event of a player's transfer, which must come within its bound. Returns "" while memory is in
    quarantine with its missing proof named, unless that proof comes by itself (`proved`), and "LeadDied" if the
    engine's life is over.
    """
    until = time.monotonic() + within_s + SLACK_S
    while time.monotonic() < until:
        events = player.ask("events", wait_s=0.1)
        mine = [kind for kind, about, _ in events if about == name]
        if mine and mine[-1] in ENDS:
            assert sum(kind in ENDS for kind in mine) == 1, events
            return str(mine[-1])
        if player.lost(events):
            return "LeadDied"
        if "Failed" in mine and not proved and (not player.reachable or player.quarantine()):
            return ""
    raise AssertionError(
        f"{player.name}: {name} is not over: {player.ask('events', wait_s=0.0)} {player.lead.status()}"
    )


def check_serves(source: Player, destination: Player, limits: Limits) -> None:
    """Checks that the next request between the two brings its bytes."""
    name, tokens = f"next from {source.name}", prompt(64, seed=3)
    source.paint(SPARE, NEXT)
    destination.paint(FREE, 0)
    grant = source.ask("hand_over", name=name, blocks=SPARE, tokens=tokens)
    destination.ask("pull", name=name, grant=grant, tokens=tokens)
    destination.ask("start", name=name, blocks=FREE)
    within_s = bound_s("pull", limits)
    assert check_over(destination, name, within_s) == "Received"
    assert check_over(source, name, within_s) == "BlocksReturned"
    assert destination.see(FREE) == [NEXT]
