"""Plays in which the author's engine is the destination: it takes what was prefilled elsewhere, or loses it."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from unittest import SkipTest

from kvgrpc.engine import HandOver
from kvgrpc.errors import KVGrpcError
from kvgrpc.testing.counterpart import BYTES
from kvgrpc.testing.late_events import ends, last
from kvgrpc.testing.scene import Scene

JUNK = 0x5A
"""Byte of blocks that hold nothing yet."""


def blocks_being_filled_stay(scene: Scene) -> None:
    """A request leaves while its blocks are filled, and again when they are full but the engine does not know yet."""
    leave_while_filled(scene, lambda ids, late: scene.take("a", ids, scene.other.give(ids, late=late)))


def leave_while_filled(scene: Scene, take: Callable[[list[int], bool], object]) -> None:
    """Plays a request that leaves while its blocks are filled. `take` takes a prompt in as "a", late or not."""
    for late in (True, False):
        scene.events.keep(last)
        take(scene.prompt(), late)
        blocks = scene.engine.blocks("a")
        if not late:
            scene.until_kept()
        scene.engine.abort("a")
        scene.until_kept()
        for _ in range(3):
            scene.step()
            scene.ensure_held(blocks, f"before {type(scene.events.kept[-1]).__name__}")
        scene.events.deliver()
        scene.until_all_free("after the transfer ended")


def loads_name_their_step(scene: Scene) -> None:
    """A step in flight still writes the blocks of a request that left, and the next request gets them."""
    ids = scene.prompt()
    needed = [group.blocks_of(len(ids)) for group in scene.groups]
    rest = min(len(free) - 2 * count for free, count in zip(scene.free(), needed, strict=True))
    if rest > 0:  # all blocks but those of one request are in use
        filler = scene.prompt(rest + 1) if len(scene.groups) == 1 else scene.prompt(rest)
        scene.take("filler", filler, scene.other.give(filler))
        scene.until_taken("filler")
    scene.engine.give("a", scene.prompt())
    scene.engine.schedule()
    scene.engine.abort("a")
    handover = scene.other.give(ids)
    scene.engine.take("b", ids, handover.kv_transfer_params)
    scene.quiet(lambda: handover in scene.other.over, schedules=True)
    scene.engine.compute()
    tokens = scene.until_taken("b")
    sent = scene.other.bytes[handover]
    scene.ensure_same(scene.read("b"), sent, tokens, "an earlier step wrote into blocks after they were filled")
    scene.engine.abort("b")
    scene.engine.abort("filler")
    scene.until_all_free("after all requests left")


def who_leaves_lets_go(scene: Scene) -> None:
    """Clients hang up as their request arrives, while blocks are filled, with the verdict on its way, and later."""
    for stage in ("as it arrived", "while its blocks were filled", "with its end on the way", "when it could decode"):
        _leave(scene, stage)


def _leave(scene: Scene, stage: str) -> None:
    """Plays one moment at which a request leaves."""
    ids = scene.prompt()
    handover = scene.other.give(ids, late="filled" in stage)
    if "arrived" in stage:
        scene.engine.take(stage, ids, handover.kv_transfer_params)
    elif "way" in stage:
        scene.events.keep(ends)
        scene.take(stage, ids, handover)
        scene.until_kept()
    else:
        scene.take(stage, ids, handover)
    if "decode" in stage:
        scene.until_taken(stage)
    scene.engine.abort(stage)
    scene.events.deliver()
    never = f"a request left {stage}, and the source still holds its blocks"
    scene.until(lambda: handover in scene.other.over, never)
    scene.until_all_free(f"after a request left {stage}")


def what_failed_is_not_used(scene: Scene) -> None:
    """The source takes its blocks back while they are read; then the same prompt comes again."""
    ids = scene.prompt()
    handover = scene.other.give(ids, late=True)
    scene.take("a", ids, handover)
    for group, blocks in enumerate(scene.engine.blocks("a")):
        for block in blocks:
            scene.engine.fill(group, block, JUNK)
    scene.other.take_back(handover, JUNK + 1)
    scene.other.compute()
    scene.ensure(scene.until_taken("a") == 0, "a request went on with KV that its source had taken back")
    scene.engine.abort("a")
    scene.until_all_free("after a transfer failed")
    ensure_unused(scene, ids)


def ensure_unused(scene: Scene, ids: list[int]) -> None:
    """Raises BrokenPromise if a request with the prompt of a transfer that failed finds blocks of that transfer."""
    scene.give("b", ids)
    for found in scene.read("b"):
        computed = [set(block) - {JUNK, JUNK + 1, *BYTES} for block in found]
        scene.ensure(all(computed), "a later request found blocks of the transfer that failed")
    scene.engine.abort("b")
    scene.until_all_free("after all requests left")


def an_id_is_reused(scene: Scene) -> None:
    """A request leaves, another one with its id comes, and then the end of the first one's transfer is heard."""
    for late in (True, False):
        _reuse(scene, late=late)
        scene.until_all_free("after both requests left")


