"""Workers without an engine: each has a cache of two layers, and a real store."""

from dataclasses import replace
from typing import Any

from kvgrpc.client import connect_sync
from kvgrpc.integrations.vllm.tensors.messages import PutTask, TensorStep, WorkerNews
from kvgrpc.integrations.vllm.tensors.options import SendMode, TensorOptions
from kvgrpc.integrations.vllm.tensors.parts import Cut, PromptPart, PromptParts
from kvgrpc.integrations.vllm.tensors.worker_side import TensorWorkerSide
from tests.vllm.cores import BLOCK_TOKENS, PROMPT, pool_of
from tests.vllm.engines import wait_until

PARTS = [PromptParts(Cut(BLOCK_TOKENS, 2 * BLOCK_TOKENS, 1), PROMPT).part(number) for number in (0, 1)]
PAGE = 1 << 16
STORE_BYTES = 512 * PAGE
"""Store size in bytes. Every worker's store has all its memory from the start."""


def prompt_of_blocks(blocks: int) -> PromptParts:
    """Returns a prompt whose parts are blocks."""
    return PromptParts(Cut(BLOCK_TOKENS, BLOCK_TOKENS, 1), range(blocks * BLOCK_TOKENS))


class Worker:
    """A cache of two layers, and its store."""

    def __init__(self, rank: int = 0, **options: Any) -> None:
        self._fetches = options.get("send") is SendMode.GET
        layout, memory = pool_of(states=False)
        self.caches = {"0": memory[0], "1": memory[1]}
        small = {"timeout_s": 30.0, "layers_per_tensor": 1, "store_bytes": STORE_BYTES}
        self.side = TensorWorkerSide(TensorOptions(**small | options), layout)
        self.side.register(self.caches, [["0", "1"]])
        self.address = self.side.attach("", rank, "weights")
        self.heard = WorkerNews()

    def step(self, told: TensorStep | None = None, **what: Any) -> None:
        """Runs one step of the engine with these messages. If the worker sends by GET, it fetches what it expects."""
        step = told or TensorStep(**what)
        for rows in (step.watches, step.expects):
            rows[:] = [replace(expect, fetches=expect.fetches or self._fetches) for expect in rows]
        self.side.begin(step)
        self.side.step_done(step)
        self.hears()

    def hears(self) -> WorkerNews:
        """Returns everything that it has reported so far."""
        return self.heard.aggregate(self.side.heard() or WorkerNews())

    def loses(self, key: bytes, name: str = "a") -> str:
        """Waits until a request under this key is lost, and returns the reason."""
        wait_until(lambda: (name, key) in self.hears().lost)
        loss = self.heard.lost[name, key]
        return f"{loss.reason}: {loss.message}"

    def offers(self) -> int:
        """Returns the number of tensors that its lead keeps for others."""
        with connect_sync(self.address) as lead:
            return int(lead.tensors().status().offered_count)

    def stored(self) -> int:
        """Returns the number of tensors of others that are in its store, or arriving."""
        with connect_sync(self.address) as lead:
            return int(lead.tensors().status().tensor_count)

    def waits(self) -> int:
        """Returns the number of calls that wait at its lead."""
        with connect_sync(self.address) as lead:
            return int(lead.tensors().status().waiting_count)


def put_of(key: bytes, part: PromptPart, blocks: list[int], to: str = "", ttl_s: float | None = None) -> PutTask:
    return PutTask("a", key, to, part, blocks, ttl_s)
