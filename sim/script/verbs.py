"""The commands of scenarios, one function each. A docstring states a command's form and its effect.

This module has the commands for hosts, links and movers, and those that show; `requests` has the others.
"""

from collections.abc import Callable
from dataclasses import replace

from kvgrpc.core.actions import QuarantineReleased
from kvgrpc.core.events import Event, ProcessEnded, ReleaseQuarantine
from kvgrpc.errors import KVGrpcError
from sim.script.hosts import LATE, LOSE, LOSE_REPLY, TWICE
from sim.script.line import CommandLine, NamedThings, seconds
from sim.script.mover import BREAK, CORRUPT, DOUBT, HALF, STOPS
from sim.script.shows import SHOWS
from sim.script.stage import ScriptStage, one_group
from sim.world.memory import layout
from sim.world.network import Result

Verb = Callable[[ScriptStage, CommandLine], None]
ROUTER = "router"


class Verbs(NamedThings[Verb]):
    """Commands by name."""

    def named(self, do: Verb) -> Verb:
        """Registers a command under its function's name."""
        self[do.__name__.strip("_").replace("_", "-")] = do
        return do


WORLD = Verbs()


# -- the world


@WORLD.named
def limits(stage: ScriptStage, line: CommandLine) -> None:
    """`limits NAME=VALUE ...`: limits of the engines that start after it; durations without their `_s`."""
    changes: dict[str, float] = {}
    for name, value in line.options().items():
        if hasattr(stage.limits, f"{name}_s"):
            changes[f"{name}_s"] = seconds(value)
        else:
            changes[name] = type(getattr(stage.limits, name))(value)
    stage.limits = replace(stage.limits, **changes)  # type: ignore[arg-type]


@WORLD.named
def engine(stage: ScriptStage, line: CommandLine) -> None:
    """`engine NAME [blocks=8] [block_tokens=16] [ranks=1] [weights=w1] [protocol=1] [two-groups] [aliased] [writes]
    [compares] [cannot-set-aside] [collective]`: it starts. `aliased`: with two groups that share its blocks. With
    `writes` it writes what it pushes, over a data path that can; `compares`: it compares the checksums of what it
    reads; between two that are `collective` bytes move only if both ranks act.
    """
    name, blocks, tokens = line.word(), line.number("blocks", 8), line.number("block_tokens", 16)
    aliased = line.flag("aliased")
    stage.engine(
        name,
        pool=layout(blocks, aliased=aliased) if line.flag("two-groups") or aliased else one_group(blocks, tokens),
        ranks=line.number("ranks", 1),
        writes=line.flag("writes"),
        compares=line.flag("compares"),
        sets_aside=not line.flag("cannot-set-aside"),
        collective=line.flag("collective"),
        weights=line.text("weights", "w1"),
        protocol=line.number("protocol"),
    )


@WORLD.named
def advance(stage: ScriptStage, line: CommandLine) -> None:
    """`advance DURATION`: time passes; everything that is seen meanwhile has the time before it."""
    stage.advance(seconds(line.word()))


@WORLD.named
def cut(stage: ScriptStage, line: CommandLine) -> None:
    """`cut A B`: no message passes between two leads any more. Bytes still do."""
    stage.network.cut(line.word(), line.word())


@WORLD.named
def heal(stage: ScriptStage, line: CommandLine) -> None:
    """`heal A B`: messages pass again."""
    stage.network.mend(line.word(), line.word())


@WORLD.named
def lose(stage: ScriptStage, line: CommandLine) -> None:
    """`lose A MESSAGE [reply]`: the next message of that kind from A, or its reply, is lost."""
    what = LOSE_REPLY if line.flag("reply") else LOSE
    stage.network.befall(line.word(), line.word(), what, 0.0)


@WORLD.named
def late(stage: ScriptStage, line: CommandLine) -> None:
    """`late A MESSAGE DURATION`: the next message of that kind arrives so late that its reply is not waited for."""
    stage.network.befall(line.word(), line.word(), LATE, seconds(line.word()))


@WORLD.named
def twice(stage: ScriptStage, line: CommandLine) -> None:
    """`twice A MESSAGE`: the next message of that kind from A arrives twice."""
    stage.network.befall(line.word(), line.word(), TWICE, 0.0)


@WORLD.named
def crash(stage: ScriptStage, line: CommandLine) -> None:
    """`crash A [unseen]`: lead, engine and movers of A are gone; `unseen`: with their machine, and no rank sees it."""
    address, stage.network.unseen = line.word(), line.flag("unseen")
    stage.hosts[address].crash()
    stage.network.unseen = False


