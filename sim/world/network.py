"""The network between leads: calls that are late, lost, doubled or cut off, and liveness streams."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple, Protocol

from kvgrpc.core.actions import Answer
from kvgrpc.core.events import Call, CallAbandoned, Event, HandshakeReceived, PeerAlive, PeerSilent
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.errors import KVGrpcError, Reason, Unavailable
from sim.world.agenda import Agenda
from sim.world.faults import RPC_TIMEOUT_S, Faults, Luck
from sim.world.mover import Mover

Result = Answer | KVGrpcError
Ask = Callable[[Call], Event]
Give = Callable[[Result], None]


class NetworkLead(Protocol):
    """The network's view of a host."""

    address: str
    up: bool

    @property
    def stopped(self) -> bool:
        """True if the host's processes are stopped."""

    @property
    def node(self) -> object:
        """State of the host's process; another object after a crash."""

    @property
    def life(self) -> str:
        """Key of the present life of the host's engine."""

    @property
    def mover(self) -> Mover:
        """Mover of that life."""

    def call(self, ask: Ask, principal: str, give: Give) -> None: ...

    def handle(self, event: Event) -> None: ...

    def knows(self, life: str, proof: bytes) -> bool: ...

    @property
    def peers(self) -> list[Peer]:
        """Lives that the host's node knows."""


class Between(Protocol):
    """An interceptor between a host and the network, which may alter all messages of the host."""

    def asks(self, address: str, ask: Ask, give: Give) -> tuple[Ask, Give]:
        """Alters a request of the host to an address."""

    def hears(self, ask: Ask, principal: str, give: Give) -> None:
        """Alters a request to the host, which is answered by `give`."""


class Persona(NamedTuple):
    """A life that a host has made up."""

    home: str
    """Address of that host."""
    where: str
    """Address at which, as the life says, it can be called."""


