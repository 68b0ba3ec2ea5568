"""Commands of scenarios with which engines and their router act on requests; see `verbs`."""

from kvgrpc.core.actions import Released, Renewed
from kvgrpc.core.events import CancelScope, ConnectPeer, LeaseRef, RegisterPush, ReleaseLease, RenewLeases
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.grants import OnAbort
from sim.script.jobs import LATER, LOCAL, NOW, HandOverTerms, ReceiveTerms, ScriptPart
from sim.script.line import CommandLine, pair
from sim.script.receives import listed
from sim.script.stage import ScriptStage
from sim.script.verbs import Verbs, route
from sim.world.memory import Prompt

REQUESTS = Verbs()

# -- work of an engine


@REQUESTS.named
def prompt(stage: ScriptStage, line: CommandLine) -> None:
    """`prompt NAME tokens=N [like=OTHER until=M] [salt=TEXT]`: which tokens; M of them, or all, are those of OTHER."""
    name, tokens = line.word(), line.number("tokens", 64)
    like, until = line.text("like"), line.number("until")
    own = stage.prompt(name, tokens)
    start = stage.prompts[like].tokens[: until or tokens] if like else ()
    stage.prompts[name] = Prompt((*start, *own.tokens[len(start) : tokens]), line.text("salt"))


@REQUESTS.named
def compute(stage: ScriptStage, line: CommandLine) -> None:
    """`compute A NAME [tokens=64] [step=N]`: A computes a prompt and keeps it, when step N is over."""
    address, name = line.word(), line.word()
    shop = stage.engines[address].shop
    blocks = shop.compute(name, stage.prompt(name, line.number("tokens", 64)), line.number("step"))
    if blocks is not None:
        stage.say(f"{address} {name}: computed in {shop.show(blocks)}")


@REQUESTS.named
def free(stage: ScriptStage, line: CommandLine) -> None:
    """`free A NAME`: A forgets what it keeps."""
    stage.engines[line.word()].shop.free(line.word())


@REQUESTS.named
def step(stage: ScriptStage, line: CommandLine) -> None:
    """`step A N [rank=N] [layers=FIRST-END]`: a step of A is over, on one rank or on all; or some layers of it."""
    address, number, rank = line.word(), int(line.word()), line.text("rank")
    stage.engines[address].shop.step(number, int(rank) if rank else None, _layers(line))


# -- hand-overs and pulls


@REQUESTS.named
def promise(stage: ScriptStage, line: CommandLine) -> None:
    """`promise A NAME [tokens=64] [ttl=DURATION]`: the grant leaves A before the hand-over that it is for."""
    address, name = line.word(), line.word()
    own = stage.prompt(name, line.number("tokens", 64))
    stage.grants[name] = stage.engines[address].sending.promise(name, own, stage.key(name), _terms(line))


@REQUESTS.named
def finish(stage: ScriptStage, line: CommandLine) -> None:
    """`finish A NAME [tokens=64] [ttl=DURATION] [firm=DURATION] [consumers=1] [keep] [step=N] [blocks=IDS] [label=TEXT]
    [retry=KEY]`: A hands a prompt over to readers. `keep`: an abort is no end; `retry`: the idempotency key.
    """
    address, name = line.word(), line.word()
    own = stage.prompt(name, line.number("tokens", 64))
    ids, key = line.text("blocks"), stage.key(line.text("key", name))
    token = stage.engines[address].sending.finish(name, own, key, _terms(line), listed(ids) if ids else None)
    if token:
        stage.grants[name] = token


@REQUESTS.named
def pull(stage: ScriptStage, line: CommandLine) -> None:
    """`pull A NAME [later|local] [use=K] [have=N] [step=N] [into=IDS] [prompt=OTHER] [grant=OTHER|B:OTHER|none|forged]
    [key=OTHER] [queue=DURATION] [bytes=DURATION] [label=TEXT] [retry=KEY] [no-content]`: A pulls. `B:OTHER` is the
    WRITE grant of a reservation.
    """
    address, name = line.word(), line.word()
    token = _grant(stage, line, name)
    stage.engines[address].receiving.pull(name, stage.prompt(line.text("prompt", name)), token, _wanted(stage, line))


@REQUESTS.named
def give(stage: ScriptStage, line: CommandLine) -> None:
    """`give A NAME [step=N]`: A gives blocks to a pull that waits for them."""
    stage.engines[line.word()].receiving.give(line.word(), _wanted(stage, line))


@REQUESTS.named
def abort(stage: ScriptStage, line: CommandLine) -> None:
    """`abort A NAME`: A's engine cancels a request that its user has left, by its key."""
    address, name = line.word(), line.word()
    stage.engines[address].cancel(name, stage.key(name), CancelScope.ON_ABORT)


@REQUESTS.named
def cancel(stage: ScriptStage, line: CommandLine) -> None:
    """`cancel A NAME`: the request is cancelled on both sides, by its key at A."""
    address, name = line.word(), line.word()
    stage.engines[address].cancel(name, stage.key(name), CancelScope.BOTH)


@REQUESTS.named
def void(stage: ScriptStage, line: CommandLine) -> None:
    """`void A NAME`: A's engine takes the blocks of a hand-over back at once."""
    stage.engines[line.word()].sending.take_back(line.word())


