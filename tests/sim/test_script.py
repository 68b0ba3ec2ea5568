"""The language of scenarios: what it reports, what it refuses, and that it finds a broken rule."""

import pytest

from kvgrpc.core.access import served_accesses
from kvgrpc.core.tables.accesses import Verdict
from sim.script import ScriptError, replay

ONE_PULL = """\
# Prose stays.

engine P
engine D
finish P alice tokens=32
pull D alice
----
whatever was said before

advance 1s
----
"""
SEEN = """\
# Prose stays.

engine P
engine D
finish P alice tokens=32
pull D alice
----
P alice: handed over blocks 0-1
D alice: into blocks 0-1

advance 1s
----
0.0s P alice: blocks 0-1 came back
0.0s D alice: received 32 tokens, and they are right
"""


def test_a_replay_is_the_text_with_what_is_seen_now() -> None:
    assert replay(ONE_PULL) == SEEN
    assert replay(SEEN) == SEEN


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("engine P\nfly P\n----\n", "line 2: .*there is no fly"),
        ("engine P fast\n----\n", "line 1: .*not understood: fast"),
        ("engine P colour=red\n----\n", "line 1: .*not understood: colour"),
        ("engine\n----\n", "line 1: .*a word is missing"),
        ("engine P\nfinish Q alice\n----\n", "line 2: .*there is no Q"),
        ("advance soon\n----\n", "soon is no duration"),
        ("engine P\nhold P nowhere\n----\n", "held at start, half, end"),
        ("engine P\nshow feelings P\n----\n", "there is no feelings"),
        ("engine P\nrenew P alice\n----\n", "there is no alice"),
        ("engine P\n", "the last commands have no line"),
    ],
)
def test_what_is_no_scenario_says_where(text: str, why: str) -> None:
    with pytest.raises(ScriptError, match=why):
        replay(text)


def test_what_goes_wrong_under_a_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_accesses, "_verdict", lambda access: Verdict(True))
    text = "engine P\nengine D\nfinish P alice\nhold D\npull D alice\nadvance 1s\nvoid P alice\ncompute P bob\n"
    with pytest.raises(AssertionError, match="other KV than was asked for") as caught:
        replay(f"{text}go D\nadvance 1s\n----\n")
    assert caught.value.__notes__ == ["line 10: advance 1s"]


def test_what_is_left_over_at_the_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgrpc.core.send.leases.Leases.due", lambda self, lease_id: None)
    with pytest.raises(AssertionError) as caught:
        replay("engine P\nfinish P alice\n----\n")
    assert caught.value.__notes__ == ["at the end, when everything had been mended"]
