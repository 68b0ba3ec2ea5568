"""A server that takes any input, and the checks after each input.

A refusal is typed, is listed in the schema, and changed nothing. After any answer the server lives on with all its
threads, and a pull brings its bytes. After the end of everything every block is free. tests/fuzz/weights.py measures
the memory and time of an input.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvgrpc.peer.v1 import peer_pb2
from kvgrpc.v1 import admin_pb2, common_pb2, handshake_pb2, pool_pb2, scheduler_pb2
from kvgrpc.wire.accesses import CALLS
from tests.fuzz.inside import ANSWER_S, State
from tests.fuzz.messages import TEXTS
from tests.fuzz.scene import Scene
from tests.fuzz.weights import Scales
from tests.service.api import CallFailed, read_refusal
from tests.service.contract import errors_of
from tests.service.engines import SUCCEEDED, Engine, meet, wait_until
from tests.service.footprint import footprint
from tests.service.values import ids_of, prompt

SCENE_INPUTS = 250
"""Number of inputs in one scene."""
WATCH_S = 0.02
"""Time to listen to a stream or to a call that waits for a transfer, in seconds."""
SENT_BYTES_PER_S = 8e6
"""Bandwidth that extends `WATCH_S` while the request is on its way, in bytes per second."""
BEHIND_S = 0.002
"""Time in which effects that a call leaves behind its refusal become visible, in seconds."""
REST_S = 0.05
"""Time in which activity under way becomes visible, except timers, in seconds."""
TRIES = 5
"""Number of retries: a timer may change the state at the moment of a call, but not that often in a row."""
DIALS = 100
"""Maximum number of handshakes per connection in `connect_timeout_s`: so few that any machine begins more."""
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
        # Inputs may tell the engine to reach itself. From here on it is connected to both addresses that it may dial.
        itself = common_pb2.PeerAddress(address=engine.address)
        engine.api.handshake.ConnectPeer(handshake_pb2.ConnectPeerRequest(peer=itself))
        self.first = self.scene = Scene(engine, peer)
        self._end_scene()
        self.before = footprint(engine.process.pid)
        self._begin_scene()

    # -- inputs

    def begin(self) -> None:
        """Begins the next input."""
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
        """Sends one input: a call with one request, or with several on a stream. `make` returns the requests for the
        current scene. `anew` returns requests about a fresh object, if requests may end the one they are about.
        """
        before, bodies = self._state, make()
        self.scales.begin()
        refusal = self._call(method, bodies)
        self._state = after_refusal(self.digest) if refusal else self.digest()
        # On a stream with several messages, those before the refused one were taken.
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
        """Sends one input below the RPC layer. It may change the state in any way."""
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
        """Takes the current state as the state before the next input."""
        self._state = self.digest()

    def _call(self, method: MethodDescriptor, bodies: list[bytes]) -> str:
        """Returns the refusal of a call, or "". Fails for a refusal that the contract does not list."""
        service = method.containing_service
        path = f"/{service.full_name}/{method.name}"
        streams = method.client_streaming, method.server_streaming
        waits = method.server_streaming or method.name in ("WaitTransfer", "WaitTransfers", "PollSchedulerNews")
        timeout = WATCH_S + sum(map(len, bodies)) / SENT_BYTES_PER_S if waits else ANSWER_S
        call = self._stub(path, streams)
        try:
            answer = call(iter(bodies) if streams[0] else bodies[0], timeout=timeout)
            replies = []
            for reply in answer if streams[1] else [answer]:
                self._learn(method, reply)
                replies.append(reply)
                if streams == (False, True):  # watches do not end by themselves
                    answer.cancel()
        except grpc.RpcError as error:
            if waits and error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                return ""
            refusal = read_refusal(path, error)
            if service.full_name.startswith("kvgrpc."):
                assert (refusal.code, refusal.reason) in errors_of(path) - {("INTERNAL", "INTERNAL")}, refusal
            return f"{refusal.code} {refusal.reason}: {refusal.message[:200]}"
        return _refusal_of_all(bodies, replies) if method.name == "Converse" else ""

    def _stub(self, path: str, streams: tuple[bool, bool]) -> Any:
        """Returns a callable that sends and receives bytes."""
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
        """Checks that a reply matches the schema, and records allocated blocks, which the end of the scene frees."""
        assert b"a defect of kvgrpc" not in reply, reply  # the failure of one call of several in a message
        if not method.full_name.startswith("kvgrpc."):
            return  # reflection repeats requests in its replies, which are then one level too deep
        message = GetMessageClass(method.output_type).FromString(reply)
        if isinstance(message, admin_pb2.StartDrainResponse):  # the inputs after it must be admitted
            self.engine.api.admin.CancelDrain(admin_pb2.CancelDrainRequest())
        if isinstance(message, pool_pb2.AllocateBlocksResponse):
            self.engine._allocated.update(ids_of(message.blocks))

    # -- checks

    def check_serves(self) -> None:
        """Checks that a real pull brings its bytes in both directions."""
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
        """Checks that nothing is held, no thread is missing, and the log shows no defect."""
        self._end_scene()
        assert self.engine.pins() == []
        assert footprint(self.engine.process.pid).threads >= self.before.threads
        self.engine.process.check_log()
        self.check_serves()
        self._begin_scene()

    def close(self) -> None:
        """Checks that no input leaves anything, after the false peers are declared dead."""
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
        """Aborts all requests a scheduler may have, and reads its news: unread news is repeated in every answer."""
        ids = {"r", *TEXTS, *self.first.known.texts}
        aborts = [scheduler_pb2.AbortRequestRequest(request_id=text) for text in sorted(ids)]
        calls = [scheduler_pb2.ScheduleCall(abort_request=abort) for abort in aborts]
        step = self.engine.api.step
        told = step(scheduler_pb2.ScheduleRequest(calls=calls))
        while told.news:
            told = step(scheduler_pb2.ScheduleRequest(after_seq=told.news[-1].seq))

    def _begin_scene(self) -> None:
        self.scene = Scene(self.engine, self.peer)
        self._state = self.digest()


def after_refusal(digest: State) -> bytes:
    """Returns the state, including what the refused call left behind."""
    time.sleep(BEHIND_S)
    return digest()


def at_rest(digest: State) -> bytes:
    """Returns the state after activity under way has ended."""
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
    """Checks that a refused call leaves the state as it is, although the state changed meanwhile.

    The call is repeated in the current scene, at once and then from a state at rest, in case it changes something each
    time; and in new scenes, at rest, in case it changes something only the first time. A call that is no longer refused
    in the same way counts as having changed nothing.
    """

    def once(rest: bool) -> bool:
        before = at_rest(digest) if rest else digest()
        return not refused() or after_refusal(digest) == before

    def anew() -> bool:
        begin_anew()
        return once(rest=True)

    return any(once(rest=bool(i)) for i in range(TRIES)) and any(anew() for _ in range(TRIES))


def _refusal_of_all(bodies: list[bytes], replies: list[bytes]) -> str:
    """Returns the first refusal of the calls on a stream if all were refused, else "". Fails for a refusal that the
    contract does not list.
    """
    answers = [answer for reply in replies for answer in peer_pb2.ConverseResponse.FromString(reply).answers]
    calls = [call for body in bodies for call in peer_pb2.ConverseRequest.FromString(body).calls]
    listed = {error for name in CALLS.values() for error in errors_of(name)} - {("INTERNAL", "INTERNAL")}
    found = [read_refusal("", CallFailed(answer.error)) for answer in answers if answer.HasField("error")]
    assert {(refusal.code, refusal.reason) for refusal in found} <= listed, found
    if not calls or len(found) < len(calls):
        return ""
    return f"{found[0].code} {found[0].reason}: {found[0].message[:200]}"


def _kind(refusal: str) -> str:
    """Returns the code and the reason of a refusal."""
    return refusal.partition(":")[0]


def readable(method: MethodDescriptor, bodies: list[bytes]) -> Iterator[Message | bytes]:
    """Yields an input in readable form."""
    for body in bodies:
        try:
            yield GetMessageClass(method.input_type).FromString(body)
        except DecodeError:
            yield body
