"""An attached engine, and an RPC caller without its ticket, whose inputs name what is the engine's by its real ids.

A caller that knows an id or a key may end a lease or a transfer. Nothing changes hands: the engine's allocations stay
its own, and its blocks are held for nobody else.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from kvgrpc.core.values.layout import PoolKind
from kvgrpc.v1 import admin_pb2, scheduler_pb2
from tests.engine.owners.victims import EVERY_ATTACK, Victim, attached
from tests.engine.support import Lead
from tests.fuzz import inside
from tests.fuzz.conftest import Run
from tests.fuzz.inside import State
from tests.fuzz.messages import Known, Maker
from tests.fuzz.target import LIMITS, SCENE_INPUTS
from tests.fuzz.weights import Scales
from tests.service.api import read_refusal
from tests.service.contract import errors_of
from tests.service.engines import wait_until
from tests.service.footprint import Footprint, footprint, resident_bytes

CALL_S = 0.2
"""Timeout for calls that wait, in seconds."""
GIVEN_UP = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
GROWTH_BYTES_MAX = 12 << 20
"""Maximum growth over all inputs, in bytes, beyond the ledger's count. The allocator may keep some of each input."""
BACK_S = 20.0
KINDS = (PoolKind.SERVER_MANAGED, PoolKind.ENGINE_MANAGED)

STEP = "Schedule"
"""The RPC that takes steps, over a stream."""
Request = tuple[str, str, Message]
"""The name of the stub, the name of the RPC, and the request."""


class Recorder:
    """Replaces the API, and keeps the requests of unary calls and of steps."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __getattr__(self, stub: str) -> Any:
        class Stub:
            def __getattr__(_, rpc: str) -> Any:  # noqa: N805 - the recorder is `self`
                return lambda request, **__: self._keep(stub, rpc, request)

        return Stub()

    def step(self, request: Message) -> None:
        """Keeps a step of a scheduler."""
        self._keep("scheduler", STEP, request)

    def _keep(self, stub: str, rpc: str, request: Any) -> Iterator[None]:
        if isinstance(request, Message):
            self.requests.append((stub, rpc, request))
        return iter([None])


class Target:
    """A lead, and the engine that is attached to it now."""

    def __init__(self, source: Lead, lead: Lead, state: State) -> None:
        self.state, self.pid = state, lead.process.pid
        self.scales = Scales(self.pid, state)
        self.victim: Victim
        self.requests: list[Request]
        self.known = Known()
        self._leads = source, lead
        self._scene = ExitStack()
        self._scenes = self._inputs = 0
        self.begin_scene()

    def input(self, random: Random) -> None:
        """Gives one input."""
        self._inputs += 1
        if self._inputs % SCENE_INPUTS == 0:
            self.begin_scene()
        stub, rpc, valid = random.choice(self.requests)
        made = Maker(random, self.known).mutated(valid)
        before = self.state.hands()
        self.scales.begin()
        refused = self._call(stub, rpc, made)
        assert self.state.hands() == before, f"{rpc} of a stranger {'is refused and ' * refused}changes hands: {made}"
        self.scales.end(f"a stranger's {rpc}", made.ByteSize(), lambda: self._call(stub, rpc, made))

    def begin_scene(self) -> None:
        """Replaces the attached engine; the kinds of pools alternate."""
        self.end_scene()
        kind = KINDS[self._scenes % len(KINDS)]
        self._scenes += 1
        self.victim = self._scene.enter_context(contextmanager(attached)(self._leads, kind))
        recorder = Recorder()
        for attack in EVERY_ATTACK:
            attack(replace(self.victim, api=recorder))  # type: ignore[arg-type]
        self.requests, self.known = recorder.requests, Known()
        for _, _, request in self.requests:
            self.known.harvest(request)

    def end_scene(self) -> None:
        """Ends the engine."""
        self._scene.close()
        self._leads[1].wait_no_engine()
        self._leads[1].process.check_log()

    def weight(self) -> int:
        """Returns the lead's memory, in bytes, without what its ledger counts."""
        self.state.collect()
        self.state.trim()
        kept = self._leads[1].api.admin.GetStatus(admin_pb2.GetStatusRequest()).kept
        return resident_bytes(self.pid) - kept.total_bytes

    def footprint(self) -> Footprint:
        """Returns the footprint without an engine, after the memory of the last engine is returned."""
        wait_until(lambda: not any("kvgrpc-pool" in kind for kind in footprint(self.pid).descriptors))
        return footprint(self.pid)

    def close(self) -> None:
        self.end_scene()
        self.scales.close()

    def _call(self, stub: str, rpc: str, request: Message) -> bool:
        """Calls the RPC. Returns True if it is refused, with an error that the contract lists."""
        api = self.victim.api
        try:
            if isinstance(request, scheduler_pb2.ScheduleRequest):
                api.step(request)
            else:
                getattr(getattr(api, stub), rpc)(request, timeout=CALL_S)
        except grpc.RpcError as error:
            if error.code() in GIVEN_UP:
                return False
            refusal = read_refusal(api.last_method, error)
            assert (refusal.code, refusal.reason) in errors_of(api.last_method) - {("INTERNAL", "INTERNAL")}, refusal
            return True
        return False


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("strangers")
    with ExitStack() as stack:
        leads = [
            Lead(folder, name, "--data-paths", "shm", settings=LIMITS, **inside.ENVIRONMENT) for name in ("P", "D")
        ]
        for lead in leads:
            stack.callback(lead.close)
        source, tried = (lead.wait_ready() for lead in leads)
        made = Target(source, tried, stack.enter_context(closing(State(tried.process.pid))))
        stack.callback(made.close)
        yield made


def test_hands_show_what_a_stranger_holds(target: Target) -> None:
    """The engine's own acts on its blocks do not show; another owner and returned blocks do."""
    seen = target.state.hands()
    assert target.state.hands() == seen
    target.begin_scene()
    assert target.state.hands() != seen


def test_nothing_of_an_engine_changes_hands_and_no_memory_thread_or_descriptor_is_left(
    target: Target, run: Run
) -> None:
    for number in range(len(target.requests)):  # the first inputs' lasting state exists before the measurement
        target.input(Random(number))
    target.end_scene()
    before, weight = target.footprint(), target.weight()
    target.begin_scene()
    run(target.input, 0.1)
    target.end_scene()
    wait_until(lambda: target.footprint().same(before), BACK_S, lambda: (before, target.footprint()))

    def grown() -> int:
        return target.weight() - weight

    wait_until(lambda: grown() < GROWTH_BYTES_MAX, BACK_S, lambda: f"{grown():,} bytes")
