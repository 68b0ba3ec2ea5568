"""Sends that a rank asks of a peer's rank, on a data path where bytes move only if both act (PostSend)."""

from dataclasses import field

import numpy as np

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.records import dataclass

MEET = 0
"""Sequence number under which two ranks make their process group. Sends count from 1."""

Values = tuple[tuple[str, bytes], ...]
"""Values, by name, that one half of a process group tells the other."""

NOTHING: Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class SendAsk:
    """One send from `source_rank` to `rank`, a rank of the engine that asks."""

    source_rank: int
    rank: int
    epoch: int
    """Epoch of the process group. A group with a higher epoch replaces a broken one."""
    sequence: int
    """Number that grows by one with each send of an epoch. MEET only makes the process group, and sends nothing."""
    offsets: Ids = field(default_factory=lambda: NOTHING)
    """Offset of each run in the memory of the source's rank."""
    nbytes: Ids = field(default_factory=lambda: NOTHING)
    """Length of each run, in bytes."""
    values: Values = ()
    """Values for the other side, with MEET."""

    @property
    def meets(self) -> bool:
        """True if the ask makes the process group."""
        return self.sequence == MEET


@dataclass(frozen=True)
class SendAnswer:
    """The answer to an ask."""

    source_rank: int
    epoch: int
    sequence: int
    values: Values = ()
    """Values for the side that asked, if the source makes the process group."""
    error: str = ""
    """Why nothing is sent; empty if it is sent."""
    known: bool = True
    """True if the source itself said so. If False, the source may still send."""
    regroup: bool = False
    """True if nothing is sent because the source lacks the group, for example since it declared this engine dead."""
    permanent: bool = False
    """True if the source said that the two ranks cannot meet, and that another try does not change that."""
