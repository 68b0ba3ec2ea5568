"""The plays by the names of their promises, and how one is played."""

from unittest import SkipTest

from kvgrpc.testing import destination_plays, push_plays, source_plays
from kvgrpc.testing.adapter import EngineAdapter
from kvgrpc.testing.counterpart import Counterpart
from kvgrpc.testing.late_events import LateEvents
from kvgrpc.testing.promises import TEXTS, BrokenPromise
from kvgrpc.testing.scene import Scene

PROMISES = tuple(TEXTS)
"""Names of all promises. Each has a play of its name."""


def play(promise: str, engine: EngineAdapter, other: Counterpart | None = None) -> None:
    """Plays what tempts an engine to break a promise. The engine is at rest, and is so again if it keeps it.
    `other`: a counterpart for several plays of engines with one pool, since a lead takes a second to start.

    Raises BrokenPromise, which names the promise; and SkipTest, which test runners know, for an engine that does not do
    what the play is about. An engine that raises breaks the promise, too.
    """
    if other is None:
        with Counterpart(engine.engine) as made:
            play(promise, engine, made)
        return
    with LateEvents(engine.engine) as events:
        other.rest()
        try:
            found = next(plays for plays in (source_plays, destination_plays, push_plays) if hasattr(plays, promise))
            getattr(found, promise)(Scene(promise, engine, other, events))
        except (BrokenPromise, SkipTest):
            raise
        except Exception as error:  # an engine's errors are its own
            raise BrokenPromise(promise, f"the engine raised {type(error).__name__}: {error}") from error
