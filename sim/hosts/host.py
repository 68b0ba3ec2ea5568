"""One lead on the simulated network: runs a node with its clock and timer, and performs its actions."""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

from kvgrpc.core.actions import Action, TellEngine
from kvgrpc.core.events import (
    Call,
    Event,
    LeasesVoided,
    LifeBegan,
    PostingEnded,
    Rekeyed,
    ReleaseQuarantine,
    SettleAccess,
    Tick,
)
from kvgrpc.core.node import Node
from kvgrpc.core.pool.quarantine import TOO_MUCH
from kvgrpc.core.tables.peers import Peer, PeerState
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.ids import peer_key
from kvgrpc.core.values.owners import ENGINE
from sim.checks.accounts import LeadAccounts
from sim.checks.audit import Audit
from sim.checks.leftovers import check_left
from sim.checks.unaudited import Unaudited
from sim.engine.engine import Engine
from sim.hosts.action_performer import ActionPerformer
from sim.hosts.life import Life, describe, make_mover
from sim.world.clock import Alarm, Clock
from sim.world.faults import Luck
from sim.world.memory import Memory, MemoryDoor, Prompt
from sim.world.mirror import MirroredMemory
from sim.world.mover import Mover
from sim.world.network import Ask, Give
from sim.world.surroundings import Surroundings

OPERATOR = "operator"
"""Principal of human operators."""


