"""One real fault on real leads for each alert.

A fault is a generator. Its first step starts leads and yields (alert, lead at which it fires). Every later step causes
the fault, or repeats it.
"""

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import grpc

from bench.overload.kinds import prepare
from bench.overload.site import Generator
from examples.certs import Authority
from kvgrpc.client import connect_sync
from kvgrpc.errors import KVGrpcError
from kvgrpc.v1 import common_pb2, lease_pb2, pool_pb2
from tests.e2e.pushing import LIMITS, MIDWAY, SLOW, begin
from tests.e2e.slow_pulls import begin_slow_pull, limits
from tests.operators.load import METRICS, ROLES, credentials, spiffe, target_of
from tests.operators.programs import free_ports
from tests.operators.prometheus import Target
from tests.service.conftest import SHARED, starting
from tests.service.defective import MESSAGE, DefectiveProcess
from tests.service.engines import Engine, ServeProcess, meet
from tests.service.fleet.published import fleet
from tests.service.pushes import reserve
from tests.service.values import dur, new_key, prompt

Fault = Iterator[tuple[str, str]]
TOKENS = prompt(32)
LONG_S = 300.0
PATIENT = LIMITS.replace("peer_grace_s = 0.6", "peer_grace_s = 120.0")
FLOOD_S, FLOOD_RATE, FLOOD_CONNECTIONS = 15.0, 5_000.0, 16
"""Length of a flood in seconds, its calls a second, and its connections: their streams are in use for more than the
second after which a call may be refused.
"""
KEEPING_BLOCKS = 4_096
KEEPING = f"""[limits]
lease_ttl_s = {LONG_S}
kept_bytes = 8_000_000
kept_bytes_per_caller = 8_000_000
"""


