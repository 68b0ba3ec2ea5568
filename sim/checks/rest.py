"""Checks why a lead believes a peer has stopped writing to its engine: the peer said so, or it was proved.

A life that writes says so when it settles for the last time, closes as `quiesced`, or opens anew for the same target.
No other life can know it. A false statement cannot be detected, so this does not check what movers do.
"""

from collections.abc import Callable, Mapping

from kvgrpc.core.events import CloseAccess, OpenAccess, SettleAccess
from kvgrpc.core.tables.accesses import Access, AccessOpening
from kvgrpc.core.values.ids import peer_key
from sim.rules import Rule, broken

Word = OpenAccess | SettleAccess | CloseAccess


class Rest:
    """The writes at one lead, in one life of its engine."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}
        """Life that has asked to write, by access as ranks name it."""
        self._of_token: dict[bytes, list[str]] = {}
        """The accesses of `_asked`, by grant."""
        self._writers: dict[str, str] = {}
        """Life that may write, by access."""
        self._of_transfer: dict[str, list[str]] = {}
        self._said: set[str] = set()
        """Accesses under which, as their writer said, nothing is written any more."""
        self._over: set[str] = set()
        """Accesses of which the lead rightly believes that nothing is written under them any more."""

    def hears(self, event: Word, accesses: Mapping[bytes, Access]) -> None:
        """Takes note of what a life says. `accesses` are those that the lead knows before the event."""
        life = peer_key(event.engine_id, event.incarnation)
        if isinstance(event, OpenAccess):
            for row in event.openings:
                if row.push_content is not None:
                    self._opens(life, row, known=row.access_id in accesses)
        elif self._writers and isinstance(event, SettleAccess):
            self._says(life, {_name(row.access_id) for row in event.settlings if row.last})
        elif self._writers and isinstance(event, CloseAccess):
            rows = [row for row in event.closings if row.quiesced]
            known = {accesses[row.access_id].opening.token for row in rows if row.access_id in accesses}
            self._says(life, {_name(row.access_id) for row in rows} | self._under(known | {row.token for row in rows}))

    def expects(self, name: str) -> None:
        """Takes note that the lead lets a source write under that access."""
        self._writers[name] = self._asked[name]

    def granted(self, access_id: bytes, transfer_id: str) -> None:
        """Takes note that the source was told that it may write."""
        self._of_transfer.setdefault(transfer_id, []).append(_name(access_id))

    def believed(self, name: str, *, proved: Callable[[str], bool]) -> None:
        """Checks that the lead may stop expecting writes under that access. `proved` tells if the lead knows that a
        life cannot write, whatever that life says.
        """
        life = self._writers[name]
        if name not in self._said and not proved(life):
            broken(Rule.R1, f"{life} may write under {name}, and has not said that it does not any more", name)
        self._over.add(name)

    def returned(self, transfer_id: str) -> None:
        """Checks a transfer whose blocks are its engine's again, with or without the KV."""
        for name in self._of_transfer.pop(transfer_id, ()):
            life = self._writers.pop(name, "")
            if life and name not in self._over:
                message = f"the blocks of {transfer_id} are free, and {life} may write under {name}"
                broken(Rule.R1, message, transfer_id, name)

    def life_began(self) -> None:
        """Starts a new life, whose memory is not written yet."""
        self._asked.clear()
        self._of_token.clear()
        self._writers.clear()
        self._of_transfer.clear()
        self._said.clear()
        self._over.clear()

    def _opens(self, life: str, row: AccessOpening, *, known: bool) -> None:
        """Takes note of an opening: the life has nothing in flight for its earlier accesses of the same target."""
        name = _name(row.access_id)
        self._says(life, self._under({row.token}) - {name})
        if row.reverse_access_id or known or name in self._writers:
            return  # the life wants this side to read, or asks again
        self._asked[name] = life
        self._of_token.setdefault(row.token, []).append(name)
        self._said.discard(name)  # a forgotten id may be used again
        self._over.discard(name)

    def _under(self, tokens: set[bytes]) -> set[str]:
        return {name for token in tokens for name in self._of_token.get(token, ())}

    def _says(self, life: str, names: set[str]) -> None:
        self._said.update(name for name in names if self._writers.get(name, self._asked.get(name)) == life)


def _name(access_id: bytes) -> str:
    return f"w-{access_id.hex()}"
