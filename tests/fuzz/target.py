"""A server that takes any input, and what must be true after each of them.

A refusal is typed, and one that the schema lists; it changed nothing. Whatever was answered: the server lives on, all
of its threads with it, a pull brings its bytes, and once everything is ended every block is free. What an input weighs
is in tests/fuzz/weights.py.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, pool_pb2, scheduler_pb2
from tests.fuzz.inside import ANSWER_S, State
from tests.fuzz.messages import TEXTS
from tests.fuzz.scene import Scene
from tests.fuzz.weights import Scales
from tests.service.api import read_refusal
from tests.service.contract import errors_of
from tests.service.engines import SUCCEEDED, Engine, meet, wait_until
from tests.service.footprint import footprint
from tests.service.values import ids_of, prompt

SCENE_INPUTS = 250
"""So many meet one scene."""
WATCH_S = 0.02
"""How long a stream, and a call that waits for a transfer, is listened to."""
SENT_BYTES_PER_S = 8e6
"""And longer, while what it sends is on its way."""
BEHIND_S = 0.002
"""What a call sets going behind its refusal shows within it."""
REST_S = 0.05
"""What is under way by itself shows within it, but for what waits for its time."""
TRIES = 5
"""What waited for its time may change the state in the very moment of a call; not so often in a row."""
DIALS = 100
"""Handshakes that a connection may cause in `connect_timeout_s`: so few that any machine begins more."""
LIMITS = f"""[limits]
dials_per_connection = {DIALS}
lease_ttl_s = 300.0
open_wait_s = 0.02
connect_timeout_s = 0.5
queue_timeout_s = 1.0
transfer_timeout_s = 3.0
settle_timeout_s = 1.0
registration_timeout_s = 5.0
peer_grace_s = 3.0
transfer_history = 64
"""


class Target:
    """One engine under inputs, with a peer that gets none."""

    def __init__(self, engine: Engine, peer: Engine, digest: State) -> None:
        self.engine, self.peer, self.digest = engine, peer, digest
        self.scales = Scales(engine.process.pid, digest)
        self._seed = self._inputs = 0
        self._state = b""
        self._stubs: dict[str, Any] = {}
        self.check_serves()
        # An engine may be told to reach itself. It is connected to both that it may dial, from now on.
        itself = common_pb2.PeerAddress(address=engine.address)
        engine.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=itself))
        self.first = self.scene = Scene(engine, peer)
        self._end_scene()
        self.before = footprint(engine.process.pid)
        self._begin_scene()

    # -- inputs

    def begin(self) -> None:
        """One input comes next."""
        self._inputs += 1
        if self._inputs % SCENE_INPUTS == 0:
            self._end_scene()
            self.engine.process.check_log()
            self.check_serves()
            self._begin_scene()

    def send(
        self,
        method: MethodDescriptor,
        make: Callable[[], list[bytes]],
        anew: Callable[[], list[bytes]] | None = None,
    ) -> None:
        """One input: a call of a method, with one request or, of a stream, with several. `make` gives them as they are
        in the present scene; `anew`, where they are about something that they may end, about another like it.
        """
        before, bodies = self._state, make()
        self.scales.begin()
        refusal = self._call(method, bodies)
        self._state = after_refusal(self.digest) if refusal else self.digest()
        # Of a stream with several messages those before the refused one were taken.
        if refusal and self._state != before and len(bodies) == 1:

            def refused() -> bool:
                return _kind(self._call(method, make())) == _kind(refusal)

            sound = changes_nothing(self.digest, refused, self._begin_anew)
            assert sound, f"a call changed the state and was refused with {refusal}"
            self._state = self.digest()
        else:
            nbytes = sum(map(len, bodies))
            again = anew or make
            weighed = self.scales.end(method.full_name, nbytes, lambda: bool(self._call(method, again())))
            self._state = self.digest() if weighed else self._state

    def send_bytes(self, nbytes: int, send: Callable[[], None]) -> None:
        """One input below all calls; what it does to the state is nobody's to say."""
        self.begin()
        self.scales.begin()
        send()
        self._state = self.digest()

        def again() -> bool:
            send()
            return True

        if self.scales.end("bytes on the port", nbytes, again):
            self._state = self.digest()

    def look(self) -> None:
        """Takes the state as it is now for that before the next input."""
        self._state = self.digest()

    def _call(self, method: MethodDescriptor, bodies: list[bytes]) -> str:
        """The refusal, if it is one. Fails for one that is not in the contract."""
        service = method.containing_service
        path = f"/{service.full_name}/{method.name}"
        streams = method.client_streaming, method.server_streaming
        waits = method.server_streaming or method.name in ("WaitTransfer", "WaitTransfers", "PollSchedulerNews")
        timeout = WATCH_S + sum(map(len, bodies)) / SENT_BYTES_PER_S if waits else ANSWER_S
        call = self._stub(path, streams)
        try:
            answer = call(iter(bodies) if streams[0] else bodies[0], timeout=timeout)
            for reply in answer if streams[1] else [answer]:
                self._learn(method, reply)
                if streams == (False, True):  # watches do not end by themselves
                    answer.cancel()
        except grpc.RpcError as error:
            if waits and error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                return ""
            refusal = read_refusal(path, error)
            if service.full_name.startswith("kvgrpc."):
                assert (refusal.code, refusal.reason) in errors_of(path) - {("INTERNAL", "INTERNAL")}, refusal
            return f"{refusal.code} {refusal.reason}: {refusal.message[:200]}"
        return ""

    def _stub(self, path: str, streams: tuple[bool, bool]) -> Any:
        """What calls a method with bytes and answers with bytes."""
        if path not in self._stubs:
            channel = self.engine.api.plain
            make = {
                (False, False): channel.unary_unary,
                (False, True): channel.unary_stream,
                (True, True): channel.stream_stream,
            }[streams]
            self._stubs[path] = make(path, request_serializer=bytes, response_deserializer=bytes)
        return self._stubs[path]

    def _learn(self, method: MethodDescriptor, reply: bytes) -> None:
        """Every reply is what the schema says; blocks that it allocates are given back at the end of the scene."""
        assert b"a defect of kvgrpc" not in reply, reply  # of one call of several in a message
        if not method.full_name.startswith("kvgrpc."):
            return  # reflection says requests again in its replies, which are one level too deep then
        message = GetMessageClass(method.output_type).FromString(reply)
        if isinstance(message, admin_pb2.DrainResponse):  # the inputs after it are to be taken
            self.engine.api.admin.Drain(admin_pb2.DrainRequest(cancel=True))
        if isinstance(message, pool_pb2.AllocateBlocksResponse):
            self.engine._allocated.update(ids_of(message.blocks))

    # -- what must be true

    def check_serves(self) -> None:
        """A real pull brings its bytes, either way."""
        self._seed += 1
        tokens = prompt(32, seed=self._seed)
        meet(self.engine, self.peer)
        for source, destination in ((self.engine, self.peer), (self.peer, self.engine)):
            blocks, target = source.allocate(2), destination.allocate(2)
            written = source.write(blocks, self._seed)
            pulled = destination.pull(source.hand_over(tokens, blocks).grant, tokens, target)
            end = destination.wait(pulled.transfer_id)
            assert end.state == SUCCEEDED, end
            assert destination.read(target) == written
            source.free(blocks)
            destination.free(target)

    def check_sound(self) -> None:
        """Nothing is held, no thread is missing, and the log tells of no defect."""
        self._end_scene()
        assert self.engine.pins() == []
        assert footprint(self.engine.process.pid).threads >= self.before.threads
        self.engine.process.check_log()
        self.check_serves()
        self._begin_scene()

    def close(self) -> None:
        """Once peers that were none are declared dead, nothing is left of any input."""
        self.check_sound()
        self._end_scene()
        counts = self.engine.api.admin
        wait_until(lambda: counts.GetStatus(admin_pb2.GetStatusRequest()).counts.open_access_count == 0)
        pid, before = self.engine.process.pid, self.before
        wait_until(lambda: footprint(pid).same(before), what=lambda: (before, footprint(pid)))

    def _begin_anew(self) -> None:
        self._end_scene()
        self._begin_scene()

    def _end_scene(self) -> None:
        self._end_requests()
        self.engine.reset()
        self.peer.reset()
        self.engine.check_alive()

    def _end_requests(self) -> None:
        """A scheduler aborts all that it may have, and reads its news: unread ones are told again in every answer."""
        ids = {"r", *TEXTS, *self.first.known.texts}
        aborts = [scheduler_pb2.AbortRequestRequest(request_id=text) for text in sorted(ids)]
        calls = [scheduler_pb2.ScheduleCall(abort_request=abort) for abort in aborts]
        step = self.engine.api.scheduler.ScheduleStep
        told = step(scheduler_pb2.ScheduleStepRequest(calls=calls))
        while told.news:
            told = step(scheduler_pb2.ScheduleStepRequest(after_seq=told.news[-1].seq))

    def _begin_scene(self) -> None:
        self.scene = Scene(self.engine, self.peer)
        self._state = self.digest()


