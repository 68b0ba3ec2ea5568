"""The session socket under invalid frames: from an engine's scheduler, from its worker, also over the network, and from
strangers.
"""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kvgrpc.engine import content
from kvgrpc.session.v1 import rank_pb2, session_pb2
from kvgrpc.v1 import common_pb2, handoff_pb2, lease_pb2, pool_pb2, transfer_pb2
from kvgrpc.wire.frames import encode
from tests.engine.ranks.streams import stream_to
from tests.engine.session_client import ATTACH, Client
from tests.engine.support import Lead, Side, received, tokens
from tests.fuzz import inside
from tests.fuzz.conftest import Run
from tests.fuzz.heavy import Heavy
from tests.fuzz.inside import ANSWER_S, State
from tests.fuzz.messages import Known, Maker, messages_of_a_rank
from tests.fuzz.target import LIMITS, SCENE_INPUTS, after_refusal, changes_nothing
from tests.fuzz.weights import Scales
from tests.service.engines import wait_until
from tests.service.footprint import Footprint, footprint
from tests.service.values import content as content_message, dur, for_readers, group, named_blocks

PROMPT = tokens(40)
KEYS = [bytes([i]) * 16 for i in range(4)]
PROBE = 1 << 40
"""First call id of probes. The answer to a probe shows that everything before it was taken."""
RANKS_MAX, POOL_BYTES_MAX, HUGE_BYTES = 3, 64 << 20, 1 << 40
"""Bounds of pools that are made. Pools up to the machine's memory and thousands of ranks are allowed, but take long.
Pools from HUGE_BYTES on are refused.
"""
REPORTS = rank_pb2.RankReport.DESCRIPTOR


def valid_calls(offer: bytes, life: int) -> dict[str, Any]:
    """Returns what an engine may ask in this life, with a peer's grant, by the name of the request."""
    blocks, whole, grant = named_blocks(life, group([4, 5, 6])), content_message(PROMPT), common_pb2.Grant(token=offer)
    return {
        "finished_blocks": for_readers(transfer_key=KEYS[0], blocks=blocks, content=whole, ttl=dur(30), after_step=1),
        "pull_blocks": handoff_pb2.PullBlocksRequest(
            grant=grant,
            content=whole,
            destination=handoff_pb2.PullDestination(blocks=named_blocks(life, group([7, 8, 9]))),
        ),
        "reserve_blocks": handoff_pb2.ReserveBlocksRequest(transfer_key=KEYS[2], blocks=blocks, content=whole),
        "register_push": handoff_pb2.RegisterPushRequest(grant=grant),
        "cancel_transfer": transfer_pb2.CancelTransferRequest(transfer_key=KEYS[0]),
        "grant_lease": lease_pb2.GrantLeaseRequest(blocks=blocks, content=whole, transfer_key=KEYS[3]),
        "renew_leases": lease_pb2.RenewLeasesRequest(leases=[lease_pb2.LeaseRef(grant=grant)]),
        "release_lease": lease_pb2.ReleaseLeaseRequest(lease=lease_pb2.LeaseRef(lease_id="l")),
        "allocate_blocks": pool_pb2.AllocateBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=2)]),
        "reclaim_blocks": pool_pb2.ReclaimBlocksRequest(group_block_counts=[pool_pb2.GroupBlockCount(block_count=2)]),
        "free_blocks": pool_pb2.FreeBlocksRequest(blocks=blocks),
        "step_done": rank_pb2.StepReport(step=3, layers=common_pb2.LayerRange(count=1)),
        "voided": session_pb2.VoidedSlots(),
    }