@REQUESTS.named
def renew(stage: ScriptStage, line: CommandLine) -> None:
    """`renew A NAME [ttl=DURATION]`: the router renews a lease at A."""
    address, name, ttl_s = line.word(), line.word(), line.seconds("ttl")
    ref = LeaseRef(token=stage.grants[name])

    def told(result: Renewed) -> str:
        left_s, reason, _ = result.rows[0]
        return f"not renewed, {reason.value}" if reason else f"renewed, {left_s:.1f}s left"

    route(stage, address, name, lambda call: RenewLeases(call, (ref,), ttl_s), told)


@REQUESTS.named
def release(stage: ScriptStage, line: CommandLine) -> None:
    """`release A NAME`: the router releases a lease at A."""
    address, name = line.word(), line.word()
    shop = stage.engines[address].shop

    def told(result: Released) -> str:
        return f"{result.lease.state.value}, {shop.show(result.freed)} are free"

    route(stage, address, name, lambda call: ReleaseLease(call, LeaseRef(token=stage.grants[name])), told)


@REQUESTS.named
def reclaim(stage: ScriptStage, line: CommandLine) -> None:
    """`reclaim A COUNT`: A's engine takes so many blocks back from leases that nobody has claimed."""
    address, count = line.word(), int(line.word())
    stage.engines[address].sending.reclaim(count)


@REQUESTS.named
def connect(stage: ScriptStage, line: CommandLine) -> None:
    """`connect A B`: the router has A shake hands with B."""
    address, other = line.word(), line.word()
    route(stage, address, other, lambda call: ConnectPeer(call, other), lambda _: "connected")


# -- pushes


@REQUESTS.named
def reserve(stage: ScriptStage, line: CommandLine) -> None:
    """`reserve A NAME [from=B] [tokens=64] [under=OTHER]` and as `pull`: A reserves blocks, which its lead registers at
    B. `under`: another request's transfer key.
    """
    address, name = line.word(), line.word()
    own = stage.prompt(line.text("prompt", name), line.number("tokens", 64))
    key, source = stage.key(line.text("under", name)), line.text("from")
    token = stage.engines[address].receiving.reserve(name, own, key, source, _wanted(stage, line))
    if token:
        stage.targets[address, name] = token


@REQUESTS.named
def register(stage: ScriptStage, line: CommandLine) -> None:
    """`register P NAME grant=A:NAME`: the router registers A's reservation at P."""
    address, name = line.word(), line.word()
    token = _grant(stage, line, name)
    ids = stage.random_id(), stage.random_id()
    route(stage, address, name, lambda call: RegisterPush(call, token, name, *ids), lambda _: "registered")


@REQUESTS.named
def part(stage: ScriptStage, line: CommandLine) -> None:
    """`part A NAME FIRST-END [layers=FIRST-END] [last] [epoch=N] [consumers=N] [keep] [step=N] [tokens=64]`: A hands
    the blocks of these tokens over. A higher epoch starts over, in other blocks.
    """
    address, name = line.word(), line.word()
    own = stage.prompt(name, line.number("tokens", 64))
    first, end = pair(line.word())
    layers, last, epoch = _layers(line), line.flag("last"), line.number("epoch")
    row = ScriptPart(first, end, layers, last, epoch, _terms(line))
    stage.engines[address].sending.part(name, own, stage.key(name), row)


@REQUESTS.named
def give_up(stage: ScriptStage, line: CommandLine) -> None:
    """`give-up A NAME`: A cannot deliver what it was to push."""
    address, name = line.word(), line.word()
    stage.engines[address].sending.give_up(name, stage.key(name))


def _layers(line: CommandLine) -> LayerRange | None:
    low, high = pair(line.text("layers", "0-0"))
    return (low, high - low) if high else None


def _terms(line: CommandLine) -> HandOverTerms:
    return HandOverTerms(
        line.seconds("ttl"), line.number("consumers", 1), OnAbort.KEEP if line.flag("keep") else OnAbort.RELEASE,
        line.number("step"), line.text("label"), line.text("retry"), line.seconds("firm"),
    )  # fmt: skip


def _wanted(stage: ScriptStage, line: CommandLine) -> ReceiveTerms:
    blocks = LATER if line.flag("later") else LOCAL if line.flag("local") else line.text("into", NOW)
    key = line.text("key")
    return ReceiveTerms(
        line.number("use"), line.number("have"), line.number("step"), blocks, stage.key(key) if key else b"",
        line.seconds("queue"), line.seconds("bytes"), line.text("label"), line.text("retry"), line.flag("no-content"),
    )  # fmt: skip


def _grant(stage: ScriptStage, line: CommandLine, name: str) -> bytes:
    asked = line.text("grant", name)
    address, colon, request = asked.rpartition(":")
    if colon and (address, request) in stage.targets:
        return stage.targets[address, request]
    return {"none": b"", "forged": _forged(stage.grants.get(name, b""))}.get(asked, stage.grants.get(asked, b""))


def _forged(token: bytes) -> bytes:
    """Returns a grant that its issuer did not seal."""
    return token[:-1] + bytes([token[-1] ^ 1]) if token else b""
