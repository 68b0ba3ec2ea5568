"""The life of the engine behind a lead, and whether the lead takes work for it."""

from dataclasses import replace

from kvgrpc.core.events import LifeBegan
from kvgrpc.core.values.compatibility import EngineDescription
from kvgrpc.core.values.grants import signing_key
from kvgrpc.errors import Aborted, PreconditionFailed, Reason, Unavailable

NO_LIFE = LifeBegan(0, b"", None)
"""A lead's time before its first life."""


class EngineLife:
    """The present life. One object stands for all lives of a lead, one after the other."""

    def __init__(self) -> None:
        self.draining = False
        self.stopping = False
        """True when the server was told to end. It then drains for good."""
        self.defect = ""
        """Reason why there is no engine, from a life's defect until the next life begins. Empty otherwise."""
        self.begin(NO_LIFE, 0.0)

    def begin(self, event: LifeBegan, now: float) -> None:
        """Begins the next life."""
        self.incarnation, self.secret = event.incarnation, event.secret
        self.grant_key = signing_key(event.secret)
        self.description = event.description
        self.attached = event.engine_attached
        self.sets_aside, self.expects_pushes, self.mirrored = event.sets_aside, event.expects_pushes, event.mirrored
        self.began = now
        self.defect = "" if event.description else self.defect

    @property
    def engine(self) -> EngineDescription:
        """This engine's description. Raises Unavailable (NO_POOL, INTERNAL_DEFECT) while there is none."""
        if self.description is None and self.defect:
            raise Unavailable(Reason.INTERNAL_DEFECT, self.defect, retry_delay_s=1.0)
        if self.description is None:
            raise Unavailable(
                Reason.NO_POOL, "no engine is attached to this server and it has no pool of its own",
                retry_delay_s=1.0,
            )  # fmt: skip
        return self.description

    def check(self, incarnation: int) -> None:
        """Raises Aborted (INCARNATION_CHANGED) when block ids are of another life. Incarnation 0 is not checked."""
        if incarnation not in (0, self.incarnation):
            raise Aborted(
                Reason.INCARNATION_CHANGED,
                "the block ids are of another life of this engine and name other blocks now: allocate again",
            )

    def check_draining(self) -> None:
        """Raises PreconditionFailed (DRAINING) while no new work is accepted."""
        if self.draining:
            raise PreconditionFailed(Reason.DRAINING, "this server drains and takes no new work: choose another engine")

    def raise_generation(self) -> None:
        """Raises the generation after the memory was registered again."""
        self.description = replace(self.engine, memory_generation=self.engine.memory_generation + 1)
