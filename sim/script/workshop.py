"""An engine's own blocks and steps: it computes, keeps, and reuses blocks as early as it may."""

from collections.abc import Callable

import numpy as np

from kvgrpc.core.events import StepDone
from kvgrpc.core.values.block_ids import Blocks, Ids
from kvgrpc.core.values.call import LayerRange
from kvgrpc.core.values.content import ContentId, chain
from sim.engine.blocks import BlockManager
from sim.script.hosts import HandHost
from sim.world.memory import ALL_LAYERS, Memory, Prompt


class LowestFirst(BlockManager):
    """A block manager that gives out the lowest free blocks first, so that returned blocks are reused at once."""

    def take(self, tokens: int) -> Blocks | None:
        """Returns blocks for that many tokens, or None if there is no room."""
        for free in self._free:
            free.sort(reverse=True)
        return super().take(tokens)


class Workshop:
    """The blocks of one life of an engine. Reports about requests go to `say`."""

    def __init__(self, host: HandHost, weights: str, say: Callable[[str, str], None]) -> None:
        self.blocks = LowestFirst(host.description.pool)
        self._host = host
        self._weights = weights
        self._say = say
        self._kept: dict[str, Blocks] = {}
        """Blocks that are kept of each request, with one reference."""
        self._works: dict[int, list[Callable[[int, LayerRange], None]]] = {}
        """Work of each step, as functions of the rank and the layers that are done."""
        self._ends: dict[int, list[Callable[[], None]]] = {}

    @property
    def memories(self) -> list[Memory]:
        """Memories by rank."""
        return self._host.memories

    def content(self, prompt: Prompt) -> ContentId:
        """Returns the content of a prompt's KV on this engine."""
        return chain(prompt.tokens, cache_salt=prompt.salt, weights_revision=self._weights)

    def compute(self, name: str, prompt: Prompt, step: int = 0) -> Blocks | None:
        """Computes a prompt and keeps it. Returns the blocks, or None without room."""
        blocks = self._kept.get(name)
        if blocks is None:
            blocks = self.take(name, len(prompt.tokens))
            if blocks is not None:
                self._kept[name] = blocks
                self._write(blocks, prompt, step)
        return blocks

    def lend(self, name: str, prompt: Prompt, step: int = 0) -> Blocks | None:
        """Returns blocks that hold a prompt, with a reference for the borrower: those that are kept, and newly computed
        ones.
        """
        kept = self._kept.get(name)
        if kept is None:
            blocks = self.take(name, len(prompt.tokens))
            if blocks is not None:
                self._write(blocks, prompt, step)
            return blocks
        groups = self._host.description.pool.groups
        first = min(len(ids) * group.block_tokens for ids, group in zip(kept, groups, strict=True))
        if first >= len(prompt.tokens):
            return self.blocks.share(kept)
        rest = self.take(name, len(prompt.tokens) - first)
        if rest is None:
            return None
        blocks = tuple(np.concatenate(both) for both in zip(self.blocks.share(kept), rest, strict=True))
        self._write(blocks, prompt, step)
        return blocks

    def keep(self, name: str, blocks: Blocks) -> None:
        """Keeps blocks, with their reference, as those of a request."""
        self.release(self._kept.pop(name, None))
        self._kept[name] = blocks

    def free(self, name: str) -> None:
        """Forgets the kept blocks. Raises ValueError if there are none."""
        if name not in self._kept:
            raise ValueError(f"nothing of {name} is kept")
        self.release(self._kept.pop(name))

    def take(self, name: str, tokens: int) -> Blocks | None:
        """Returns new blocks, or None without room."""
        blocks = self.blocks.take(tokens)
        if blocks is None:
            self._say(name, "there is no room")
        return blocks

    def release(self, blocks: Blocks | None) -> None:
        """Removes a reference. A block without references may be reused at once."""
        if blocks is not None:
            unused = self.blocks.free(blocks)
            assert self._host.at_rest(unused), "blocks are reused that are pinned"
            for memory in self.memories:
                memory.check_freed(unused)

    def void(self, blocks: Blocks | None) -> None:
        """Releases blocks like `release`, though they may still be read."""
        if blocks is not None:
            for memory in self.memories:
                memory.void(blocks)
        self.release(blocks)

    def queue(self, step: int, blocks: Blocks, do: Callable[[int, LayerRange], None]) -> None:
        """Queues work on blocks, which are not reused before it is done."""
        self.blocks.share(blocks)
        self._works.setdefault(step, []).append(do)
        self._ends.setdefault(step, []).append(lambda: self.release(blocks))

    def step(self, number: int, rank: int | None, layers: LayerRange | None) -> None:
        """Ends a step, on one rank or on all; with `layers`, in these layers only."""
        last = len(self.memories) - 1
        for each in range(last + 1) if rank is None else (rank,):
            for work in self._works.get(number, ()):
                work(each, layers or ALL_LAYERS)
            self._host.handle(StepDone(each, number, layers))
        if rank in (None, last) and layers is None:
            for end in self._ends.pop(number, ()):
                end()

    def show(self, blocks: Blocks | None) -> str:
        """Returns block ids as text."""
        groups = self._host.description.pool.groups
        if blocks is None or not any(len(ids) for ids in blocks):
            return "no blocks"
        if len(groups) == 1:
            return f"block{'s' if len(blocks[0]) > 1 else ''} {runs(blocks[0])}"
        rows = [f"{group.name} {runs(ids)}" for group, ids in zip(groups, blocks, strict=True) if len(ids)]
        return "blocks " + ", ".join(rows)

    def _write(self, blocks: Blocks, prompt: Prompt, step: int) -> None:
        if step:
            self.queue(step, blocks, lambda rank, layers: self.memories[rank].compute(blocks, prompt, layers))
            return
        for memory in self.memories:
            memory.compute(blocks, prompt)


def runs(ids: Ids) -> str:
    """Returns numbers as text, with consecutive ones joined."""
    found: list[list[int]] = []
    for id_ in ids.tolist():
        if found and found[-1][-1] == id_ - 1:
            found[-1].append(id_)
        else:
            found.append([id_])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