def after_refusal(digest: State) -> bytes:
    """The state, with what the refused call set going."""
    time.sleep(BEHIND_S)
    return digest()


def at_rest(digest: State) -> bytes:
    """The state, once what is under way by itself has come."""
    seen, since = digest(), time.monotonic()

    def rests() -> bool:
        nonlocal seen, since
        now = digest()
        if now != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > REST_S

    wait_until(rests, what=lambda: seen)
    return seen


def changes_nothing(digest: State, refused: Callable[[], bool], begin_anew: Callable[[], None]) -> bool:
    """Whether a call leaves the state as it is, although it changed while the call was refused.

    The call is made again: in the present scene, at once and then from a state at rest, for what it changes each time;
    and in new scenes, at rest, for what it changes the first time only. Nothing was changed by a call that is not
    refused like that any more.
    """

    def once(rest: bool) -> bool:
        before = at_rest(digest) if rest else digest()
        return not refused() or after_refusal(digest) == before

    def anew() -> bool:
        begin_anew()
        return once(rest=True)

    return any(once(rest=bool(i)) for i in range(TRIES)) and any(anew() for _ in range(TRIES))


def _kind(refusal: str) -> str:
    """Its code and reason."""
    return refusal.partition(":")[0]


def readable(method: MethodDescriptor, bodies: list[bytes]) -> Iterator[Message | bytes]:
    """An input as a person reads it."""
    for body in bodies:
        try:
            yield GetMessageClass(method.input_type).FromString(body)
        except DecodeError:
            yield body