@WORLD.named
def restart(stage: ScriptStage, line: CommandLine) -> None:
    """`restart A`: at the same address, with other memory."""
    stage.start(line.word())


@WORLD.named
def attach(stage: ScriptStage, line: CommandLine) -> None:
    """`attach A`: the engine of A dies and another one attaches to the same lead."""
    stage.attach(line.word())


@WORLD.named
def stall(stage: ScriptStage, line: CommandLine) -> None:
    """`stall A DURATION`: all processes of A stop, and then go on where they were."""
    host, for_s = stage.hosts[line.word()], seconds(line.word())
    host.stop(for_s, movers_s=for_s)


@WORLD.named
def prove(stage: ScriptStage, line: CommandLine) -> None:
    """`prove A B [undrained]`: A's ranks see that the processes of B's present or last life are gone; `undrained`: what
    they had sent may still come.
    """
    host, life, drained = stage.hosts[line.word()], stage.life(line.word()), not line.flag("undrained")
    for rank in range(len(host.memories)):
        host.handle(ProcessEnded(rank, life, drained, rank))


@WORLD.named
def rekeys(stage: ScriptStage, line: CommandLine) -> None:
    """`rekeys A prove|prove-nothing`: whether, after a re-key of A, nothing comes that peers had sent before."""
    address, what = line.word(), line.word()
    stage.hosts[address].hand.rekey_proves = what == "prove"


@WORLD.named
def release_quarantine(stage: ScriptStage, line: CommandLine) -> None:
    """`release-quarantine A [force]`: an operator wants A's memory back; with `force` at a word, else by a re-key."""
    address, force = line.word(), line.flag("force")

    def told(result: QuarantineReleased) -> str:
        return f"{result.released} blocks released, {result.left} left"

    ask = lambda call: ReleaseQuarantine(call, force, why="they are gone" if force else "")
    route(stage, address, "quarantine", ask, told)


# -- movers


@WORLD.named
def hold(stage: ScriptStage, line: CommandLine) -> None:
    """`hold A [start|half|end] [rank=N]`: postings of A's movers stop there."""
    hand = stage.hosts[line.word()].hand
    rank = line.text("rank")
    hand.hold_at, hand.hold_rank = line.word(HALF), int(rank) if rank else None
    if hand.hold_at not in STOPS:
        raise ValueError(f"postings can be held at {', '.join(STOPS)}")


@WORLD.named
def go(stage: ScriptStage, line: CommandLine) -> None:
    """`go A`: whatever was held goes on."""
    hand = stage.hosts[line.word()].hand
    hand.hold_at, hand.hold_rank = "", None
    hand.resume()


@WORLD.named
def slow(stage: ScriptStage, line: CommandLine) -> None:
    """`slow A DURATION`: a posting of A takes so long from now on."""
    address, bytes_s = line.word(), seconds(line.word())
    stage.hosts[address].hand.bytes_s = bytes_s


@WORLD.named
def break_(stage: ScriptStage, line: CommandLine) -> None:
    """`break A`: the next posting of A fails in its middle."""
    stage.hosts[line.word()].hand.fault = BREAK


@WORLD.named
def corrupt(stage: ScriptStage, line: CommandLine) -> None:
    """`corrupt A`: one block of the next posting of A arrives as something else, without an error."""
    stage.hosts[line.word()].hand.fault = CORRUPT


@WORLD.named
def doubt(stage: ScriptStage, line: CommandLine) -> None:
    """`doubt A`: the next posting of A is reported as failed in its middle, is held there, and writes on after `go`."""
    stage.hosts[line.word()].hand.fault = DOUBT


@WORLD.named
def unreachable(stage: ScriptStage, line: CommandLine) -> None:
    """`unreachable A`: no rank of A finds a data path to a peer; `unreachable A no` ends that."""
    address, how = line.word(), line.word("yes")
    stage.hosts[address].hand.unmappable = how == "yes"


# -- looking


@WORLD.named
def show(stage: ScriptStage, line: CommandLine) -> None:
    """`show transfers|leases|pins|peers|mapped|tables|bytes A [NAME]`: what A's lead knows; `bytes`: what the blocks of
    a request hold, also when they are another's now.
    """
    what = line.word()
    for row in SHOWS[what](stage, line.word(), line) or ["none"]:
        stage.say(row)


def route(stage: ScriptStage, address: str, name: str, ask: Callable[..., Event], told: Callable[..., str]) -> None:
    """Makes a call as a router."""

    def give(result: Result) -> None:
        said = f"refused with {result.reason.value}" if isinstance(result, KVGrpcError) else told(result)
        stage.say(f"router {name}: {said}")

    stage.hosts[address].call(ask, ROUTER, give)