class Stage:
    """The leads of all faults."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.targets: list[Target] = []
        self._start = stack.enter_context(starting(folder))

    def start(self, name: str, *flags: str, settings: str = "", **environment: str) -> Engine:
        """Starts a lead that Prometheus scrapes."""
        row = ("--engine-id", name, *METRICS, *flags)
        (lead,) = self._start(row, settings=settings, **environment)
        self.targets.append(target_of(name, lead.process))
        return lead

    def start_unwatched(self, name: str, *flags: str) -> Engine:
        """Starts a lead that nobody scrapes."""
        (lead,) = self._start(("--engine-id", name, *flags))
        return lead

    def start_fleet(self, name: str, *engines: str) -> tuple[Path, str]:
        """Starts a `kvgrpc fleet` whose registry is a file with engines at these addresses. Returns the file, and the
        address.
        """
        file = self.folder / f"{name}.json"
        rows = [{"engine_id": f"e{number}", "addresses": [address]} for number, address in enumerate(engines)]
        file.write_text(json.dumps({"engines": rows}))
        found = self.stack.enter_context(fleet(self.folder / name, "--registry", f"file:{file}", *METRICS))
        self.targets.append(Target(name, found["metrics"]))
        return file, found["address"]

    def start_process(self, name: str, process: ServeProcess, ca: Path | None = None) -> None:
        """Takes a lead that was started in another way."""
        self.stack.callback(process.end)
        self.targets.append(target_of(name, process, ca))

    @cached_property
    def p(self) -> Engine:
        """The source of several faults."""
        return self.start("p")

    @cached_property
    def d(self) -> Engine:
        """The destination of several faults."""
        return self.start("d")


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """Yields a stage, and ends its leads."""
    with ExitStack() as stack:
        yield Stage(folder, stack)


def killed(stage: Stage) -> Fault:
    """A lead is killed."""
    lead = stage.start("killed")
    yield "KvgrpcLeadDown", "killed"
    lead.process.kill()


def no_engine(stage: Stage) -> Fault:
    """No engine attaches to a lead without a pool."""
    stage.start("empty", "--no-pool", "--session-socket", str(stage.folder / "socket"))
    yield "KvgrpcNotReady", "empty"


def _pull(source: Engine, destination: Engine, wanted: list[int]) -> None:
    """Makes a pull of some tokens, of which others are wanted, and gives everything back."""
    made, taken = source.allocate(2), destination.allocate(2)
    handed = source.hand_over(TOKENS, made)
    destination.wait(destination.pull(handed.grant, wanted, taken).transfer_id)
    if wanted != TOKENS:
        source.release(handed.lease.lease_id)
    source.free(made)
    destination.free(taken)


def other_content(stage: Stage) -> Fault:
    """A decode engine asks for other tokens than prefill computed."""
    p, d = stage.p, stage.d
    yield "KvgrpcTransfersFail", "d"
    while True:
        _pull(p, d, prompt(32, seed=3))
        yield "", ""


def stopped_peer(stage: Stage) -> Fault:
    """A peer is stopped while it sends over `collective`."""
    patient = limits(peer_grace_s=120.0, transfer_timeout_s=120.0)
    source, destination = (
        stage.start(name, "--data-paths", "collective", *SLOW, settings=patient) for name in ("stopped", "waits")
    )
    yield "KvgrpcNoProgress", "waits"
    begin_slow_pull(source, destination)
    source.process.signal(signal.SIGSTOP)


def silent_source(stage: Stage) -> Fault:
    """The source of a reservation never speaks up."""
    d = stage.d
    yield "KvgrpcTransferStuck", "d"
    reserve(d, new_key(), TOKENS, d.allocate(2))


def unfetched(stage: Stage) -> Fault:
    """Nobody fetches what is handed over."""
    p = stage.p
    yield "KvgrpcLeasesExpire", "p"
    while True:
        blocks = p.allocate(1)
        p.hand_over(TOKENS[:16], blocks, ttl=dur(0.2))
        p.free(blocks)
        yield "", ""


def leaked(stage: Stage) -> Fault:
    """A lease lives on and on."""
    p = stage.p
    yield "KvgrpcLeaseLeak", "p"
    p.hand_over(TOKENS, ttl=dur(LONG_S), firm_ttl=dur(LONG_S))


def too_late(stage: Stage) -> Fault:
    """A reader comes for blocks that were taken back."""
    p, d = stage.p, stage.d
    yield "KvgrpcReclaimsInVain", "p"
    while True:
        blocks, taken = p.allocate(2), d.allocate(2)
        handed = p.hand_over(TOKENS, blocks, firm_ttl=dur(0.0))
        p.free(blocks)
        rows = [pool_pb2.GroupBlockCount(group=0, block_count=2)]
        p.api.pool.ReclaimBlocks(pool_pb2.ReclaimBlocksRequest(group_block_counts=rows))
        d.wait(d.pull(handed.grant, TOKENS, taken).transfer_id)
        d.free(taken)
        yield "", ""


def unproved(stage: Stage) -> Fault:
    """A source that writes over NIXL is stopped, and its push is cancelled."""
    settings = f"source_writes = true\n{PATIENT}"
    source, destination = (
        stage.start(name, "--data-paths", "nixl", *SLOW, settings=settings) for name in ("writes", "written")
    )
    yield "KvgrpcQuarantineGrows", "written"
    made = begin(source, destination, MIDWAY)
    source.process.signal(signal.SIGSTOP)
    destination.cancel(made.received)


def second_choice(stage: Stage) -> Fault:
    """The source lacks the first data path of the destination."""
    p, slow = stage.p, stage.start("slow", "--data-paths", "cma,shm")
    yield "KvgrpcSlowPath", "slow"
    while True:
        _pull(p, slow, TOKENS)
        yield "", ""


def restarts(stage: Stage) -> Fault:
    """A peer is killed and started again and again."""
    lead = stage.start("left", settings="[limits]\npeer_grace_s = 0.6\n")
    yield "KvgrpcPeerFlaps", "left"
    while True:
        peer = stage.start_unwatched("restarts")
        meet(peer, lead)
        yield "", ""
        peer.process.kill()
        yield "", ""


def both_wait(stage: Stage) -> Fault:
    """A request lacks blocks while a reader, which lacks blocks, too, keeps some."""
    lead, reader = stage.start("lacks"), stage.start_unwatched("reader")
    yield "KvgrpcReadersWait", "lacks"
    handed = lead.hand_over(TOKENS, ttl=dur(LONG_S))
    reader.pull(handed.grant, TOKENS, None)
    rows = [pool_pb2.GroupBlockCount(group=0, block_count=lead.counts().block_count)]
    asked = pool_pb2.ReclaimBlocksRequest(group_block_counts=rows, request_time_us=1, request_id="lacks")
    while True:
        lead.api.pool.ReclaimBlocks(asked)
        yield "", ""


def kept(stage: Stage) -> Fault:
    """A caller leaves leases behind until it is refused."""
    lead = stage.start("kept", "--blocks", str(KEEPING_BLOCKS), settings=KEEPING)
    yield "KvgrpcKeptBytesFull", "kept"
    chain = common_pb2.ContentChain(digests=b"d" * (32 * KEEPING_BLOCKS), token_count=16 * KEEPING_BLOCKS)
    request = lease_pb2.GrantLeaseRequest(
        blocks=lead.blocks(lead.allocate(KEEPING_BLOCKS)), content=common_pb2.Content(chain=chain)
    )
    with suppress(grpc.RpcError):
        while True:
            lead.api.leases.GrantLease(request)


def stalls(stage: Stage) -> Fault:
    """A lead lacks processor time: it is stopped half of the time."""
    lead = stage.start("stalls")
    yield "KvgrpcEventLoopLags", "stalls"
    while True:
        lead.process.signal(signal.SIGSTOP)
        yield "", ""
        lead.process.signal(signal.SIGCONT)
        yield "", ""


def flooded(stage: Stage) -> Fault:
    """A caller makes more calls than a lead serves, for some seconds."""
    source, lead = stage.start_unwatched("flood-source"), stage.start("flooded")
    yield "KvgrpcOverloaded", "flooded"
    kinds = asyncio.run(prepare(source.address, lead.address, 1, None))
    flood = Generator(lead.address, kinds, None, connections=FLOOD_CONNECTIONS, rate=FLOOD_RATE, seconds=FLOOD_S)
    stage.stack.callback(flood.close)
    flood.begin()


def _secured(stage: Stage, name: str, ends: timedelta = timedelta(days=30)) -> tuple[Path, str]:
    """Starts a lead with TLS and roles. Returns the folder of its files, beside a stranger's, and its address."""
    folder, authority = stage.folder / f"{name}-files", Authority()
    authority.issue(folder / "lead", spiffe("engine"), ends=ends)
    authority.issue(folder / "stranger", spiffe("stranger"))
    (folder / "roles.toml").write_text(ROLES)
    flags = ("--listen", "127.0.0.1:0", "--advertise", "localhost:0", "--engine-id", name)
    files = ("--tls-dir", str(folder / "lead"), "--roles", str(folder / "roles.toml"))
    process = ServeProcess(stage.folder / name, *SHARED, *flags, *files, *METRICS)
    stage.start_process(name, process, folder / "lead/ca.crt")
    return folder, f"localhost:{process.wait_ready()['address'].rpartition(':')[2]}"


