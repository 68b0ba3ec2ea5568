"""What a rank asks a rank of a peer to send, where bytes move only if both act (PostSend)."""

from dataclasses import dataclass, field

import numpy as np

from kvgrpc.core.values.descriptors import Ids

MEET = 0
"""The sequence number under which two ranks make their process group; sends count from 1."""

Values = tuple[tuple[str, bytes], ...]
"""What one half of a process group tells the other, by name."""

NOTHING: Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class SendAsk:
    """One send of `source_rank` to `rank`, a rank of the engine that asks."""

    source_rank: int
    rank: int
    epoch: int
    """Of their process group: a higher one takes the place of one that broke."""
    sequence: int
    """Grows by one with each send of an epoch; MEET: the process group itself is to be made, and nothing sent."""
    offsets: Ids = field(default_factory=lambda: NOTHING)
    """Where each run begins in the memory of the source's rank."""
    nbytes: Ids = field(default_factory=lambda: NOTHING)
    """Its length."""
    values: Values = ()
    """With MEET: what the other side has to know."""

    @property
    def meets(self) -> bool:
        """Whether it makes the process group."""
        return self.sequence == MEET


@dataclass(frozen=True)
class SendAnswer:
    """What came of an ask."""

    source_rank: int
    epoch: int
    sequence: int
    values: Values = ()
    """Of a source that makes the process group: what this side has to know."""
    error: str = ""
    """Why nothing is sent; empty: it is."""
    known: bool = True
    """It is the source's own word. Else it may be about to send all the same."""
    regroup: bool = False
    """Nothing is sent for want of the process group, as after the source took this engine for dead: make another one.
    """