class Network:
    """All links. Nothing is cut at first."""

    def __init__(self, agenda: Agenda, rng: Random, faults: Faults, seen: Counter[str] | None = None) -> None:
        self._agenda = agenda
        self._luck = Luck(rng, faults, seen)
        self._leads: dict[str, NetworkLead] = {}
        self._cut: set[tuple[str, str]] = set()
        """Pairs (from, to) of addresses between which nothing passes."""
        self._silent: set[str] = set()
        """Lives that neither hear nor say anything."""
        self._streams: dict[tuple[str, str], tuple[NetworkLead, NetworkLead]] = {}
        """Liveness streams by the two lives, the dialling one first."""
        self._shown: dict[tuple[str, str], tuple[bytes, bytes]] = {}
        """Proofs that the two lives show on them."""
        self._secrets = Random("secrets")  # noqa: S311 - a simulation, no secrets
        self.between: dict[str, Between] = {}
        """Interceptors by the address of the host that lies."""
        self.personas: dict[str, Persona] = {}
        """Made-up lives by key."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all hosts."""
        return tuple(self._leads)

    def home(self, life: str) -> str:
        """Returns the address of the host behind a life. In the simulator an engine's id is its address."""
        persona = self.personas.get(life)
        return life.rpartition("@")[0] if persona is None else persona.home

    def lead(self, address: str) -> NetworkLead:
        """Returns the host at an address."""
        return self._leads[address]

    def where(self, life: str) -> str:
        """Returns the address at which a life is called."""
        persona = self.personas.get(life)
        return life.rpartition("@")[0] if persona is None else persona.where

    @property
    def faults(self) -> Faults:
        """Faults of messages from now on."""
        return self._luck.faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._luck.faults = faults

    def add(self, lead: NetworkLead) -> None:
        """Connects a host under its address."""
        self._leads[lead.address] = lead

    def rpc(  # noqa: PLR0913 - what is known of a call
        self, caller: NetworkLead, address: str, ask: Ask, give: Give, timeout_s: float = RPC_TIMEOUT_S,
        *, unaltered: bool = False, once: bool = False,
    ) -> None:  # fmt: skip
        """Calls the lead at an address. `give` gets the answer, or Unavailable, exactly once while the caller's process
        lives, even after the engine that called is gone. `unaltered` bypasses the interceptor. `once` means that nobody
        repeats the call.
        """
        node = caller.node
        between = self.between.get(caller.address)
        if between is not None and not unaltered:
            ask, give = between.asks(address, ask, give)
        open_calls = [give]

        def answer(result: Result) -> None:
            if open_calls and caller.up and caller.node is node:
                open_calls.pop()(result)

        asked: list[tuple[NetworkLead, int]] = []

        def give_up() -> None:
            if open_calls:
                answer(Unavailable(Reason.PEER_UNREACHABLE, f"no answer from {address} in time"))
                for lead, number in asked:
                    lead.handle(CallAbandoned(number))

        self._agenda.after(timeout_s, give_up)
        for _ in range(2 if not once and self._luck.strikes("duplicate") else 1):
            if not self._luck.strikes("lose_request"):
                self._agenda.after(self._delay(), lambda: self._arrive(caller, address, ask, answer, asked))

    def stream(self, dialler: NetworkLead, life: str, shown: tuple[bytes, bytes], own: str = "") -> bool:
        """Makes a liveness stream between the dialler and the life that it shook hands with. Returns False if that is
        impossible. `own` is a life that the dialler has made up; `shown` has the proofs of both.
        """
        own = own or dialler.life
        for lead in self._leads.values():
            if lead.up and lead.life == life and lead.knows(own, shown[0]) and self._connected(dialler, lead):
                self._streams[own, life], self._shown[own, life] = (dialler, lead), shown
                lead.handle(PeerAlive(own, shown[0]))
                return True
        liar = self._leads.get(self.home(life)) if life in self.personas else None
        if liar is None or not liar.up or not self._connected(dialler, liar):
            return False
        self._streams[own, life], self._shown[own, life] = (dialler, liar), shown
        return True

    def takes_another(self, own: str, life: str, proof: bytes) -> bool:
        """Returns True if a life knows another one, but not by this proof."""
        return any(
            peer.key == own and peer.state is not PeerState.DEAD and not peer.proves(proof)
            for lead in self._leads.values() if lead.up and lead.life == life
            for peer in lead.peers
        )  # fmt: skip

    def gone(self, life: str) -> None:
        """Tells hosts that the processes of a life are gone, but not that all their sends have landed."""
        self._tell_ended(life, lambda: False)

    def at_rest(self, life: str) -> None:
        """Tells hosts that no mover of that life moves anything any more, which is a proof for those that can see
        it.
        """
        self._tell_ended(life, lambda: not self._luck.strikes("undrained"))

    def _tell_ended(self, life: str, drained: Callable[[], bool]) -> None:
        """Lets every host see the end, sooner or later."""
        for lead in self._leads.values():

            def tell(lead: NetworkLead = lead, drained: bool = drained()) -> None:
                if lead.up:
                    lead.mover.ends.ended(life, drained=drained)

            self._agenda.after(self._luck.draw(self.faults.silence_s), tell)

    def hang_up(self, lead: NetworkLead, life: str) -> None:
        """Closes a lead's channel to a life of a peer: the stream ends at both."""
        for pair in ((lead.life, life), (life, lead.life)):
            if pair in self._streams:
                self._break(pair)
                del self._streams[pair]

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Cuts the link between two addresses until `mend`; one way, nothing passes from `a` to `b`."""
        self._cut.update([(a, b)] if one_way else [(a, b), (b, a)])
        self._break_between(a, b)

    def mend(self, a: str, b: str) -> None:
        """Lets messages pass again, and restores the streams of lives that still live."""
        self._cut -= {(a, b), (b, a)}
        self._reconnect_where(lambda one, other: {one.address, other.address} == {a, b})

    def silence(self, life: str) -> None:
        """Stops the processes of a life: its streams fall silent until `resume`."""
        self._silent.add(life)
        for pair in [pair for pair in self._streams if life in pair]:
            self._break(pair)

    def resume(self, life: str) -> None:
        """Resumes the processes of a life."""
        self._silent.discard(life)
        self._reconnect_where(lambda one, other: life in (one.life, other.life))

    def mend_all(self) -> None:
        """Mends all links."""
        for link in sorted(self._cut):
            self.mend(*link)

    def ended(self, life: str) -> None:
        """Breaks the streams of a life that ended."""
        lives = {life, *(name for name, persona in self.personas.items() if persona.home == self.home(life))}
        for pair in [pair for pair in self._streams if not lives.isdisjoint(pair)]:
            self._break(pair)
            del self._streams[pair]

    def _arrive(
        self, caller: NetworkLead, address: str, ask: Ask, answer: Give, asked: list[tuple[NetworkLead, int]]
    ) -> None:
        """Delivers a call. `asked` gets the lead, and the number of the call there."""
        lead = self._leads.get(address)
        if lead is None or not lead.up:
            refused = Unavailable(Reason.PEER_UNREACHABLE, f"no lead listens at {address}")
            self._agenda.after(self._delay(), lambda: answer(refused))
        elif (caller.address, address) not in self._cut:

            def noted(call: Call) -> Event:
                asked.append((lead, call.id))
                event = ask(call)
                if isinstance(event, HandshakeReceived):
                    event = replace(event, asks=self._secrets.randbytes(32))
                return event

            hear = self.between[address].hears if address in self.between else lead.call
            hear(noted, f"peer/{caller.address}", lambda result: self._return(caller, lead, result, answer))

    def _return(self, caller: NetworkLead, lead: NetworkLead, result: Result, answer: Give) -> None:
        if (lead.address, caller.address) not in self._cut and not self._luck.strikes("lose_reply"):
            self._agenda.after(self._delay(), lambda: answer(result))

    def _break_between(self, a: str, b: str) -> None:
        for pair, (one, other) in list(self._streams.items()):
            if {one.address, other.address} == {a, b}:
                self._break(pair)

    def _break(self, pair: tuple[str, str]) -> None:
        """Lets both ends notice a broken stream, each after its own delay, unless the stream stands again by then."""
        dialler, other = self._streams[pair]
        for lead, own, peer in ((dialler, *pair), (other, *reversed(pair))):
            delay_s = self._luck.draw(self.faults.silence_s)
            self._agenda.after(delay_s, lambda lead=lead, own=own, peer=peer: self._notice(pair, lead, own, peer))  # type: ignore[misc]

    def _notice(self, pair: tuple[str, str], lead: NetworkLead, own: str, peer: str) -> None:
        stands = pair in self._streams and self._connected(*self._streams[pair])
        if lead.up and lead.life == own and not stands:
            lead.handle(PeerSilent(peer))

    def _reconnect_where(self, wanted: Callable[[NetworkLead, NetworkLead], bool]) -> None:
        for pair, ends in list(self._streams.items()):
            if wanted(*ends):
                self._agenda.after(self._delay(), lambda pair=pair: self._reconnect(pair))  # type: ignore[misc]

    def _reconnect(self, pair: tuple[str, str]) -> None:
        if pair not in self._streams or not self._connected(*self._streams[pair]):
            return
        shown = self._shown[pair]
        if not self._streams[pair][1].knows(pair[0], shown[0]):
            del self._streams[pair]
            return
        for lead, own, peer, proof in zip(self._streams[pair], pair, reversed(pair), reversed(shown), strict=True):
            if lead.up and lead.life == own:
                lead.handle(PeerAlive(peer, proof))

    def _connected(self, a: NetworkLead, b: NetworkLead) -> bool:
        """Returns True if messages pass both ways."""
        cut = (a.address, b.address) in self._cut or (b.address, a.address) in self._cut
        return not cut and not self._silent & {a.life, b.life}

    def _delay(self) -> float:
        return self._luck.draw(self.faults.slow_s if self._luck.strikes("slow") else self.faults.delay_s)