def last_day(stage: Stage) -> Fault:
    """A certificate is not renewed."""
    _secured(stage, "expires", timedelta(days=1))
    yield "KvgrpcCertificateEnds", "expires"


def wrong_key(stage: Stage) -> Fault:
    """A renewal writes the key of another certificate."""
    folder, _ = _secured(stage, "renewed")
    yield "KvgrpcTlsFilesUnusable", "renewed"
    (folder / "lead/tls.key").write_bytes((folder / "stranger/tls.key").read_bytes())


def no_role(stage: Stage) -> Fault:
    """A caller asks for what its roles do not allow."""
    folder, address = _secured(stage, "refuses")
    client = stage.stack.enter_context(connect_sync(address, credentials=credentials(folder / "stranger")))
    yield "KvgrpcCallsDenied", "refuses"
    while True:
        for _ in range(10):
            with suppress(KVGrpcError):
                client.start_drain()
        yield "", ""


def defect(stage: Stage) -> Fault:
    """A lead has a defect."""
    process = DefectiveProcess(stage.folder / "defect", *SHARED, "--engine-id", "defect", *METRICS)
    stage.start_process("defect", process)
    lead = Engine(process)
    stage.stack.callback(lead.api.close)
    yield "KvgrpcDefect", "defect"
    with suppress(grpc.RpcError):
        lead.cancel("t-any", MESSAGE)


def unpublished(stage: Stage) -> Fault:
    """Nothing answers where a lead's registry should be."""
    (port,) = free_ports(1)
    stage.start("unpublished", KVGRPC_FLEET_REGISTRY=f"etcd://127.0.0.1:{port}")
    yield "KvgrpcNotPublished", "unpublished"


def broken_registry(stage: Stage) -> Fault:
    """The registry of a fleet breaks off."""
    file, _ = stage.start_fleet("deaf")
    yield "KvgrpcRegistrySilent", "deaf"
    file.unlink()


def no_lead(stage: Stage) -> Fault:
    """No lead answers where the registry's engines should be."""
    stage.start_fleet("lonely", *(f"127.0.0.1:{port}" for port in free_ports(2)))
    yield "KvgrpcNoHealthyEngine", "lonely"


def no_pair(stage: Stage) -> Fault:
    """Requests come while there are no engines."""
    _, address = stage.start_fleet("bare")
    client = stage.stack.enter_context(connect_sync(address))
    yield "KvgrpcRequestsWithoutEngine", "bare"
    while True:
        client.fleet().pick_pair()
        yield "", ""


FAULTS: tuple[Callable[[Stage], Fault], ...] = (
    killed, no_engine, other_content, stopped_peer, silent_source, unfetched, leaked, too_late, unproved, second_choice,
    restarts, both_wait, kept, stalls, flooded, last_day, wrong_key, no_role, defect, unpublished, broken_registry,
    no_lead, no_pair,
)  # fmt: skip
