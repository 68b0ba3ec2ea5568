"""A push between two servers, brought to a moment at which one of them is to fail."""

from dataclasses import dataclass

import pytest

from kvgrpc.v1 import admin_pb2, common_pb2, transfer_pb2
from tests.service.engines import (
    BLOCK_BYTES,
    CANCELLED,
    FAILED,
    QUARANTINED,
    RETURNED,
    Engine,
    wait_until,
)
from tests.service.pushes import finish, reason_of, register, reserve
from tests.service.values import new_key, prompt

BLOCKS = 16
TOKENS = prompt(BLOCKS * 16)
# 16 blocks of 2 KiB take half a second, whichever side moves them.
SLOW = ("--bandwidth-limit-bytes-per-s", "60000")
LIMITS = """[limits]
peer_grace_s = 0.6
connect_timeout_s = 3.0
queue_timeout_s = 3.0
transfer_timeout_s = 3.0
settle_timeout_s = 1.0
registration_timeout_s = 2.5
"""
REST_S = 8.0
"""Time for a posting to end, in seconds: far above what one takes here."""

REGISTERED = "registered, and no part is there"
BETWEEN = "between two parts"
MIDWAY = "bytes are on their way"
MOMENTS = (REGISTERED, BETWEEN, MIDWAY)


def case(path: str, moment: str, *, quick: bool) -> pytest.ParameterSet:
    """Returns a data path at a moment. Cases that are not quick run with the slow tests."""
    marks: list[pytest.MarkDecorator] = []
    if not quick:
        marks.append(pytest.mark.slow)
    return pytest.param(path, moment, marks=marks, id=f"{path}, {moment}")


@dataclass
class Pushing:
    """One push at the stage that it has reached."""

    source: Engine
    destination: Engine
    key: bytes
    blocks: list[int]
    written: list[bytes]
    """Contents of the source's blocks."""
    target: list[int]
    received: str
    """Id of the RECEIVE transfer."""
    sent: str
    """Id of the SEND transfer."""

    @property
    def send(self) -> transfer_pb2.Transfer:
        return self.source.get(self.sent)

    @property
    def receive(self) -> transfer_pb2.Transfer:
        return self.destination.get(self.received)

    def finish(self, first: int, end: int) -> None:
        """Hands over the blocks from `first` to `end`."""
        finish(self.source, self.key, TOKENS, self.blocks[first:end], last=end == BLOCKS)

    def has_moved(self, blocks: int) -> bool:
        """Checks that this many blocks have arrived and the destination waits for more."""
        found = self.receive
        return found.moved_bytes == blocks * BLOCK_BYTES and found.waiting_for == transfer_pb2.WAITING_FOR_PARTS

    def on_the_wire(self) -> bool:
        """Checks that either side moves bytes now."""
        wire = common_pb2.TRANSFER_PHASE_WIRE
        return any(end.phases and end.phases[-1].phase == wire for end in (self.send, self.receive))

    def of(self, engine: Engine) -> str:
        """Returns the transfer id of one of the two engines."""
        return self.sent if engine is self.source else self.received


def begin(source: Engine, destination: Engine, moment: str) -> Pushing:
    """Returns a push brought to a moment."""
    blocks, target, key = source.allocate(BLOCKS), destination.allocate(BLOCKS), new_key()
    written = source.write(blocks, seed=1)
    where = common_pb2.PeerAddress(address=source.address) if moment == REGISTERED else None
    reserved = reserve(destination, key, TOKENS, target, source=where)
    sent = register(source, reserved.grant).transfer.transfer_id
    made = Pushing(source, destination, key, blocks, written, target, reserved.transfer.transfer_id, sent)
    if moment == BETWEEN:
        made.finish(0, 2)
        wait_until(lambda: made.has_moved(2), what=lambda: (made.send, made.receive))
    elif moment == MIDWAY:
        made.finish(0, BLOCKS)
        wait_until(made.on_the_wire, what=lambda: (made.send, made.receive))
    return made


def check_end(end: transfer_pb2.Transfer) -> str:
    """Checks that a transfer ended without success and its failure is complete. Returns the reason."""
    assert end.state in (FAILED, CANCELLED), end
    failure = end.failure
    assert failure.phase, end
    assert failure.side != common_pb2.SIDE_UNSPECIFIED, end
    assert failure.next in (common_pb2.NEXT_STEP_RECOMPUTE, common_pb2.NEXT_STEP_RETRY_OTHER_CONSUMER), end
    assert failure.message, end
    return reason_of(end)


def check_came_to_rest(engine: Engine, transfer_id: str) -> None:
    """Checks that blocks which are not free yet are in quarantine, with the missing proof, and that all become free."""
    end = engine.wait(transfer_id, returned=False)
    if end.memory == QUARANTINED:
        for pin in engine.pins():
            assert pin.kind == admin_pb2.PIN_KIND_QUARANTINE, pin
            assert pin.missing_proof, pin
    again = engine.wait(transfer_id, timeout_s=REST_S)
    assert (again.state, again.memory) == (end.state, RETURNED), "late news changes no outcome"
    assert engine.pins() == []
    assert engine.counts().quarantined_block_count == 0


def check_unhurt(engine: Engine) -> None:
    """Checks that nothing is left once the engine's blocks are given back."""
    engine.reset()
    engine.check_alive()
