"""Makes a lead's answers false."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvgrpc.core.actions import (
    Answer,
    Checksums,
    Closings,
    Introduced,
    Openings,
    Renewed,
    SendUnderWay,
    Verdicts,
    Widened,
)
from kvgrpc.core.events import (
    ChecksumBlocks,
    CloseAccess,
    Event,
    OpenAccess,
    Opened,
    PartsReady,
    PostSend,
    SettleAccess,
)
from kvgrpc.core.tables.accesses import Verdict
from kvgrpc.errors import KVGrpcError
from sim.hosts.known import REASONS, Known
from sim.world.network import Result
from sim.world.surroundings import Surroundings


class FalseAnswers:
    """The false answers of one liar. Each is of the expected kind and has as many rows, or the edge would refuse it."""

    def __init__(self, known: Known, world: Surroundings) -> None:
        self._known = known
        self._rng = known.rng
        self._world = world
        self._bends: dict[type[Answer], Callable[[Any], Answer]] = {
            Introduced: self._introduced,
            Openings: lambda answer: Openings(tuple(map(self._row, answer.rows))),
            Verdicts: lambda answer: Verdicts(tuple(map(self._verdict, answer.rows))),
            Closings: lambda answer: Closings(tuple(not row for row in answer.rows)),
            SendUnderWay: lambda _: SendUnderWay((("wire", b"wire-1"),)),
            Checksums: self._checksums,
            Renewed: lambda answer: Renewed(
                tuple((0.0, self._rng.choice((None, *REASONS)), None) for _ in answer.rows)
            ),
        }

    def bend(self, asked: Event, result: Result) -> Result:
        """Returns a false answer in place of `result`."""
        if not self._rng.randrange(8):
            return self._known.error()
        if isinstance(result, KVGrpcError):
            return self._made_up(asked) or self._known.error()
        bend = self._bends.get(type(result))
        return result if bend is None else bend(result)

    def _made_up(self, asked: Event) -> Answer | None:
        """Returns an answer to a request that the node has refused, or None."""
        if isinstance(asked, OpenAccess):
            return Openings(tuple(self._invented(row.claim.tokens if row.claim else 0) for row in asked.openings))
        if isinstance(asked, SettleAccess):
            return Verdicts(tuple(Verdict(True) for _ in asked.settlings))
        if isinstance(asked, CloseAccess):
            return Closings(tuple(True for _ in asked.closings))
        if isinstance(asked, PartsReady | PostSend):
            return Widened() if isinstance(asked, PartsReady) else SendUnderWay(())
        if isinstance(asked, ChecksumBlocks):
            count = sum(len(ids) for lists, _ in asked.blocks for _, ids in lists)
            return Checksums(tuple(self._rng.randbytes(4 * count) for _ in range(self._world.ranks)))
        return None

    def _invented(self, tokens: int) -> Opened:
        rng, groups = self._rng, self._world.pool.groups
        blocks = []
        for i, group in enumerate(groups):
            ids = rng.sample(range(group.blocks), min(group.blocks_of(tokens), group.blocks))
            blocks.append((i, np.array(ids, dtype=np.int64)))
        return Opened(tuple(blocks), tokens, tokens, 30.0, 30.0, 0, self._known.text(), self._known.text())

    def _row(self, row: Opened | KVGrpcError) -> Opened | KVGrpcError:
        if isinstance(row, KVGrpcError):
            return self._invented(self._known.number(32) % 1024)
        known = self._known
        if not self._rng.randrange(12):
            return known.error()
        changes: dict[str, Callable[[], object]] = {
            "token_count": lambda: known.number(row.token_count),
            "offer_tokens": lambda: known.number(row.offer_tokens),
            "remaining_s": known.seconds,
            "ttl_s": known.seconds,
            "memory_generation": lambda: known.number(row.memory_generation),
            "transfer_id": known.text,
            "lease_id": known.text,
            "blocks": lambda: known.lists(row.blocks),
        }
        name = self._rng.choice((*changes, "blocks", "blocks", "blocks"))
        return replace(row, **{name: changes[name]()})  # type: ignore[arg-type]

    def _verdict(self, row: Verdict) -> Verdict:
        if not row.valid:
            return Verdict(True)
        return Verdict(False, self._rng.choice(REASONS), "a lie")

    def _checksums(self, answer: Checksums) -> Checksums:
        rng, rows = self._rng, list(answer.by_rank)
        kind = rng.randrange(5)
        if kind == 0:
            return Checksums(())
        if kind == 1:
            return Checksums((*rows, b""))
        at = rng.randrange(len(rows))
        if kind == 2:
            rows[at] = rows[at][4:]
        elif kind == 3:
            rows[at] += rows[at][:4] or bytes(4)
        else:
            rows[at] = rng.randbytes(len(rows[at]))
        return Checksums(tuple(rows))

    def _introduced(self, answer: Introduced) -> Introduced:
        known, kind = self._known, self._rng.randrange(6)
        if kind == 0:
            return replace(answer, endpoints=known.endpoints(answer.endpoints))
        if kind == 1:
            return replace(answer, protocol=known.number(answer.protocol))
        return replace(answer, engine=known.description(answer.engine))