class Host:
    """One lead with its engine and movers. It can crash whole, lose only its engine or a rank, or be stopped."""

    def __init__(self, address: str, world: Surroundings, rng: Random) -> None:
        self.address = address
        self.up = False
        self.ledger = LeadAccounts(world.limits)
        self.node: Node
        self.audit: Audit
        self.tells = False
        """True if the node tells its engine about the current event."""
        self._world = world
        self._rng = rng
        self._life: Life
        self._attached = False
        self._movers: list[Mover] = []
        """Movers of this process: of its present life, and of lives that ended before one of their postings did."""
        self._flags: list[str] = []
        """Leases whose void flags are set but not yet read."""
        self._clock: Clock
        self._alarm: Alarm
        self._stopped = False
        self._waiting: deque[Callable[[], None]] = deque()
        """Events that came while the host was stopped."""
        self._doomed_in = -1
        """Number of events until the host crashes while it performs an event's actions; negative means never."""
        self._fallen = False
        """True if the host has crashed but its state is not cleared yet."""
        self._performing = ActionPerformer(self, world)
        world.network.add(self)

    @property
    def description(self) -> EngineDescription:
        """Description of its present life, with the current memory generation."""
        return self._life.description

    @property
    def engine(self) -> Engine:
        return self._life.engine

    @property
    def mover(self) -> Mover:
        return self._life.mover

    @property
    def lies(self) -> bool:
        """True if a liar stands between the host and the network."""
        return self.address in self._world.liars

    @property
    def ready(self) -> bool:
        """True if the host's engine takes requests."""
        return self.up and self._attached

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def doomed(self) -> bool:
        """True if the host will crash in the middle of an event."""
        return self._doomed_in >= 0

    @property
    def life(self) -> str:
        return self._life.key

    def start(self) -> None:
        """Starts a lead with its engine attached. The lead's clock is unrelated to any other."""
        world = self._world
        if self._fallen:
            self.crash()
        self.node = Node(world.limits, world.writers, checksums=world.checksums)
        self.audit = Unaudited() if self.lies else Audit(self.node, world.opened, world.vouched, world.lies)
        self._clock = Clock(world.agenda, Luck(self._rng, world.network.faults, world.seen))
        self._alarm = Alarm(world.agenda, self._clock, partial(self._ring, self.node))
        self.up = True
        self._tell("starts")
        self._attach()

    def crash(self) -> None:
        """Ends lead, engine and movers. The memory that peers still map becomes garbage."""
        self._tell("crashes")
        self.up = self._fallen = self._stopped = False
        self._doomed_in = -1
        self._waiting.clear()
        network, life, mover = self._world.network, self.life, self._life.mover
        mover.retire(lambda: network.at_rest(life))
        movers, self._movers = self._movers, []
        for mover in movers:
            mover.stop()
        if self._life.mover.landing:
            network.gone(life)
        if self._attached:
            self._end_life()
        self.ledger.crashed()

    def doom(self, events: int) -> None:
        """Plans a crash after `events` more events, halfway through the last one's actions."""
        self._doomed_in = events

    def release_quarantine(self, *, force: bool = False) -> None:
        """Calls ReleaseQuarantine as an operator: by re-key, or with `force` on the operator's assurance."""
        why = "nothing moves" if force else ""
        self.call(lambda call: ReleaseQuarantine(call, force, why=why), OPERATOR, lambda _: None)

    def spare(self) -> None:
        """Cancels a planned crash."""
        self._doomed_in = -1

    def reattach(self) -> None:
        """Ends the engine and attaches another one to the same lead. The old one's postings run to their end."""
        self._end_life()
        life, mover = self.life, self._life.mover
        self._attach()
        mover.retire(lambda: self._world.network.at_rest(life))

    def lose_rank(self, rank: int, back_after_s: float) -> None:
        """Ends the process of a rank, and thus the engine's life. Another engine attaches some time later."""
        self._tell(f"loses rank {rank}")
        self._life.mover.stop_rank(rank)
        self._end_life()
        life, mover, node = self.life, self._life.mover, self.node
        self.handle(LifeBegan(self._rng.getrandbits(64), b"", None))
        mover.retire(lambda: self._world.network.at_rest(life))

        def attach() -> None:
            if self.up and self.node is node:
                self._when_running(self._attach)

        self._world.agenda.after(back_after_s, attach)

    def stop(self, for_s: float, *, movers_s: float) -> None:
        """Stops the lead and its movers for a while. The lead learns later what happens meanwhile."""
        if self._stopped or not self.up:
            return
        self._tell(f"is stopped for {for_s:.3f} s")
        self._stopped = True
        life, node = self.life, self.node
        self._world.network.silence(life)
        for mover in self._movers:
            mover.pause(movers_s)

        def go_on() -> None:
            self._world.network.resume(life)
            if self.up and self.node is node:
                self._go_on()

        self._world.agenda.after(for_s, go_on)

    def call(self, ask: Ask, principal: str, give: Give, **fields: str) -> None:
        """Takes a call of this host's own engine, of a router or of a peer. `fields` are fields of its Call."""

        def take() -> None:
            number = self.ledger.called(give)
            if principal == ENGINE:
                self._read_flags()
            event = ask(Call(number, principal, **fields))  # type: ignore[arg-type]
            self.ledger.waits(number, type(event), self.clock())
            self._take(event)

        self._when_running(take)

    def handle(self, event: Event) -> None:
        """Gives the node an event, checks its invariants, and performs its actions."""
        self._when_running(lambda: self._take(event))

    def void(self, lease_id: str) -> None:
        """Sets the void flag of a lease for its engine. The lead reads the flag before it vouches for anything."""
        self._flags.append(lease_id)
        self.later(self._rng.expovariate(50.0), lambda: self._when_running(self._read_flags))

    def at_rest(self, blocks: Blocks) -> bool:
        """Returns True if nothing pins these blocks, or if void flags of the engine are not read yet."""
        pins = self.node.state.pool.pins
        return bool(self._flags) or all(len(pins.unpinned(i, ids)) == len(ids) for i, ids in enumerate(blocks))

    def clock(self) -> float:
        """Returns the time of the lead's clock, which never goes back despite rounding."""
        return max(self._clock.now(), self.node.state.now)

    def offered(self, key: bytes) -> Prompt | None:
        """Returns the prompt of a transfer key."""
        return self._world.offered.get(key)

    def lied_to(self, transfer_id: str) -> bool:
        """Returns True if the other side of a transfer is a liar."""
        return self._world.lied_to(self.node.state.transfers.find(transfer_id))

    def door(self, rank: int) -> MemoryDoor:
        """Returns the door to a rank's memory that peers are offered now."""
        return self._life.doors[rank]

    def rekey(self, rank: int) -> None:
        """Restarts a rank's data path. Some restarts prove that peers write no more, some do not."""
        life, luck = self._life, Luck(self._rng, self._world.network.faults, self._world.seen)
        self._world.seen["rekey_by_itself" if self.node.state.pool.rekeying == TOO_MUCH else "rekey"] += 1
        proves = not luck.strikes("rekey_proves_nothing")
        message = "" if proves else "the simulator proves nothing by it"
        self.soon(lambda: life.rekey(rank, proves=proves))
        self.soon(lambda: self.handle(Rekeyed(rank, message)))

    def tell_engine(self, action: TellEngine) -> None:
        """Passes the lead's news to its engine."""
        self.ledger.told(action.news)
        self.engine.told(action.news)

    def knows(self, life: str, proof: bytes) -> bool:
        """Returns True if that life of a peer has a handshake here, and shows its proof."""
        return any(p.key == life and p.state is not PeerState.DEAD and p.proves(proof) for p in self.peers)

    @property
    def peers(self) -> list[Peer]:
        return list(self.node.state.peers.lives.values())

    def soon(self, do: Callable[[], None]) -> None:
        """Calls `do` at this very moment, but after the current work, unless this life ends first."""
        self.later(0.0, do)

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Calls `do` after a delay, unless this life ends first."""
        life = self._life

        def if_alive() -> None:
            if self.up and self._attached and self._life is life:
                do()

        self._world.agenda.after(delay_s, if_alive)

    def uses(self, group: int, block: int) -> bool:
        """Returns True if the host's engine uses a block."""
        return self.engine.uses(group, block)

    def check(self) -> None:
        """Checks everything that is visible between two events."""
        if not self.ready or self.lies:
            return
        self.ledger.check_waits(self.node.state.now)
        life = self._life
        self.audit.proven.check_heeded(self.ledger.writes)
        self.audit.everything(self.uses, life.memories, life.description.pool, voided=bool(self._flags))

    def check_idle(self) -> None:
        """Checks that nothing is left."""
        self.check()
        self.ledger.check_idle()
        self.engine.check_idle()
        check_left(self.node, self.address)

    def _attach(self) -> None:
        """Starts a new life, with new memory."""
        world = self._world
        description, secret = self._describe(self._rng.getrandbits(64)), self._rng.randbytes(32)
        pool, ranks, honest = description.pool, description.world_size, not self.lies
        kind = MirroredMemory if self.address in world.mirrored else Memory
        memories = [kind(pool, rank, world.store, checked=honest, ranks=ranks) for rank in range(ranks)]
        mover = self._make_mover(memories)
        self._movers.append(mover)
        key = peer_key(self.address, description.incarnation)
        engine = Engine(self, description, secret, memories, world.limits)
        self._life = Life(key, description, engine, mover, memories, world)
        self._attached = True
        sets_aside = self.address not in world.cannot_set_aside
        self.handle(LifeBegan(description.incarnation, secret, description, True, sets_aside, mirrored=kind.mirrored))
        engine.begin()
        self._tell(f"has the life {self.life}")

    def _make_mover(self, memories: list[Memory]) -> Mover:
        return make_mover(self._world, self.address, self._rng, memories, self.handle)

    def _end_life(self) -> None:
        self._world.network.ended(self.life)
        self._attached = False
        self._flags.clear()
        self._life.end()

    def _when_running(self, do: Callable[[], None]) -> None:
        if self._stopped:
            self._waiting.append(do)
        elif self.up:
            do()

    def _go_on(self) -> None:
        """Handles what has come, in the order in which it came. Consequences come last."""
        self.ledger.goes_on(self.clock())
        while self._waiting and self.up:
            self._waiting.popleft()()
        self._stopped = False
        if self.up:
            self._alarm.set(self.node.next_deadline())

    def _take(self, event: Event) -> None:
        if isinstance(event, SettleAccess | PostingEnded):
            self._read_flags()
        self._feed(event, 0.0)

    def _read_flags(self) -> None:
        flags, self._flags = self._flags, []
        if flags:
            self._feed(LeasesVoided(tuple(flags)), 0.0)
            for lease_id in flags:
                self.engine.void_known(lease_id)

    def _feed(self, event: Event, not_before: float) -> None:
        """Feeds an event to the node. A timer never fires before `not_before`, despite the rounding of both clocks."""
        world = self._world
        watcher = world.watcher
        world.steps += 1
        world.handled = event
        if watcher:
            watcher.event(self.address, world.agenda.now, event)
        now = max(self.clock(), not_before)
        self.audit.hears(event, now)
        actions = self.node.handle(event, now)
        life, description = self._life, self.node.state.life.description
        if description is not None and description is not life.description:
            # The memory has another generation.
            life.description = description
        if watcher:
            watcher.actions(self.address, world.agenda.now, actions)
        began = isinstance(event, LifeBegan)
        self.tells = self.node.state.life.attached and not began
        if not self._doomed_in:
            self._fall(actions)
            return
        self._doomed_in -= 1
        self.audit.says(actions)
        for action in actions:
            self._performing.perform(action)
        if began:
            self.ledger.life_began()
            self.audit.life_began()
        self.ledger.check_told()
        self._alarm.set(self.node.next_deadline())

    def _fall(self, actions: list[Action]) -> None:
        """Crashes in the middle of an event's actions."""
        self.audit.says(actions)
        for action in actions[: self._rng.randrange(len(actions) + 1)]:
            self._performing.perform(action)
        # The current work finds the host down, and ends before the host's state is cleared.
        self.up = False
        self._fallen = True
        self._world.agenda.after(0.0, lambda: self.crash() if self._fallen else None)

    def _ring(self, node: Node, deadline: float) -> None:
        if self.up and self.node is node:
            self._when_running(lambda: self._feed(Tick(), deadline))

    def _tell(self, what: str) -> None:
        if self._world.watcher:
            self._world.watcher.note(self.address, self._world.agenda.now, what)

    def _describe(self, incarnation: int) -> EngineDescription:
        return describe(self.address, incarnation, self._world)
