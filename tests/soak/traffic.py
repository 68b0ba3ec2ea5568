"""Two engines pull from and push to each other without end, and change their minds all the time.

An engine paints every block that it hands over with the number of its transfer; every word of what arrives must be that
number. Blocks are reused, as sources and as targets, as soon as they are reported free: a late byte shows as wrong
content of another transfer.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgrpc.core.values.grants import OnAbort
from kvgrpc.engine import BlocksReturned, Failed, HandOver, Pull, Push, Received, Reservation, Reserved, content
from kvgrpc.engine.transfers.handles import Content, Handle
from kvgrpc.v1 import admin_pb2, transfer_pb2
from tests.engine.made import BLOCK_TOKENS, LAYER_BYTES, LAYERS, layout
from tests.engine.support import Lead, Side, readable
from tests.service.engines import wait_until

BLOCKS = 2048
"""Number of blocks of each pool: more than all transfers at once need."""
BLOCKS_MAX = 16
"""Maximum number of blocks of one transfer."""
AT_ONCE = 64
QUIET_S = 60.0
"""Time without events after which the traffic counts as stuck, in seconds."""
# Small limits, so that tables which keep entries for a time or up to a number are full after some thousand transfers.
SETTINGS = """[limits]
lease_ttl_s = 5.0
queue_timeout_s = 5.0
transfer_timeout_s = 5.0
settle_timeout_s = 2.0
registration_timeout_s = 1.0
open_wait_s = 5.0
idempotency_s = 2.0
ended_leases = 2048
transfer_history = 512
tombstones = 1024
"""
_OTHER = content(opaque_id=b"another prompt", tokens=BLOCK_TOKENS)

PULLS = Counter({
    "to its end": 50, "cancelled there": 8, "cancelled here": 8, "cancelled by key": 3, "cancelled before blocks": 5,
    "all found": 3, "taken back": 6, "of other content": 3, "never asked for": 3, "expired": 1,
})  # fmt: skip
"""Fates of a pull, with their weights. "here" is its source, "there" its destination."""
PUSHES = Counter({
    "to its end": 50, "in parts": 15, "layer by layer": 10, "cancelled there": 8, "cancelled here": 8,
    "cancelled by key": 3, "given up": 5, "started over": 6, "never registered": 1, "never handed over": 1,
})  # fmt: skip
ARRIVE = ("pull to its end", "pull all found", "push to its end", "push in parts", "push layer by layer")
"""Moves that nobody stops: they arrive, except when the machine was too slow."""


class Pool:
    """An engine's own block manager."""

    def __init__(self, lead: Lead) -> None:
        self.side = Side(lead, pool=layout(BLOCKS))
        self.free = list(range(BLOCKS))
        self._words: NDArray[np.uint64] = self.side.view().view(np.uint64).reshape(LAYERS, BLOCKS, LAYER_BYTES // 8)

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        return taken

    def paint(self, blocks: list[int], number: int) -> None:
        self._words[:, blocks] = number

    def holds(self, blocks: list[int], number: int) -> bool:
        return bool((self._words[:, blocks] == number).all())


@dataclass(eq=False)
class Move:
    """One transfer, as its two engines know it. A handle is None before it exists, and once its blocks are back."""

    number: int
    source: Pool
    destination: Pool
    mine: list[int]
    target: list[int]
    key: bytes
    content: Content
    kind: str
    """"pull" or "push"."""
    fate: str
    on_abort: OnAbort
    give: HandOver | Push | None = None
    take: Pull | Reservation | None = None
    retried: bool = False
    failed: bool = False

    @property
    def what(self) -> str:
        return f"{self.kind} {self.fate}"


class Traffic:
    """Transfers between two leads."""

    def __init__(self, leads: tuple[Lead, Lead], seed: int) -> None:
        self._random = Random(seed)
        self._pools = Pool(leads[0]), Pool(leads[1])
        self._moves: dict[Handle, Move] = {}
        """Moves by either handle."""
        self._open: set[Move] = set()
        self.ends: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        """Number of received moves, by `Move.what`."""
        self.begun = 0

    def run(self, count: int) -> None:
        """Runs `count` transfers to the end of the last one. Fails on wrong content, or if nothing happens any more."""
        last, heard = self.begun + count, time.monotonic()
        while self.begun < last or self._open:
            while self.begun < last and len(self._open) < AT_ONCE:
                self._begin()
            for pool in self._pools:
                pool.side.engine.flush()
            readable(0.01, *(pool.side.engine for pool in self._pools))
            events = [event for pool in self._pools for event in pool.side.engine.poll()]
            for event in events:
                self._take(event)
            heard = time.monotonic() if events else heard
            assert time.monotonic() - heard < QUIET_S, list(self._open)

    def check_arrived(self) -> None:
        """Checks that at least half of the moves that nobody stopped arrived."""
        for what in ARRIVE:
            assert self.received[what] >= self.ends[what] / 2, (what, self.ends)

    def check_whole(self) -> None:
        """Checks that every block is its engine's again and the leads agree."""
        for pool in self._pools:
            lead = pool.side.lead
            assert sorted(pool.free) == list(range(BLOCKS))
            # A source that learned of a push, but whose engine never did, keeps waiting for a while.
            wait_until(lambda lead=lead: lead.at_rest(), what=lead.status)  # type: ignore[misc]
            assert not lead.api.admin.ListPins(admin_pb2.ListPinsRequest()).pins
            assert not lead.leases()

    def close(self) -> None:
        for pool in self._pools:
            pool.side.close()

    # -- one transfer

    def _begin(self) -> None:
        random = self._random
        self.begun += 1
        source, destination = random.sample(self._pools, 2)
        size = random.randint(1, BLOCKS_MAX)
        kind, fates = ("pull", PULLS) if random.random() < 0.5 else ("push", PUSHES)
        (fate,) = random.choices(list(fates), list(fates.values()))
        tokens = size * BLOCK_TOKENS
        prompt = content(opaque_id=os.urandom(8), tokens=tokens) if size % 2 else content(range(tokens))
        on_abort = random.choice((OnAbort.RELEASE, OnAbort.KEEP))
        blocks, key = (source.take(size), destination.take(size)), os.urandom(16)
        move = Move(self.begun, source, destination, *blocks, key, prompt, kind, fate, on_abort)
        source.paint(move.mine, move.number)
        self._open.add(move)
        self.ends[move.what] += 1
        (self._pull if kind == "pull" else self._push)(move)

    def _pull(self, move: Move) -> None:
        ttl_s = 0.1 if move.fate == "expired" else None
        give = move.source.side.engine.finished_blocks(
            move.mine, move.content, transfer_key=move.key, on_abort=move.on_abort, ttl_s=ttl_s
        )
        self._know(move, give=give)
        if move.fate not in ("never asked for", "expired"):
            self._ask(move, _OTHER if move.fate == "of other content" else move.content)
        else:
            self._give_back(move)
        match move.fate:
            case "never asked for":
                give.cancel("nobody came")
            case "cancelled here":
                give.cancel("not any more")
            case "taken back":
                self._take_back(move, give)
            case "cancelled by key":
                self._cancel_by_key(move)

    def _ask(self, move: Move, prompt: Content) -> None:
        """Pulls at the destination."""
        assert isinstance(move.give, HandOver)
        take = move.destination.side.engine.pull(move.give.grant, prompt)
        self._know(move, take=take)
        match move.fate:
            case "all found":
                take.start(have_tokens=move.content.tokens)
            case "cancelled before blocks" if not move.retried:
                take.cancel("before it had blocks")
            case _:
                take.start(move.target)
        if move.fate == "cancelled there" and not move.retried:
            take.cancel("not any more")

    def _take_back(self, move: Move, give: HandOver) -> None:
        """Takes the blocks back, as a preemption does: from then on they hold something else."""
        move.source.side.engine.flush()
        if give.take_back():
            move.source.paint(move.mine, ~move.number & 0xFFFFFFFF)

    def _push(self, move: Move) -> None:
        address = move.source.side.engine.address if self._random.random() < 0.3 else ""
        if move.fate != "never registered":
            take = move.destination.side.engine.reserve(
                move.target, move.content, transfer_key=move.key, source_address=address
            )
            self._know(move, take=take)
        if move.fate == "never handed over":
            # A registration makes it a transfer of the source as well, which ends with the destination's.
            self._return(move, move.source, move.mine)
        else:
            give = move.source.side.engine.push(move.content, transfer_key=move.key, on_abort=move.on_abort)
            self._know(move, give=give)
            self._hand_over(move, give)
        if move.fate == "never registered":
            self._give_back(move)
        if move.fate == "cancelled by key":
            self._cancel_by_key(move)

    def _hand_over(self, move: Move, push: Push) -> None:
        blocks = move.mine
        half = len(blocks) // 2
        match move.fate:
            case "in parts" if half:
                push.finished(blocks[:half])
                move.source.side.engine.flush()
                push.finished(blocks[half:], last=True)
            case "layer by layer":
                for layer in range(LAYERS):
                    push.finished(blocks, layers=(layer, 1), last=layer == LAYERS - 1)
            case "given up":
                push.finished(blocks[:half]) if half else None
                push.fail("no room")
            case "started over" if half:
                push.finished(blocks[:half])
                move.source.side.engine.flush()
                if push.start_over():
                    move.source.paint(blocks[:half], 0)
                more = move.source.take(half)
                move.mine = blocks + more
                move.source.paint(more, move.number)
                push.finished(more + blocks[half:], last=True)
            case _:
                push.finished(blocks, last=True)
        if move.fate == "cancelled here":
            push.cancel("not any more")

    def _cancel_by_key(self, move: Move) -> None:
        """Cancels the transfer by its key at one of the two leads, like a router."""
        for pool in self._pools:
            pool.side.engine.flush()
        lead = self._random.choice((move.source, move.destination)).side.lead
        request = transfer_pb2.CancelTransferRequest(transfer_key=move.key, idempotency_key=move.key.hex())
        lead.api.transfers.CancelTransfer(request)

    # -- events

    def _take(self, event: Any) -> None:
        move = self._moves.get(event.transfer)
        if move is None:
            return
        match event:
            case Reserved(transfer=take):
                if isinstance(move.give, Push) and not move.give.over:
                    move.give.register(take.grant)
                if move.fate == "cancelled there":
                    take.cancel("not any more")
            case Received(transfer=take):
                assert move.fate == "all found" or move.destination.holds(move.target, move.number), move
                self.ends["received"] += 1
                self.received[move.what] += 1
                self._over(move, take)
            case Failed(reason=reason):
                self.ends[f"failed {reason.name}"] += 1
                # Every later failure, at either engine, is a consequence of the first.
                excused = move.failed or move.what not in ARRIVE or reason.name.endswith("_TIMEOUT")
                assert excused, (move.what, event)
                move.failed = True
            case BlocksReturned(transfer=handle):
                self._over(move, handle)

    def _over(self, move: Move, handle: Handle) -> None:
        del self._moves[handle]
        if handle is move.give:
            move.give = None
            self._return(move, move.source, move.mine)
        else:
            move.take = None
            self._after_take(move, handle)

    def _after_take(self, move: Move, take: Handle) -> None:
        give = move.give
        if isinstance(give, HandOver) and take.failed:
            if move.on_abort is OnAbort.KEEP and not move.retried and not give.failed:
                move.retried = True
                self._ask(move, move.content)
                return
            give.cancel("nobody reads it any more")
        elif isinstance(give, Push) and take.failed and move.number % 16:
            give.cancel("nobody takes it any more")  # otherwise it waits for another destination
        self._give_back(move)

    def _give_back(self, move: Move) -> None:
        self._return(move, move.destination, move.target)

    def _return(self, move: Move, pool: Pool, blocks: list[int]) -> None:
        pool.free.extend(blocks)
        if move.give is None and move.take is None:
            self._open.discard(move)

    def _know(self, move: Move, **handles: Any) -> None:
        for name, handle in handles.items():
            setattr(move, name, handle)
            self._moves[handle] = move


@contextmanager
def leads(folder: Path, *flags: str) -> Iterator[tuple[Lead, Lead]]:
    """Yields two leads that wait for engines."""
    with ExitStack() as stack:
        made = [Lead(folder, name, *flags, settings=SETTINGS) for name in ("P", "D")]
        for lead in made:
            stack.callback(lead.close)
        yield made[0].wait_ready(), made[1].wait_ready()
