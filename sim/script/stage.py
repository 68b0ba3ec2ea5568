"""The stage of a scenario: its hosts and engines, the router's knowledge of requests, and the outcome."""

from dataclasses import replace
from hashlib import sha256

from kvgrpc.core.actions import TellEngine
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region
from kvgrpc.core.values.limits import Limits
from sim.script.engine import ScriptEngine
from sim.script.hosts import HandHost, HandNetwork
from sim.script.line import NamedThings
from sim.script.mover import Hand
from sim.world.agenda import Agenda
from sim.world.memory import Cell, KvStore, Memory, Prompt, layout
from sim.world.surroundings import Surroundings

TOKENS = 1 << 20
"""Distance between the first tokens of two prompts."""
IDLE_AFTER_S = 7_200.0
"""Virtual time after which every bound of the protocol is over, in seconds."""


class NamedStore(KvStore):
    """A store that can also return the KV of a number."""

    def cell(self, number: int) -> Cell | None:
        """Returns the KV; None if nothing was written."""
        return self._cells[number]


class ScriptStage:
    """Everything that the commands of one scenario act on."""

    def __init__(self) -> None:
        self.agenda = Agenda()
        self.network = HandNetwork(self.agenda)
        self.store = NamedStore()
        self.limits = Limits()
        self.hosts: NamedThings[HandHost] = NamedThings()
        self.engines: NamedThings[ScriptEngine] = NamedThings()
        """The present life of each engine."""
        self.prompts: NamedThings[Prompt] = NamedThings()
        self.grants: NamedThings[bytes] = NamedThings()
        """READ grants, by request."""
        self.targets: dict[tuple[str, str], bytes] = {}
        """WRITE grants, by engine and request."""
        self._weights: dict[str, str] = {}
        self._lives: dict[str, str] = {}
        """Display name of each life."""
        self._around = Surroundings(self.agenda, self.network, self.limits, layout(8), 1, store=self.store)
        self._seen: list[str] = []
        self._passing = False
        """True while time passes."""
        self._drawn = 0

    # -- hosts

    def engine(  # noqa: PLR0913 - what an engine is
        self, name: str, *, pool: PoolLayout, ranks: int, writes: bool, compares: bool, sets_aside: bool,
        collective: bool, weights: str, protocol: int,
    ) -> None:  # fmt: skip
        """Starts a lead with its engine."""

        def describe(description: EngineDescription) -> EngineDescription:
            lowest = protocol or description.protocol_min
            return replace(description, weights_revision=weights, protocol_min=lowest, protocol_max=protocol or lowest)

        around = replace(
            self._around, limits=self.limits, pool=pool, ranks=ranks, writers=frozenset({"loopback"} if writes else ()),
            checksums=compares, cannot_set_aside=frozenset(() if sets_aside else {name}),
            collective=frozenset({name} if collective else ()),
        )  # fmt: skip
        self._weights[name] = weights
        tell = lambda action: self._tell(name, action)
        self.hosts[name] = HandHost(name, around, Hand(), tell, describe)
        self.start(name)

    def start(self, name: str) -> None:
        """Starts a lead again."""
        self.hosts[name].start()
        self._born(name)

    def attach(self, name: str) -> None:
        """Ends the engine behind a lead, and attaches another one."""
        self.hosts[name].reattach()
        self._born(name)

    def life(self, name: str) -> str:
        """Returns the present or last life of a host."""
        return self.hosts[name].life

    def called(self, life: str) -> str:
        """Returns the display name of a life: its engine, and its number."""
        return self._lives[life]

    # -- knowledge of a router

    def key(self, name: str) -> bytes:
        """Returns the transfer key of a request."""
        return sha256(name.encode()).digest()[:16]

    def prompt(self, name: str, tokens: int = 64) -> Prompt:
        """Returns the prompt of a request; a new one for a new name."""
        if name not in self.prompts:
            first = TOKENS * len(self.prompts)
            self.prompts[name] = Prompt(tuple(range(first, first + tokens)))
        return self.prompts[name]

    def random_id(self) -> bytes:
        """Returns 16 bytes that were not drawn before."""
        self._drawn += 1
        return sha256(f"stage/{self._drawn}".encode()).digest()[:16]

    # -- outcome

    def say(self, text: str) -> None:
        """Adds a line to the outcome."""
        self._seen.append(f"{self.agenda.now:.1f}s {text}" if self._passing else text)

    def seen(self) -> list[str]:
        """Returns the outcome since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def advance(self, for_s: float) -> None:
        """Lets time pass."""
        self._passing = True
        end = self.agenda.now + for_s
        self.agenda.run(end)
        self.agenda.now = end
        self._passing = False

    def holds(self, memory: Memory, cell: int, wanted: Cell) -> str:
        """Returns what one cell holds, as the name of a prompt."""
        number = memory.cells[cell]
        found = self.store.cell(number)
        if found is None:
            return "nothing"
        if self.store.holds(number, wanted):
            return next(name for name, prompt in self.prompts.items() if _begins(prompt, wanted.prompt))
        name = next((name for name, prompt in self.prompts.items() if _begins(prompt, found.prompt)), "something else")
        return f"{name} (of another place)" if _begins(self.prompts.get(name), wanted.prompt) else name

    def check(self) -> None:
        """Checks everything that is visible between two commands."""
        for host in self.hosts.values():
            if not host.stopped:
                host.check()

    # -- end

    def finish(self) -> None:
        """Mends everything, waits until nothing is left to do, and asserts that nothing is left over."""
        for name, host in self.hosts.items():
            host.hand.hold_at = host.hand.fault = ""
            host.hand.resume()
            if not host.up:
                self.start(name)
        self.network.mend_all()
        assert self.agenda.run(self.agenda.now + IDLE_AFTER_S), "something goes on for ever"
        for host in self.hosts.values():
            host.audit.check_quarantine(host.ledger.writes)
            # Two that declared each other dead may never speak again. Nothing moves by now, and the operator says so.
            host.release_quarantine(force=True)
        assert self.agenda.run(self.agenda.now + IDLE_AFTER_S), "something goes on for ever"
        for name, host in self.hosts.items():
            host.check_idle()
            self.engines[name].check_idle()

    def _born(self, name: str) -> None:
        host = self.hosts[name]
        self._lives[host.life] = name if host.lives == 1 else f"{name}/{host.lives}"
        engine = self.engines[name] = ScriptEngine(host, self.say, self._weights[name])
        host.used = engine.shop.blocks.in_use

    def _tell(self, name: str, action: TellEngine) -> None:
        self.engines[name].told(action.news)


def one_group(blocks: int, block_tokens: int = 16) -> PoolLayout:
    """Returns a pool with one group of two layers."""
    group = Group("kv", GroupKind.FULL_ATTENTION, 2, block_tokens, blocks, 1, 1, "uint8")
    return PoolLayout((group,), (Region(0, 0, 1, 0, 1, 1), Region(0, 1, 1, blocks, 1, 1)), 2 * blocks)


def _begins(prompt: Prompt | None, start: Prompt) -> bool:
    return prompt is not None and prompt.salt == start.salt and prompt.tokens[: len(start.tokens)] == start.tokens
