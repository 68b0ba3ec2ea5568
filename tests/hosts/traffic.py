"""Pulls and pushes between engines of the system, whose bytes are compared and whose ends are typed."""

from kvgrpc.v1 import common_pb2, transfer_pb2
from tests.e2e.conftest import scattered
from tests.hosts.system import END_S, System
from tests.service.engines import FAILED, SUCCEEDED, Engine, wait_until
from tests.service.pushes import finish, reason_of, register, reserve
from tests.service.values import new_key, prompt

ACTIVE = transfer_pb2.TRANSFER_STATE_ACTIVE
LONG = 100
"""Blocks of a move that takes long enough to be interrupted."""
MAY_FAIL_WITH = {
    "DATA_PATH_FAILED", "INCARNATION_CHANGED", "LEASE_EXPIRED", "LEASE_UNKNOWN", "PEER_LOST", "PEER_UNREACHABLE",
    "QUEUE_TIMEOUT", "REGISTRATION_TIMEOUT", "SETTLE_TIMEOUT", "TRANSFER_TIMEOUT",
}  # fmt: skip


class Move:
    """A pull or a push of new bytes."""

    def __init__(self, kind: str, source: Engine, destination: Engine, count: int = 20, seed: int = 0) -> None:
        """Writes the bytes at the source, and takes blocks at the destination. Nothing moves yet."""
        self.kind, self.source, self.destination = kind, source, destination
        self.transfer_id = ""
        self._tokens = prompt(count * 16 - 5, seed)
        self._blocks, self._target = scattered(source, count), scattered(destination, count)
        self._written = source.write(self._blocks, seed)

    def start(self) -> "Move":
        if self.kind == "pull":
            handed = self.source.hand_over(self._tokens, self._blocks)
            self.transfer_id = self.destination.pull(handed.grant, self._tokens, self._target).transfer_id
        else:
            key = new_key()
            reserved = reserve(self.destination, key, self._tokens, self._target)
            register(self.source, reserved.grant)
            finish(self.source, key, self._tokens, self._blocks)
            self.transfer_id = reserved.transfer.transfer_id
        return self

    def get(self) -> transfer_pb2.Transfer:
        return self.destination.get(self.transfer_id)

    def ended(self, *, must_succeed: bool = False) -> transfer_pb2.Transfer:
        """Waits for the end within its deadline. It has succeeded with the right bytes, or failed with a reason."""
        end = self.destination.wait(self.transfer_id, returned=False, timeout_s=END_S)
        if end.state == SUCCEEDED:
            assert self.destination.read(self._target) == self._written, f"wrong bytes: {end}"
            return end
        assert not must_succeed, end
        assert end.state == FAILED, end
        assert reason_of(end) in MAY_FAIL_WITH, end
        assert end.failure.message
        return end


def between(system: System, sources: tuple[str, ...], destinations: tuple[str, ...], count: int = 20) -> list[Move]:
    """Returns a pull and a push between each two engines. None has started."""
    return [
        Move(kind, system.engines[source], system.engines[destination], count, seed)
        for seed, (source, destination, kind) in enumerate(
            (source, destination, kind)
            for source in sources for destination in destinations for kind in ("pull", "push")
        )
    ]  # fmt: skip


def all_started(moves: list[Move]) -> list[Move]:
    return [move.start() for move in moves]


def on_their_way(moves: list[Move]) -> None:
    """Waits until bytes of each move are under way. Fails if one has ended before."""

    def all_move() -> bool:
        found = [move.get() for move in moves]
        over = [one for one in found if one.state in (SUCCEEDED, FAILED)]
        assert not over, over
        return all(one.state == ACTIVE for one in found)

    wait_until(all_move, what=lambda: [move.get() for move in moves])


def path_of(move: Move) -> list[str]:
    return [common_pb2.DataPath.Name(row.data_path).removeprefix("DATA_PATH_").lower() for row in move.get().paths]
