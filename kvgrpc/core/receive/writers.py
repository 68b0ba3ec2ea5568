"""Accesses under which sources may write into this engine's blocks, until that is proved to be over."""

from collections.abc import Callable

from kvgrpc.core.actions import Expect
from kvgrpc.core.receive.reservation import Reservation


class Writers:
    """By access; a landing knows its own. The ranks know them too: they outlive a lead that dies."""

    def __init__(self, emit: Callable[[Expect], None]) -> None:
        self._emit = emit
        self._landings: dict[bytes, Reservation] = {}

    def add(self, landing: Reservation, access_id: bytes, life: str) -> None:
        """That life of a source may write."""
        landing.writers[access_id] = life
        self._landings[access_id] = landing
        self._emit(Expect(_name(access_id), open=True, writes=True))

    def forget(self, access_id: bytes) -> Reservation | None:
        """Nothing is written under it any more. The landing, if that was not known."""
        landing = self._landings.pop(access_id, None)
        if landing is not None:
            del landing.writers[access_id]
            self._emit(Expect(_name(access_id), open=False, writes=True))
        return landing

    def find(self, access_id: bytes) -> Reservation | None:
        return self._landings.get(access_id)

    def of_life(self, life: str) -> list[tuple[bytes, Reservation]]:
        """What a life of a source may write."""
        return [(id_, landing) for id_, landing in self._landings.items() if landing.writers[id_] == life]

    def lives(self) -> dict[str, None]:
        """Who may write, in the order in which they came: what is asked for in turn is the same in every process."""
        return dict.fromkeys(landing.writers[id_] for id_, landing in self._landings.items())

    def clear(self) -> None:
        """The incarnation ends; which proves nothing to the ranks."""
        self._landings.clear()


def _name(access_id: bytes) -> str:
    return f"w-{access_id.hex()}"