def _reuse(scene: Scene, *, late: bool) -> None:
    """Plays an id that is used twice. A transfer that is late failed, otherwise it succeeded, when its request left."""
    ids, others = scene.prompt(), scene.prompt()
    scene.events.keep(ends)
    scene.take("r", ids, scene.other.give(ids, late=late))
    first = [list(group) for group in scene.engine.blocks("r")]
    if not late:
        scene.until_kept()
    scene.engine.abort("r")
    scene.until(lambda: any(map(last, scene.events.kept)), "the transfer of a request that left never ends")
    handover = scene.other.give(others, late=True)
    try:
        scene.engine.take("r", others, handover.kv_transfer_params)
    except KVGrpcError:  # this engine waits until the id is free
        scene.events.deliver()
        return
    scene.quiet(lambda: scene.engine.blocks("r") not in (first, [[]] * len(first)), schedules=True)
    scene.events.deliver()
    for _ in range(3):
        scene.step()
    scene.ensure(scene.engine.taken("r") is None, "the end of the first transfer was taken for the second's")
    scene.until(lambda: any(scene.engine.blocks("r")), "the second request gets no blocks")
    scene.ensure_held(scene.engine.blocks("r"), "after the first transfer with this id ended")
    scene.other.compute()
    _ensure_taken(scene, "r", handover)
    scene.engine.abort("r")


def a_lost_lead_is_survived(scene: Scene) -> None:
    """The engine's lead is killed while one request is read here, and another one's blocks are filled."""
    own = scene.engine.engine
    if not own.ticket.comes_back_s:
        raise SkipTest("this engine attached to a lead that is not its own, and ends with it")
    ids, others = scene.prompt(), scene.prompt()
    scene.other.pull(scene.give("a", ids), ids)
    scene.take("b", others, scene.other.give(others, late=True))
    scene.step()
    life = own.incarnation
    os.kill(own.lead_pid, signal.SIGKILL)
    scene.ensure(scene.until_taken("b") == 0, "a request went on with KV of a lead that died")
    scene.engine.abort("b")
    scene.until(lambda: own.incarnation != life, "no other lead takes its place")
    scene.other.compute()
    with suppress(KVGrpcError):
        scene.engine.abort("a")
    scene.until_all_free("after its lead died")
    truth = scene.prompt()
    pull = scene.fetch(scene.give("c", truth), truth)
    scene.ensure(pull not in scene.other.failed, "nothing it hands over can be read after its lead died")
    more = scene.prompt()
    handover = scene.other.give(more)
    scene.take("d", more, handover)
    _ensure_taken(scene, "d", handover)
    scene.engine.abort("d")
    scene.until_all_free("after all requests left")


def _ensure_taken(scene: Scene, request_id: str, handover: HandOver) -> None:
    """Raises BrokenPromise unless a request took what was handed over."""
    tokens = scene.until_taken(request_id)
    scene.ensure(tokens > 0, "it takes nothing of what was handed over to it")
    sent = scene.other.bytes[handover]
    scene.ensure_same(scene.read(request_id), sent, tokens, "it has other bytes than were handed over to it")
