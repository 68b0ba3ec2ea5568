"""One lead on the simulated network: a node, its clock, its timer, and the performing of its actions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvgrpc.core.actions import (
    Action,
    AwaitEnd,
    Dial,
    Expect,
    HangUp,
    MakeOffer,
    MapPeer,
    Post,
    Refuse,
    Rekey,
    Reply,
    SendClose,
    SendOpen,
    SendParts,
    SendRegister,
    SendRenew,
    SendSettle,
    TellEngine,
    TransferChanged,
    UnmapPeer,
)
from kvgrpc.core.compatibility import EngineDescription
from kvgrpc.core.endpoints import LoopbackEndpoint, RankEndpoint
from kvgrpc.core.events import (
    Call,
    EndpointOffered,
    Event,
    LeasesVoided,
    LifeBegan,
    PostingEnded,
    Rekeyed,
    ReleaseQuarantine,
    SettleAccess,
    Tick,
)
from kvgrpc.core.ids import peer_key
from kvgrpc.core.layout import PoolKind, PoolLayout
from kvgrpc.core.limits import PROTOCOL_MAX, PROTOCOL_MIN, Limits
from kvgrpc.core.node import Node
from kvgrpc.core.peers import PeerState
from kvgrpc.core.pins import Blocks
from kvgrpc.core.state import ENGINE
from kvgrpc.sim.agenda import Agenda
from kvgrpc.sim.engine import Engine
from kvgrpc.sim.ledger import Ledger
from kvgrpc.sim.memory import Door, KvStore, Memory
from kvgrpc.sim.mover import Mover
from kvgrpc.sim.network import Ask, Give, Network
from kvgrpc.sim.peer_calls import PeerCalls

NEVER = float("inf")


@dataclass(eq=False)
class Surroundings:
    """What all hosts of a world share."""

    agenda: Agenda
    network: Network
    limits: Limits
    pool: PoolLayout
    ranks: int
    writers: frozenset[str] = frozenset()
    """Data paths over which the source of a push writes."""
    store: KvStore = field(default_factory=KvStore)
    doors: dict[str, Door] = field(default_factory=dict)
    """Into the memory of all lives, by the key in their endpoints."""
    lives: dict[str, EngineDescription] = field(default_factory=dict)


@dataclass(eq=False)
class Life:
    """One life of an engine."""

    description: EngineDescription
    engine: Engine
    mover: Mover
    memories: list[Memory]
    doors: dict[int, Door] = field(default_factory=dict)
    """By rank, those that are offered now."""


class Host:
    """One lead with its engine and movers. It crashes whole, or loses only its engine."""

    def __init__(self, address: str, world: Surroundings, rng: Random) -> None:
        self.address = address
        self.up = False
        self.ledger = Ledger(world.limits)
        self.node: Node
        self._world = world
        self._rng = rng
        self._life: Life
        self._movers: list[Mover] = []
        """Those of this process: of its present life, and of lives that ended before a posting did."""
        self._flags: list[str] = []
        """Leases whose void flags are set, and were not read yet."""
        self._skew_s = 0.0
        self._tick_at = NEVER
        self._performers = self._make_performers()
        world.network.add(self)

    @property
    def description(self) -> EngineDescription:
        """Of its present life, with the memory generation of now."""
        return self._world.lives[self.life]

    @property
    def engine(self) -> Engine:
        return self._life.engine

    @property
    def life(self) -> str:
        """Key of the present life of its engine; the last one's while it is down."""
        return peer_key(self.address, self._life.description.incarnation)

    def start(self) -> None:
        """A lead starts, with its engine attached. Its clock has nothing to do with any other."""
        self.node = Node(self._world.limits, self._world.writers)
        self._skew_s = self._rng.uniform(0, 1e6)
        self._tick_at = NEVER
        self.up = True
        self._attach()

    def crash(self) -> None:
        """Lead, engine and movers are gone; the memory that peers still map is rubbish."""
        movers, self._movers = self._movers, []
        for mover in movers:
            mover.stop()
        self._end_life()
        self._world.network.at_rest(self.life, self._world.ranks)
        for mover in movers:
            mover.gone()
        self.ledger.crashed()
        self.up = False

    def reattach(self) -> None:
        """The engine dies and another attaches to the same lead. Postings of the old one run to their end."""
        self._end_life()
        life, mover = self.life, self._life.mover
        self._attach()
        mover.retire(lambda: self._world.network.at_rest(life, self._world.ranks))

    def release_quarantine(self, *, force: bool = False) -> None:
        """An operator wants memory back that is in quarantine, or says that nothing writes it."""
        number = self.ledger.called(lambda _: None)
        self.handle(ReleaseQuarantine(Call(number, "operator"), force, why="nothing moves" if force else ""))

    def call(self, ask: Ask, principal: str, give: Give, **fields: str) -> None:
        """A call of this host's own engine, of a router or of a peer; `fields` are of its Call."""
        number = self.ledger.called(give)
        if principal == ENGINE:
            self._read_flags()
        self.handle(ask(Call(number, principal, **fields)))  # type: ignore[arg-type]

    def handle(self, event: Event) -> None:
        """Gives the node an event, checks its invariants, and performs what it asks for."""
        if isinstance(event, SettleAccess | PostingEnded):
            self._read_flags()
        self._feed(event, 0.0)

    def void(self, lease_id: str) -> None:
        """Its engine sets the void flag of a lease, which the lead reads before it vouches for anything."""
        self._flags.append(lease_id)
        self.later(self._rng.expovariate(50.0), self._read_flags)

    def at_rest(self, blocks: Blocks) -> bool:
        """Whether nothing pins these blocks, or their engine has taken some back of which the lead does not know."""
        pins = self.node.state.pins
        return bool(self._flags) or all(len(pins.unpinned(i, ids)) == len(ids) for i, ids in enumerate(blocks))

    def _read_flags(self) -> None:
        flags, self._flags = self._flags, []
        if flags:
            self._feed(LeasesVoided(tuple(flags)), 0.0)

    def knows(self, life: str) -> bool:
        """Whether that life of a peer has a handshake here."""
        peer = self.node.state.peers.get(life)
        return peer is not None and peer.state is not PeerState.DEAD

    def soon(self, do: Callable[[], None]) -> None:
        """Does it in this very moment, but after what is being done; unless this life ends first."""
        self.later(0.0, do)

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Does it after a delay, unless this life ends first."""
        life = self._life

        def if_alive() -> None:
            if self.up and self._life is life:
                do()

        self._world.agenda.after(delay_s, if_alive)

    def check_idle(self) -> None:
        """Asserts that nothing is left of all that went on here."""
        self.ledger.check_idle()
        self.engine.check_idle()
        state = self.node.state
        assert not len(state.pins), "blocks are still pinned"
        assert not len(state.leases), "leases are still live"
        assert not state.accesses, "accesses are still known"
        assert not state.transfers.live, "transfers are not acknowledged"
        assert not len(state.keys), "idempotency keys are still kept"
        assert not len(state.timers), "something is still due"

    def _attach(self) -> None:
        """A new life, with new memory."""
        world = self._world
        description = self._describe(self._rng.getrandbits(64))
        secret = self._rng.randbytes(32)
        memories = [Memory(world.pool, rank, world.store) for rank in range(world.ranks)]
        mover = Mover(world.agenda, self._rng, world.network.faults, memories, self.handle)
        self._movers.append(mover)
        self._life = Life(description, Engine(self, description, secret, memories, world.limits), mover, memories)
        world.lives[self.life] = description
        for rank in range(world.ranks):
            self._open_door(rank)
        self.handle(LifeBegan(description.incarnation, secret, description, engine_attached=True))
        self.ledger.life_began()

    def _end_life(self) -> None:
        self._world.network.ended(self.life)
        self._flags.clear()
        for memory in self._life.memories:
            memory.burn()

    def _feed(self, event: Event, not_before: float) -> None:
        """`not_before`: a timer never fires before its time, however the two clocks are rounded."""
        now = max(self._world.agenda.now + self._skew_s, self.node.state.now, not_before)
        actions = self.node.handle(event, now)
        self.node.check()
        if self.node.state.description is not None:
            self._world.lives[self.life] = self.node.state.description
        for action in actions:
            self._performers[type(action)](action)
        self._arm()

    def _arm(self) -> None:
        deadline = self.node.next_deadline()
        if deadline is None or deadline >= self._tick_at:
            return
        self._tick_at = deadline
        node = self.node

        def tick() -> None:
            if self.up and self.node is node and self._tick_at == deadline:
                self._tick_at = NEVER
                self._feed(Tick(), deadline)

        self._world.agenda.at(deadline - self._skew_s, tick)

    def _make_performers(self) -> dict[type[Action], Callable[..., None]]:
        peers = PeerCalls(self, self._world.network, self._world.lives)
        return {
            Reply: lambda action: self.ledger.answered(action.call_id, action.answer),
            Refuse: lambda action: self.ledger.answered(action.call_id, action.error),
            Dial: peers.dial,
            HangUp: lambda action: self._world.network.hang_up(self, action.peer),
            SendOpen: peers.open,
            SendSettle: peers.settle,
            SendClose: peers.close,
            SendRenew: peers.renew,
            SendParts: peers.parts,
            SendRegister: peers.register,
            MakeOffer: self._offer,
            MapPeer: self._map,
            # A life has a mover of its own: looked up when the action comes.
            UnmapPeer: lambda action: self._life.mover.unmap(action),  # noqa: PLW0108
            AwaitEnd: lambda _: None,  # the network tells the end of every life
            Rekey: self._rekey,
            Post: self._post,
            Expect: self.ledger.expected,
            TransferChanged: lambda action: self.ledger.changed(action.transfer, self.node.state.now),
            TellEngine: lambda action: self.engine.told(action.news),
        }

    def _offer(self, action: MakeOffer) -> None:
        key = self._life.doors[action.rank].key
        endpoint = RankEndpoint(action.rank, loopback=LoopbackEndpoint(key, self._world.pool.total_bytes))
        self.soon(lambda: self.handle(EndpointOffered(action.rank, action.key, endpoint)))

    def _map(self, action: MapPeer) -> None:
        loopback = action.endpoint.loopback
        assert loopback is not None
        self._life.mover.map(action, self._world.doors.get(loopback.key))

    def _open_door(self, rank: int) -> None:
        """Another way for peers into the memory of a rank."""
        life = self._life
        key = f"{self.life}/{rank}.{len(self._world.doors)}"
        life.doors[rank] = self._world.doors[key] = Door(key, life.memories[rank])

    def _rekey(self, action: Rekey) -> None:
        """A rank's data path begins anew. Some prove by that that peers write no more, some do not."""
        faults = self._world.network.faults
        proves = not faults.hits(self._rng, faults.rekey_proves_nothing)

        def begin_anew() -> None:
            life = self._life
            life.mover.end_all(action.rank)
            if proves:
                life.memories[action.rank].shut(life.doors[action.rank])
            self._open_door(action.rank)
            self.handle(Rekeyed(action.rank, "" if proves else "the simulator proves nothing by it"))

        self.soon(begin_anew)

    def _post(self, action: Post) -> None:
        self._life.mover.post(action)

    def _describe(self, incarnation: int) -> EngineDescription:
        return EngineDescription(
            engine_id=self.address,
            incarnation=incarnation,
            address=self.address,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            weights_revision="w1",
            pool=self._world.pool,
            pool_kind=PoolKind.ENGINE_MANAGED,
            world_size=self._world.ranks,
        )
