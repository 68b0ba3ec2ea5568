"""Plays in which the author's engine is the source: it prefills, hands over, and keeps what it handed over."""

from functools import partial
from unittest import SkipTest

from kvgrpc.engine import BlocksReturned, HandOver, Pull
from kvgrpc.errors import Reason
from kvgrpc.testing.scene import Scene

JUNK = 0x5A
"""Byte of blocks that were given to something else."""


def handed_over_blocks_stay(scene: Scene) -> None:
    """A reader holds blocks while another request comes and goes."""
    ids = scene.prompt()
    pull = scene.other.pull(scene.give("a", ids), ids)
    blocks = scene.engine.blocks("a")
    for _ in range(3):
        scene.step()
        scene.ensure_held(blocks, "while a reader holds them")
    scene.give("b", scene.prompt())
    scene.ensure_held(blocks, "once another request came")
    scene.engine.abort("b")
    scene.step()
    scene.ensure_held(blocks, "once another request left")
    scene.finish(pull)
    scene.until_all_free("after the reader was done")


def handed_over_blocks_are_not_written(scene: Scene) -> None:
    """The engine goes on while a reader has not read yet, and computes a longer prompt that begins alike."""
    ids = scene.prompt()
    pull = scene.other.pull(scene.give("a", ids), ids)
    truth = scene.read("a")
    for _ in range(3):
        scene.step()
    scene.give("b", ids + scene.prompt(1))
    scene.ensure(scene.read("a") == truth, "blocks of a hand-over were written before its reader read them")
    scene.finish(pull)
    scene.ensure_fetched(pull, truth)
    scene.engine.abort("b")
    scene.until_all_free("after both requests left")


def returned_blocks_are_freed(scene: Scene) -> None:
    """One reader takes everything, and another one nothing."""
    ids = scene.prompt()
    scene.fetch(scene.give("a", ids), ids)
    scene.until_all_free("after a reader was done")
    pull = scene.other.pull(scene.give("b", ids), ids)
    pull.cancel("the reader's client hung up")
    scene.until_all_free("after a reader gave up")


def each_hand_over_holds(scene: Scene) -> None:
    """Two hand-overs of one prompt end one after the other: blocks that both have stay until the second end."""
    ids = scene.prompt()
    first, second = scene.give("a", ids), scene.give("b", ids)
    pull, truth = scene.other.pull(second, ids), scene.read("b")
    scene.fetch(first, ids)
    scene.until(lambda: scene.events.told[BlocksReturned] > 0, "it hears of no BlocksReturned")
    scene.step()
    scene.ensure_held(scene.engine.blocks("b"), "after another hand-over of them ended")
    scene.finish(pull)
    scene.ensure_fetched(pull, truth)
    scene.until_all_free("after both hand-overs ended")


def preempted_blocks_are_taken_back(scene: Scene) -> None:
    """The engine needs its blocks while a reader is about to read."""
    ids = scene.prompt()
    pull, truth = scene.other.pull(scene.give("a", ids), ids), scene.read("a")
    scene.until(lambda: bool(pull.transfer_id), "its lead does not answer a reader")
    scene.other.start(pull, late=True)
    scene.quiet(lambda: pull in scene.other.over)
    blocks = scene.engine.blocks("a")
    try:
        scene.engine.preempt("a")
    except NotImplementedError as error:
        raise SkipTest("this engine never preempts") from error
    for group, (free, held) in enumerate(zip(scene.free(), blocks, strict=True)):
        for block in set(free) & set(held):
            scene.engine.fill(group, block, JUNK)
    scene.other.compute()
    scene.until(lambda: pull in scene.other.over, "a reader of preempted blocks never ends")
    if pull not in scene.other.failed:
        scene.ensure(scene.other.bytes[pull] == truth, "a reader received what the blocks were used for next")
    scene.until_all_free("after a preemption")


def hand_overs_name_their_step(scene: Scene) -> None:
    """A reader comes before the step is over that computes what was handed over."""
    ids = scene.prompt()
    pull = scene.other.pull(scene.give("a", ids, computes=False), ids)
    scene.other.start(pull)
    scene.quiet(lambda: pull in scene.other.over)
    scene.engine.compute()
    truth = scene.read("a")
    scene.until(lambda: pull in scene.other.over, "the step of a hand-over is never reported")
    scene.ensure_fetched(pull, truth)
    scene.until_all_free("after a reader was done")


def late_ranks_are_waited_for(scene: Scene) -> None:
    """A reader comes while all ranks but one have ended the step that computes what was handed over."""
    engine, ranks = scene.able("compute_rank"), range(scene.other.world_size)
    for late in ranks:
        ids, request_id = scene.prompt(), f"a{late}"
        pull = scene.other.pull(scene.give(request_id, ids, computes=False), ids)
        scene.other.start(pull)
        for rank in (*ranks[:late], *ranks[late + 1 :]):
            engine.compute_rank(rank)
        scene.quiet(partial(scene.other.over.__contains__, pull))
        engine.compute_rank(late)
        truth = scene.read(request_id)
        scene.until_over(pull, f"rank {late} never reports its step")
        scene.ensure_fetched(pull, truth, f", when rank {late} was late")
        scene.until_all_free("after a reader was done")


def content_is_the_prompt(scene: Scene) -> None:
    """A router swaps two requests, at either engine."""
    ids, others = scene.prompt(), scene.prompt()
    params = scene.give("a", ids)
    pull = scene.fetch(params, others)
    failed = scene.other.failed.get(pull)
    mismatch = failed is not None and failed.reason is Reason.CONTENT_MISMATCH
    scene.ensure(mismatch, "a reader with another prompt was not refused with CONTENT_MISMATCH")
    handover: HandOver | Pull = scene.other.give(ids)
    assert isinstance(handover, HandOver)
    scene.engine.take("b", others, handover.kv_transfer_params)
    scene.ensure(scene.until_taken("b") == 0, "it took the KV of another prompt")
    scene.engine.abort("b")
    pull = scene.fetch(params, ids)
    scene.ensure(pull not in scene.other.failed, "a reader with the same prompt was refused")
    scene.until_all_free("after a mismatch")