class Target:
    """A lead with the engine that is attached to it now, and a sound engine on another lead."""

    def __init__(self, lead: Lead, peer: Side, digest: State) -> None:
        self._lead, self._peer, self._digest, self._probes = lead, peer, digest, count(PROBE)
        self._offer = peer.hand_over([1, 2, 3], PROMPT, consumers=1000, ttl_s=300.0).grant
        self.calls = self._calls(1)
        self.known = Known()
        for call in self.calls:
            self.known.harvest(call)
        self.scheduler: Client | None = None
        self.worker: Client | None = None
        self.ticket = b""
        self.scales = Scales(lead.process.pid, digest)
        self.sent_bytes = 0
        self._inputs = 0
        self._last = fresh(), False
        self.check_sound()
        self._before = self._at_rest()

    def input(self, kind: str, give: Callable[[], None]) -> None:
        """Gives one input and weighs it."""
        self._inputs += 1
        if self._inputs % SCENE_INPUTS == 0:
            self.check_sound()

        stranger = kind.endswith("stranger")

        def again() -> bool:
            give()
            return stranger

        self.sent_bytes = 0
        self.scales.begin()
        give()
        self._digest()
        self.scales.end(f"session frames: {kind}", self.sent_bytes, again, own=not stranger)

    def attach(self, request: session_pb2.ClientFrame, *, private: bool) -> None:
        """Replaces the attached engine by another and its worker, as far as the lead takes them."""
        self.leave()
        self._last = request, private
        request.attach.memory = session_pb2.POOL_MEMORY_PRIVATE if private else session_pb2.POOL_MEMORY_SHARED
        self.scheduler = Client(self._lead.socket_path)
        answer = self._first(self.scheduler, request)
        if answer is None or not answer.HasField("attached"):
            self.leave()
            return
        self.ticket = answer.attached.rank_ticket
        self.calls = self._calls(answer.attached.header.incarnation)
        self.worker = Client(self._lead.socket_path)
        rank = session_pb2.AttachRankRequest(ticket=self.ticket, private_memory=private)
        self._first(self.worker, session_pb2.ClientFrame(attach_rank=rank))

    def _calls(self, life: int) -> list[session_pb2.Call]:
        calls = valid_calls(self._offer, life)
        return [session_pb2.Call(call_id=1, **{name: row}) for name, row in calls.items()]

    def leave(self) -> None:
        """Ends the engine's session, and waits until the lead has noticed."""
        for client in (self.scheduler, self.worker):
            if client is not None:
                client.socket.close()
        self.scheduler = self.worker = None
        self._lead.wait_no_engine()

    def say(self, frame: bytes) -> list[session_pb2.CallAnswer]:
        """Returns the failed answers to a frame of the scheduler: none if it ended the session and so the engine."""
        scheduler, probe = self._attached(), session_pb2.Call(call_id=next(self._probes))
        self.sent_bytes = max(self.sent_bytes, len(frame))
        answers: list[session_pb2.CallAnswer] = []
        try:
            scheduler.socket.sendall(frame + encode(batch(probe)))
            while True:
                answers += [event.answer for event in scheduler.receive().events.events if event.answer.code]
                if any(answer.call_id == probe.call_id for answer in answers):
                    return [answer for answer in answers if answer.call_id < PROBE]
        except TimeoutError:
            raise
        except (OSError, AssertionError):  # the lead ended the session
            self.leave()
            return []

    def call(self, call: session_pb2.Call) -> None:
        """Makes a call, and checks that it changed nothing if it is refused."""
        self._attached()
        before = self._digest()
        refusals = self.say(encode(batch(call)))
        if refusals and self.scheduler is not None:
            assert "a defect" not in refusals[0].failure.message, refusals
            if after_refusal(self._digest) != before:

                def refused() -> bool:
                    answers = self.say(encode(batch(call)))
                    return bool(answers) and answers[0].failure.reason == refusals[0].failure.reason

                sound = changes_nothing(self._digest, refused, self._begin_anew)
                assert sound, f"refused with {refusals}, and changed the state"

    def report(self, frame: bytes) -> None:
        """Sends a frame as the worker."""
        if self.worker is None:
            self.attach(fresh(), private=True)
        assert self.worker is not None
        self.sent_bytes = max(self.sent_bytes, len(frame))
        with may_end():
            self.worker.socket.sendall(frame)
        if self.scheduler is not None:
            self.say(b"")

    def remote(self, make: Callable[[bytes], list[bytes]]) -> None:
        """Replaces the attached engine by one whose worker is on another host and sends the messages that `make`
        returns for its ticket.
        """
        self.leave()
        request = fresh()
        request.attach.memory = session_pb2.POOL_MEMORY_PRIVATE
        self.scheduler = Client(self._lead.socket_path)
        answer = self._first(self.scheduler, request)
        assert answer is not None
        bodies = make(answer.attached.rank_ticket)
        self.sent_bytes = max(map(len, bodies))
        stream = stream_to(self._lead)
        for body in bodies:
            stream.say(body)
        stream.end()
        found = stream.last()
        assert found is None or "a defect" not in found.message, found
        self.leave()

    def stranger(self, data: bytes) -> None:
        """Opens a connection as a stranger. The lead ends it."""
        client = Client(self._lead.socket_path)
        self.sent_bytes = max(self.sent_bytes, len(data))
        with client.socket:
            client.socket.settimeout(ANSWER_S)
            with may_end():
                client.socket.sendall(data)
                client.socket.shutdown(socket.SHUT_WR)
                client.rest()

    def check_sound(self) -> None:
        """Checks that nothing is left of any engine, and that the next engine's blocks move."""
        self.leave()
        assert not self._lead.leases()
        self._lead.process.check_log()
        side = Side(self._lead)
        try:
            written = side.fill([1, 2, 3], seed=self._inputs)
            pull = self._peer.engine.pull(side.hand_over([1, 2, 3], PROMPT).grant, content(PROMPT))
            pull.start([11, 12, 13])
            events = self._peer.poll_until(lambda _: pull.over)
            received([event for event in events if event.transfer is pull])  # leases of earlier engines may end
            assert (self._peer.read([11, 12, 13]) == written).all()
        finally:
            side.close()
        self._lead.wait_no_engine()

    def close(self) -> None:
        self.check_sound()
        wait_until(lambda: self._at_rest().same(self._before), what=lambda: (self._before, self._at_rest()))

    def _at_rest(self) -> Footprint:
        """Returns the footprint of the lead without an engine, after the memory of the last engine is returned."""
        pid = self._lead.process.pid
        wait_until(lambda: not any("kvgrpc-pool" in kind for kind in footprint(pid).descriptors))
        return footprint(pid)

    def _attached(self) -> Client:
        """Returns the scheduler of the attached engine, or of a new one."""
        if self.scheduler is None:
            self.attach(fresh(), private=False)
        assert self.scheduler is not None
        return self.scheduler

    def _begin_anew(self) -> None:
        """Starts the next life of the last engine."""
        request, private = self._last
        self.attach(request, private=private)
        self._attached()

    def _first(self, client: Client, frame: session_pb2.ClientFrame) -> session_pb2.ServerFrame | None:
        try:
            client.socket.sendall(encode(frame))
            return client.receive()
        except TimeoutError:
            raise
        except (OSError, AssertionError):
            return None


