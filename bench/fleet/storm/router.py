"""A process that routes requests over real leads: a pair from `kvgrpc fleet`, a hand-over at P, a pull at D. Then it
compares what D has with what the prompt's tokens demand. A request whose engine is lost goes to another pair.
"""

import asyncio
import contextlib
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from secrets import token_bytes
from typing import Any

from bench.fleet.child import Answerer, answer_lines
from bench.fleet.engines import MODEL
from bench.fleet.storm.pool_memory import PoolMemory, process_at
from bench.fleet.storm.prompts import block_count, kv, prompt
from kvgrpc.client import CleanUp, Client, block_ids, check_transfer, clean_up, connect
from kvgrpc.core.values.content import chain
from kvgrpc.errors import KVGrpcError, Unavailable
from kvgrpc.v1.common_pb2 import ContentChain
from kvgrpc.v1.fleet_pb2 import FleetEngine
from kvgrpc.v1.pool_pb2 import AllocateBlocksResponse

AT_ONCE = 4
"""Number of requests that one router has under way."""
TRIES = 4
"""Maximum number of pairs for one request."""
PULL_S = 3.0
"""Time after which a router tries another pair than one whose pull goes on, in seconds."""
NO_RETRIES = (("grpc.enable_retries", 0),)
"""Options of connections to engines: a router with other pairs does not ask an engine again that cannot be reached."""
LOST_S = 5.0
"""Time for which a router leaves an engine out that it could not reach, in seconds: until it has been asked again."""
BLOCKS_TTL_S = 30.0
NO_PAIR = "NO_PAIR"


@dataclass
class Ended:
    """The end of one request."""

    right: bool | None = None
    """Whether all bytes are those that the prompt demands; None: there was no answer."""
    typed: list[str] = field(default_factory=list)
    """Reasons of the tries that failed."""
    untyped: str = ""
    seconds: float = 0.0


class StormRouter:
    """One router. Its clients stay for the life of each lead."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._fleet, self._folder = connect(job["fleet"]), Path(job["folder"])
        self._chance = random.Random(job["seed"])  # noqa: S311 - the same in every run
        self._clients: dict[str, Client] = {}
        self._memories: dict[int, PoolMemory] = {}
        self._lost: dict[str, float] = {}
        """Engines that could not be reached, and when."""
        self._cleaning: set[asyncio.Task[Any]] = set()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Routes requests for as long as a line says. Says how each ended."""
        until = time.monotonic() + request["seconds"]
        ends = list[Ended]()
        await asyncio.gather(*(self._go_on(until, ends) for _ in range(AT_ONCE)))
        await asyncio.gather(*self._cleaning)
        return {"ends": [asdict(one) for one in ends]}

    async def _go_on(self, until: float, ends: list[Ended]) -> None:
        while time.monotonic() < until:
            token_ids, began = prompt(self._chance), time.monotonic()
            ends.append(await self._route(token_ids))
            ends[-1].seconds = time.monotonic() - began

    async def _route(self, token_ids: list[int]) -> Ended:
        """Tries pairs until one has answered. Returns the end of the request, with the reasons of what failed."""
        ended, tried = Ended(), set[str]()
        beginning = ContentChain(digests=chain(token_ids).digests, token_count=len(token_ids))
        for _ in range(TRIES):
            sides: tuple[FleetEngine, ...] = ()
            try:
                pair = await self._fleet.fleet().pick_pair(
                    model_name=MODEL, chain=beginning, exclude=self._excluded(tried)
                )
                if not pair.HasField("prefill"):
                    ended.typed.append(NO_PAIR)
                    tried.clear()  # one that failed may be back
                    continue
                sides = pair.prefill.engine, pair.decode.engine
                ended.right = await self._moved(pair.prefill.engine, pair.decode.engine, token_ids)
                break
            except KVGrpcError as error:
                ended.typed.append(str(error.reason))
                tried |= {one.engine_id for one in sides}
                for one in sides:
                    if isinstance(error, Unavailable) and one.addresses[0] == error.metadata.get("address"):
                        self._lost[one.engine_id] = time.monotonic()
            except Exception as error:  # noqa: BLE001 - that there is none is what the storm shows
                ended.untyped = repr(error)
                break
        return ended

    def _excluded(self, tried: set[str]) -> list[str]:
        since = time.monotonic() - LOST_S
        self._lost = {engine_id: at for engine_id, at in self._lost.items() if at > since}
        return sorted(tried | self._lost.keys())

    async def _moved(self, prefill: FleetEngine, decode: FleetEngine, token_ids: list[int]) -> bool:
        """Moves a prompt's KV from one engine to another. Returns whether it is right there. Raises KVGrpcError."""
        source, target = self._client(prefill), self._client(decode)
        key, blocks, wanted = token_bytes(16), block_count(token_ids), kv(token_ids)
        taken = list[tuple[Client, AllocateBlocksResponse]]()
        try:
            computed = await source.allocate(blocks, ttl_s=BLOCKS_TTL_S)
            taken.append((source, computed))
            await self._compute(source, prefill.addresses[0], computed, wanted)
            offered = await source.finished_blocks(computed, token_ids, transfer_key=key)
            room = await target.allocate(blocks, ttl_s=BLOCKS_TTL_S)
            taken.append((target, room))
            check_transfer(await target.pull(offered.grant, token_ids, blocks=room, transfer_key=key, timeout_s=PULL_S))
            there = await target.read_blocks(room)
            return [row.data for row in there.blocks] == wanted
        finally:
            sides = [CleanUp(client, key, [reply.blocks.allocation_id]) for client, reply in taken]
            cleaning = asyncio.create_task(clean_up(sides, message="the request is over"))
            self._cleaning.add(cleaning)
            cleaning.add_done_callback(self._cleaning.discard)

    async def _compute(self, lead: Client, address: str, taken: AllocateBlocksResponse, blocks: list[bytes]) -> None:
        """Writes the KV into blocks of a lead's life; into none if it has ended, as an engine that died."""
        life = taken.blocks.incarnation
        if life not in self._memories:
            with contextlib.suppress(OSError, StopIteration):
                memory = PoolMemory(process_at(self._folder, address))
                # The life still answers, so no later one was at the address when its process was looked up.
                if (await lead.get_engine()).header.incarnation == life:
                    self._memories[life] = memory
                else:
                    memory.close()
        if life in self._memories:
            with contextlib.suppress(OSError):
                self._memories[life].write(block_ids(taken), blocks)

    def _client(self, engine: FleetEngine) -> Client:
        address = engine.addresses[0]
        if address not in self._clients:
            self._clients[address] = connect(address, channel_options=NO_RETRIES)
        return self._clients[address]


async def begin(job: dict[str, Any]) -> tuple[dict[str, Any], Answerer]:
    """Connects. Requests begin with the next line."""
    return {}, StormRouter(job).answer


if __name__ == "__main__":
    answer_lines(begin)
