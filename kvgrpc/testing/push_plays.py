"""Plays of pushes: the author's engine pushes what it prefills, or reserves blocks that another engine fills."""

import os
from collections.abc import Callable

from kvgrpc.engine import LayersReceived, Reservation
from kvgrpc.testing.destination_plays import JUNK, ensure_unused, leave_while_filled
from kvgrpc.testing.late_events import last
from kvgrpc.testing.scene import Scene


def pushed_blocks_stay(scene: Scene) -> None:
    """A destination holds what is pushed while another request comes and goes; then it takes all, or gives up."""
    reservation = _hold_pushed(scene, "a")
    truth = scene.read("a")
    scene.other.compute()
    scene.until_over(reservation, "a destination of its push never ends")
    scene.ensure_fetched(reservation, truth)
    scene.until_all_free("after a destination took a push")
    _hold_pushed(scene, "c").cancel("the destination's client hung up")
    scene.until_all_free("after a destination gave up")


def _hold_pushed(scene: Scene, request_id: str) -> Reservation:
    """Plays a push that a destination holds, up to where another request came and left."""
    reservation = _push(scene, request_id, late=True)
    for _ in range(3):
        scene.step()
        scene.ensure_held(scene.engine.blocks(request_id), "while they are pushed")
    scene.give("b", scene.prompt())
    scene.engine.abort("b")
    scene.step()
    scene.ensure_held(scene.engine.blocks(request_id), "once another request came and left")
    return reservation


def parts_name_their_step(scene: Scene) -> None:
    """A destination waits for each part before the step is over that computes it."""
    _compare(scene, _push(scene), scene.engine.compute)


def layers_are_reported_when_done(scene: Scene) -> None:
    """A destination waits for each layer before it is computed."""
    engine = scene.able("compute_layer")
    computes = iter([engine.compute_layer] * 20)  # before each, there is time for what is too early

    def compute() -> None:
        next(computes, engine.compute)()

    _compare(scene, _push(scene), compute)


def given_up_pushes_end(scene: Scene) -> None:
    """Clients hang up before the first part, when nobody has registered, and while a destination waits."""
    scene.able("push").push("a", scene.prompt(), os.urandom(16))
    scene.engine.abort("a")
    scene.until_all_free("after a request left before it was pushed")
    scene.able("push").push("a", scene.prompt(), os.urandom(16))
    scene.until_blocks("a")
    scene.step()
    scene.engine.abort("a")
    scene.until_all_free("after a request left whose push nobody took")
    reservation = _push(scene, late=True)
    scene.engine.abort("a")
    scene.until_over(reservation, "a request left while it was pushed, and its destination still waits")
    scene.until_all_free("after a request left while it was pushed")


def reserved_blocks_stay(scene: Scene) -> None:
    """A request leaves while a push fills its blocks, and again when they are full but the engine does not know yet."""
    leave_while_filled(scene, lambda ids, late: scene.other.push(ids, _reserve(scene, ids), late=late))


def pushes_are_used_when_received(scene: Scene) -> None:
    """All layers but the last come, and then the source fails; then the same prompt comes again."""
    ids = scene.prompt()
    key = _reserve(scene, ids)
    for group, blocks in enumerate(scene.engine.blocks("a")):
        for block in blocks:
            scene.engine.fill(group, block, JUNK)
    push = scene.other.push(ids, key, whole=False)
    scene.until(lambda: scene.events.told[LayersReceived] > 0, "it never hears of the layers that came")
    for _ in range(3):
        scene.step()
        scene.ensure(scene.engine.taken("a") is None, "a request went on with layers that may still be discarded")
    push.fail("the prefill was aborted")
    scene.ensure(scene.until_taken("a") == 0, "a request went on with KV of a push that failed")
    scene.engine.abort("a")
    scene.until_all_free("after a push failed")
    ensure_unused(scene, ids)


def _push(scene: Scene, request_id: str = "a", *, late: bool = False) -> Reservation:
    """Has the author's engine begin to push a prompt to the counterpart."""
    engine, ids, key = scene.able("push"), scene.prompt(), os.urandom(16)
    reservation = scene.other.reserve(ids, key, engine.engine.address, late=late)
    engine.push(request_id, ids, key)
    scene.until_blocks(request_id, computes=False)
    return reservation


def _reserve(scene: Scene, ids: list[int]) -> bytes:
    """Has the author's engine reserve blocks for a push of the counterpart. Returns its key."""
    key = os.urandom(16)
    scene.able("reserve").reserve("a", ids, key, scene.other.engine.address)
    scene.until_blocks("a")
    return key


def _compare(scene: Scene, reservation: Reservation, compute: Callable[[], None]) -> None:
    """Lets a push go step by step, each of which has time to be read too early, and compares what came."""
    scene.events.keep(last)
    scene.until(lambda: reservation in scene.other.over, "a step of its push is never reported", compute=compute)
    scene.engine.compute()
    truth = scene.read("a")
    scene.events.deliver()
    scene.ensure_fetched(reservation, truth)
    scene.until_all_free("after its push was over")