@contextmanager
def may_end() -> Iterator[None]:
    """Allows the lead to end the connection. It must not leave the connection open without an answer."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        pass


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def make_small(attach: session_pb2.AttachRequest) -> None:
    """Limits the memory of an attach, so that it is made at once or refused."""
    attach.world_size %= RANKS_MAX
    if POOL_BYTES_MAX < attach.pool.total_bytes < HUGE_BYTES:
        attach.pool.total_bytes = POOL_BYTES_MAX


def fresh() -> session_pb2.ClientFrame:
    """Returns an attach that the lead takes."""
    copy = session_pb2.ClientFrame()
    copy.CopyFrom(ATTACH)
    return copy


def batch(*calls: session_pb2.Call) -> session_pb2.ClientFrame:
    return session_pb2.ClientFrame(calls=session_pb2.CallBatch(calls=calls))


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("sessions")
    flags = ("--data-paths", "shm")
    with ExitStack() as stack:
        leads = [Lead(folder, name, *flags, settings=LIMITS, **inside.ENVIRONMENT) for name in ("P", "D")]
        for lead in leads:
            stack.callback(lead.close)
        tried, other = (lead.wait_ready() for lead in leads)
        peer = Side(other)
        stack.callback(peer.close)
        made = Target(tried, peer, stack.enter_context(closing(State(tried.process.pid))))
        yield made
        made.close()


def give(random: Random, sessions: Target, kind: str) -> None:
    """Gives one input of this kind."""
    maker = Maker(random, sessions.known)
    match kind:
        case "call":
            call = maker.mutated(random.choice(sessions.calls))
            assert isinstance(call, session_pb2.Call)
            call.call_id = 1
            sessions.call(call)
        case "batch":
            calls: Any = [maker.mutated(random.choice(sessions.calls)) for _ in range(random.choice((1, 3)))]
            body = maker.garbled(batch(*calls).SerializeToString())  # false lengths are given by "stranger"
            sessions.say(framed(body))
        case "report":
            reports: Any = [maker.any_of(REPORTS) for _ in range(random.choice((1, 3)))]
            made = encode(session_pb2.ClientFrame(reports=session_pb2.RankReportBatch(reports=reports)))
            sessions.report(maker.garbled(made) if random.random() < 0.3 else made)
        case "stranger":
            other = maker.any_of(session_pb2.ClientFrame.DESCRIPTOR)
            assert isinstance(other, session_pb2.ClientFrame)
            if other.HasField("attach"):
                make_small(other.attach)
            sessions.stranger(maker.garbled(encode(other)))
        case "remote":
            sessions.remote(partial(messages_of_a_rank, maker, random))
        case "attach":
            attach = maker.mutated(ATTACH)
            assert isinstance(attach, session_pb2.ClientFrame)
            make_small(attach.attach)
            if attach.attach.rank_ticket:  # it comes back, without its worker
                sessions.stranger(encode(attach))
            else:
                sessions.attach(attach, private=random.random() < 0.5)


def test_no_frame_stops_the_lead_or_has_effects_after_its_engine(sessions: Target, run: Run) -> None:
    def frame(random: Random) -> None:
        kind = random.choice(("call", "call", "call", "call", "batch", "report", "stranger", "attach", "remote"))
        choices = random.getstate()

        def again() -> None:
            random.setstate(choices)
            give(random, sessions, kind)

        sessions.input(kind, again)

    run(frame, 0.12)


def heavy(random: Random, sessions: Target, kind: str) -> None:
    """Gives one input of this kind, as heavy as possible."""
    valid = {
        "call": batch(random.choice(sessions.calls)),
        "report": session_pb2.ClientFrame(
            reports=session_pb2.RankReportBatch(reports=[rank_pb2.RankReport(step=rank_pb2.StepReport(step=1))])
        ),
        "stranger": ATTACH,
    }[kind]
    body = Heavy(random, sessions.known).body(session_pb2.ClientFrame.DESCRIPTOR, valid)
    try:
        made = session_pb2.ClientFrame.FromString(body)
        if made.HasField("attach"):
            make_small(made.attach)
            body = made.SerializeToString()
    except DecodeError:
        pass  # a frame that is no message
    match kind:
        case "call":
            sessions.say(framed(body))
        case "report":
            sessions.report(framed(body))
        case "stranger":
            sessions.stranger(framed(body))


def test_no_frame_keeps_memory_or_holds_up_the_loop(sessions: Target, run: Run) -> None:
    def frame(random: Random) -> None:
        kind = random.choice(("call", "report", "stranger", "stranger"))
        choices = random.getstate()

        def again() -> None:
            random.setstate(choices)
            heavy(random, sessions, kind)

        sessions.input(f"heavy {kind}", again)

    run(frame, 0.01)
