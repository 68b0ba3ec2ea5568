"""Accesses under which sources may write into this engine's blocks, until that is proved to be over."""

from kvgrpc.core.landing import Landing


class Writers:
    """By access; a landing knows its own."""

    def __init__(self) -> None:
        self._landings: dict[bytes, Landing] = {}

    def add(self, landing: Landing, access_id: bytes, life: str) -> None:
        """That life of a source may write."""
        landing.writers[access_id] = life
        self._landings[access_id] = landing

    def forget(self, access_id: bytes) -> Landing | None:
        """Nothing is written under it any more. The landing, if that was not known."""
        landing = self._landings.pop(access_id, None)
        if landing is not None:
            del landing.writers[access_id]
        return landing

    def find(self, access_id: bytes) -> Landing | None:
        return self._landings.get(access_id)

    def of_life(self, life: str) -> list[tuple[bytes, Landing]]:
        """What a life of a source may write."""
        return [(id_, landing) for id_, landing in self._landings.items() if landing.writers[id_] == life]

    def lives(self) -> set[str]:
        """Who may write."""
        return {landing.writers[id_] for id_, landing in self._landings.items()}

    def clear(self) -> None:
        self._landings.clear()
