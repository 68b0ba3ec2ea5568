"""A world that a script operates: nothing goes wrong, and nothing moves on, unless the script says so.

Hosts, network and memory are those of the random worlds, so the same checks apply.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from kvgrpc.core.actions import TellEngine
from kvgrpc.core.events import Call, Event, Rekeyed
from kvgrpc.core.values.compatibility import EngineDescription
from sim.hosts.host import Host
from sim.script.mover import Hand, HandMover
from sim.world.agenda import Agenda
from sim.world.faults import RPC_TIMEOUT_S, Faults
from sim.world.memory import Memory
from sim.world.mover import Mover
from sim.world.network import Ask, Give, Network, NetworkLead
from sim.world.surroundings import Surroundings

CALM = Faults(delay_s=(0.001, 0.001), silence_s=(0.5, 0.5))
"""Faults of a calm network: a message takes 1 ms, and a broken stream is noticed after 0.5 s."""
LOSE, LOSE_REPLY, LATE, TWICE = "lose", "lose-reply", "late", "twice"
"""Faults of a single message."""


class HandNetwork(Network):
    """A network on which the script loses, delays or doubles single messages."""

    def __init__(self, agenda: Agenda) -> None:
        super().__init__(agenda, Random(0), CALM)  # noqa: S311 - nothing is drawn
        self.unseen = False
        """True if no rank sees lives end."""
        self._rules: dict[tuple[str, str], list[tuple[str, float]]] = {}
        """Faults of the next messages, by sender and kind."""

    def befall(self, address: str, message: str, what: str, for_s: float) -> None:
        """Sets a fault for the next message of that kind from an address."""
        self._rules.setdefault((address, message), []).append((what, for_s))

    def rpc(  # noqa: PLR0913 - as in `Network`
        self, caller: NetworkLead, address: str, ask: Ask, give: Give, timeout_s: float = RPC_TIMEOUT_S,
        *, unaltered: bool = False, once: bool = False,
    ) -> None:  # fmt: skip
        """Makes a call like any network, with this message's fault."""
        rules = self._rules.get((caller.address, type(ask(Call(0, ""))).__name__))
        what, for_s = rules.pop(0) if rules else ("", 0.0)
        lost = what in (LOSE, LOSE_REPLY, LATE)
        self.faults = replace(CALM, lose_request=float(lost), duplicate=float(what == TWICE))
        super().rpc(caller, address, ask, give, timeout_s, unaltered=unaltered, once=once)
        self.faults = CALM
        if what in (LOSE_REPLY, LATE):
            self._agenda.after(self._delay() + for_s, lambda: self._arrive(caller, address, ask, lambda _: None, []))

    def at_rest(self, life: str) -> None:
        """Lets peers see the end of a life, unless `unseen` is set."""
        if not self.unseen:
            super().at_rest(life)


class HandHost(Host):
    """A host whose movers the script operates, and whose lead the script can stop for a while."""

    def __init__(
        self, address: str, world: Surroundings, hand: Hand, told: Callable[[TellEngine], None],
        describe: Callable[[EngineDescription], EngineDescription],
    ) -> None:  # fmt: skip
        self.hand = hand
        self.lives = 0
        """Number of lives that the host has had."""
        self.used: Callable[[int, int], bool] = lambda *_: True
        """Returns True if the scripted engine uses a block of a group."""
        self._told = told
        self._change = describe
        self._agenda = world.agenda
        super().__init__(address, world, Random(address))  # noqa: S311 - a simulation, no secrets

    @property
    def mover(self) -> HandMover:
        assert isinstance(self._life.mover, HandMover)
        return self._life.mover

    @property
    def memories(self) -> list[Memory]:
        """Memories of its present life, by rank."""
        return self._life.memories

    def tell_engine(self, action: TellEngine) -> None:
        """Passes the lead's news to the scripted engine."""
        self.ledger.told(action.news)
        self._told(action)

    def rekey(self, rank: int) -> None:
        """Restarts a rank's data path."""
        life, proves = self._life, self.hand.rekey_proves

        def begin_anew() -> None:
            life.rekey(rank, proves=proves)
            self.handle(Rekeyed(rank, "" if proves else "the script says so"))

        self.soon(begin_anew)

    def uses(self, group: int, block: int) -> bool:
        """Returns True if the scripted engine uses a block."""
        return self.used(group, block)

    def _feed(self, event: Event, not_before: float) -> None:
        super()._feed(event, not_before)
        self.node.check()

    def _attach(self) -> None:
        self.lives += 1
        super()._attach()

    def _make_mover(self, memories: list[Memory]) -> Mover:
        world = self._world
        sends = self.address in world.collective
        return HandMover(self._agenda, memories, self.handle, self.hand, world.wires, sends=sends)

    def _describe(self, incarnation: int) -> EngineDescription:
        return self._change(super()._describe(incarnation))
