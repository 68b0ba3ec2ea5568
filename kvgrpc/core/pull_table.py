"""The pulls of an engine, and every way to find them."""

from collections.abc import Iterator

from kvgrpc.core.pull import Pull


class PullTable:
    """Pulls that are not forgotten. A pull waits for an address, or is bound to a life of a peer."""

    def __init__(self) -> None:
        self._by_id: dict[str, Pull] = {}
        self._by_access: dict[bytes, Pull] = {}
        self._by_posting: dict[str, Pull] = {}
        self._by_address: dict[str, dict[str, Pull]] = {}
        """Those that wait for the lead at an address."""
        self._by_peer: dict[str, dict[str, Pull]] = {}
        """Those with an access at that life of a peer, asked for or open."""
        self._unmapped: dict[str, dict[str, Pull]] = {}
        """Those whose access is open, but whose peer must be mapped again, by its address."""
        self._stepping: dict[str, Pull] = {}
        """Those that wait for the engine's step only."""

    def add(self, pull: Pull) -> None:
        """A new pull. Its access id is random, so it is new too."""
        assert pull.access_id not in self._by_access, "an access id comes twice"
        self._by_id[pull.transfer_id] = pull
        self._by_access[pull.access_id] = pull

    def remove(self, pull: Pull) -> None:
        """Forgets a pull."""
        del self._by_id[pull.transfer_id]
        del self._by_access[pull.access_id]
        self._stepping.pop(pull.transfer_id, None)
        self._leave(pull)

    def clear(self) -> None:
        """Forgets everything."""
        self._by_id.clear()
        self._by_access.clear()
        self._by_posting.clear()
        self._by_address.clear()
        self._by_peer.clear()
        self._unmapped.clear()
        self._stepping.clear()

    def find(self, transfer_id: str) -> Pull | None:
        return self._by_id.get(transfer_id)

    def of_access(self, access_id: bytes) -> Pull | None:
        return self._by_access.get(access_id)

    def of_peer(self, peer: str) -> list[Pull]:
        """Those with an access at that life of a peer, oldest first."""
        return list(self._by_peer.get(peer, {}).values())

    def await_address(self, pull: Pull) -> None:
        """The pull waits for the lead at its grant's address."""
        self._leave(pull)
        pull.peer = ""
        self._by_address.setdefault(pull.claims.address, {})[pull.transfer_id] = pull

    def take_address(self, address: str) -> list[Pull]:
        """Those that waited for an address; they wait no longer."""
        return list(self._by_address.pop(address, {}).values())

    def bind(self, pull: Pull, peer: str) -> None:
        """The pull has found its peer."""
        self._leave(pull)
        pull.peer = peer
        self._by_peer.setdefault(peer, {})[pull.transfer_id] = pull

    def await_mapping(self, pull: Pull) -> None:
        """The pull misses nothing but the mapping of its peer."""
        self._unmapped.setdefault(pull.claims.address, {})[pull.transfer_id] = pull

    def take_unmapped(self, address: str) -> list[Pull]:
        """Those that waited for the mapping of the peer at an address; they wait no longer."""
        return list(self._unmapped.pop(address, {}).values())

    def await_step(self, pull: Pull) -> None:
        """The pull misses nothing but its engine's step."""
        self._stepping[pull.transfer_id] = pull

    def take_stepping(self) -> list[Pull]:
        """Those that waited for a step; they wait no longer."""
        found = list(self._stepping.values())
        self._stepping.clear()
        return found

    def posted(self, pull: Pull, posting_id: str) -> None:
        """A posting of the pull is in flight."""
        pull.postings.add(posting_id)
        self._by_posting[posting_id] = pull

    def of_posting(self, posting_id: str) -> Pull | None:
        """The pull of a posting that is not over."""
        return self._by_posting.get(posting_id)

    def oldest_in_flight(self) -> Pull | None:
        """The pull whose posting is in flight for the longest time; one that was lost is not in flight."""
        return next((pull for id_, pull in self._by_posting.items() if id_ not in pull.unproved), None)

    def take_posting(self, posting_id: str) -> Pull | None:
        """The pull of a posting that is over."""
        pull = self._by_posting.pop(posting_id, None)
        if pull is not None:
            pull.postings.discard(posting_id)
            pull.unproved.discard(posting_id)
        return pull

    def __iter__(self) -> Iterator[Pull]:
        """All, oldest first; they may end meanwhile."""
        return iter(list(self._by_id.values()))

    def _leave(self, pull: Pull) -> None:
        address = pull.claims.address
        for index, name in ((self._by_address, address), (self._unmapped, address), (self._by_peer, pull.peer)):
            pulls = index.get(name)
            if pulls is not None:
                pulls.pop(pull.transfer_id, None)
                if not pulls:
                    del index[name]
