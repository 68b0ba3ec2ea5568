"""Conformance kit for authors of engines. It plays what goes wrong between engines against an author's own integration,
and says which promise is broken.

    from kvgrpc.testing import PROMISES, play

    @pytest.mark.parametrize("promise", PROMISES)
    def test_the_engine_keeps_its_promises(promise: str) -> None:
        with MyAdapter() as engine:                # an EngineAdapter
            play(promise, engine)

A play has two engines: the author's, and a `Counterpart` with a lead of its own. Bytes, leads and deaths are real. The
plays only choose the moments: `LateEvents` holds the author's events back for a while, as a busy lead does.
"""

from kvgrpc.testing.adapter import BlockMemory, EngineAdapter
from kvgrpc.testing.counterpart import Counterpart
from kvgrpc.testing.kit import PROMISES, play
from kvgrpc.testing.late_events import LateEvents
from kvgrpc.testing.promises import BrokenPromise

__all__ = ["PROMISES", "BlockMemory", "BrokenPromise", "Counterpart", "EngineAdapter", "LateEvents", "play"]
