"""The sending side of a scripted engine: whole prompts for readers, and parts of a push."""

from collections.abc import Callable

from kvgrpc.core.actions import GaveUp, HandedOver, Reclaimed
from kvgrpc.core.events import Call, FinishedBlocks, ReclaimBlocks, WaitsFor
from kvgrpc.core.values import grants
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.ids import mint_lease_id
from kvgrpc.core.values.limits import granted_ttl
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError
from sim.script.hosts import HandHost
from sim.script.jobs import HandOverTerms, ScriptJob, ScriptPart, key_fields
from sim.script.workshop import Workshop
from sim.world.memory import Prompt
from sim.world.network import Result


class ScriptSends:
    """The hand-overs of one life of an engine. `jobs` has the last one of each request."""

    def __init__(
        self, host: HandHost, shop: Workshop, jobs: dict[str, ScriptJob], say: Callable[[str, str], None]
    ) -> None:
        self._host = host
        self._shop = shop
        self._jobs = jobs
        self._say = say
        self._live: dict[str, ScriptJob] = {}
        """Hand-overs in flight, by transfer."""
        self._replaced: dict[str, Blocks] = {}
        """Blocks of parts that were replaced, by lease."""
        self._promised: dict[str, str] = {}
        """Lease ids whose grants have already left."""
        self._minted = 0

    def promise(self, name: str, prompt: Prompt, key: bytes, terms: HandOverTerms) -> bytes:
        """Mints the grant of a later hand-over."""
        self._minted += 1
        me, state = self._host.description, self._host.node.state
        lease_id = self._promised[name] = mint_lease_id(state.life.secret, me.incarnation, "engine", self._minted)
        # The lead refuses an invalid time to live.
        ttl_s = terms.ttl_s if terms.ttl_s is None or terms.ttl_s > 0 else None
        claims = grants.Claims(
            grants.AccessKind.READ, me.engine_id, me.incarnation, me.address, lease_id, key,
            granted_ttl(ttl_s, state.limits), sum(group.blocks_of(len(prompt.tokens)) for group in me.pool.groups),
            len(prompt.tokens), terms.on_abort,
        )  # fmt: skip
        return grants.mint(claims, state.life.grant_key)

    def finish(self, name: str, prompt: Prompt, key: bytes, terms: HandOverTerms, listed: Blocks | None) -> bytes:
        """Hands a prompt over to readers, in blocks that are lent, or in those of `listed`.

        Returns the grant, empty if it was refused or had left before.
        """
        token = b"" if name in self._promised else self.promise(name, prompt, key, terms)
        job = ScriptJob(name, prompt, listed, lease_id=self._promised.pop(name))
        lent = None if listed else self._shop.lend(name, prompt, terms.step)
        blocks = job.blocks = listed or lent
        if blocks is None:
            return b""

        def ask(call: Call) -> FinishedBlocks:
            return FinishedBlocks(
                call, key, tuple(enumerate(blocks)), self._shop.content(prompt), terms.ttl_s, terms.consumers,
                terms.on_abort, terms.label or name, after_step=terms.step, lease_id=job.lease_id,
                firm_ttl_s=terms.firm_ttl_s,
            )  # fmt: skip

        result = self._call(ask, key_fields("FinishedBlocks", terms.retry_key))
        if not isinstance(result, HandedOver):
            self._shop.release(lent)
            self._refused(name, result)
            return b""
        if result.lease.id != job.lease_id:  # the answer to an earlier call under the same key
            self._shop.release(lent)
            self._say(name, "was handed over already")
            return b""
        self._begin(job, result)
        self._say(name, f"handed over {self._shop.show(blocks)}")
        return token

    def part(self, name: str, prompt: Prompt, key: bytes, part: ScriptPart) -> None:
        """Hands one part of a push over. The first part of an epoch takes the blocks for all."""
        job = self._of_epoch(name, prompt, part)
        if job is None:
            return
        assert job.blocks is not None
        blocks = self._shop.blocks.between(job.blocks, part.first, part.end, part.layers)
        terms = part.terms

        def ask(call: Call) -> FinishedBlocks:
            return FinishedBlocks(
                call, key, tuple(enumerate(blocks)), self._shop.content(prompt), None, terms.consumers,
                terms.on_abort, name, after_step=terms.step, waits_for=WaitsFor.REGISTRATION, last=part.last,
                layers=part.layers, part_epoch=part.part_epoch, firm_ttl_s=terms.firm_ttl_s,
            )  # fmt: skip

        def answered(result: Result) -> None:
            # If a destination gave up before, the news that the push is over follows the answer at once.
            if isinstance(result, HandedOver):
                self._begin(job, result)
                self._say(name, f"part {self._shop.show(blocks)}")
                return
            if not job.transfer_id:
                self._shop.release(job.blocks)
                del self._jobs[name]
            self._refused(name, result)

        self._host.call(ask, ENGINE, answered)

    def give_up(self, name: str, key: bytes) -> None:
        """Reports that the engine cannot deliver a push."""

        def ask(call: Call) -> FinishedBlocks:
            return FinishedBlocks(
                call, key, (), None, request_id=name, waits_for=WaitsFor.REGISTRATION, failure="prefill failed"
            )

        result = self._call(ask)
        if not isinstance(result, GaveUp):
            self._refused(name, result)

    def take_back(self, name: str) -> None:
        """Preempts a hand-over: its blocks are the engine's own again at once."""
        job = self._jobs[name]
        job.taken_back = True
        self._host.void(job.lease_id)
        self._shop.void(job.blocks)
        self._say(name, f"took {self._shop.show(job.blocks)} back")

    def reclaim(self, count: int) -> None:
        """Asks for `count` more blocks than are free."""
        given: list[Result] = []
        self._host.call(lambda call: ReclaimBlocks(call, ((0, count),)), ENGINE, given.append)
        (result,) = given
        assert isinstance(result, Reclaimed)
        what = f"{self._shop.show(result.freed)} are free" if result.enough else "too little is soft"
        spaces = self._host.description.pool.spaces
        # Groups of one space share the number.
        later = ((row, dict(zip(spaces, row.block_counts, strict=True))) for row in result.later)
        soon = "".join(f", {sum(counts.values())} blocks in {row.in_s:.1f}s" for row, counts in later)
        self._say("reclaiming", what + soon)

    def name_of(self, transfer_id: str) -> str | None:
        """Returns the request of a hand-over, or None."""
        job = self._live.get(transfer_id)
        return None if job is None else job.name

    def returned(self, transfer_id: str) -> bool:
        """Takes blocks that came back. Returns False if they belong to no hand-over."""
        job = self._live.pop(transfer_id, None)
        if job is None:
            return False
        if job.taken_back:
            self._say(job.name, "nothing came back")
        else:
            self._shop.release(job.blocks)
            self._say(job.name, f"{self._shop.show(job.blocks)} came back")
        return True

    def parts_returned(self, name: str, lease_id: str) -> None:
        """Takes the blocks of replaced parts back."""
        blocks = self._replaced.pop(lease_id, None)
        self._shop.release(blocks)
        what = f"{self._shop.show(blocks)} of parts that were replaced" if blocks else "nothing"
        self._say(name, f"{what} came back")

    def check_idle(self) -> None:
        """Asserts that everything came back."""
        assert not self._live, "hand-overs were never returned"
        assert not self._replaced, "parts that were replaced were never returned"

    def _of_epoch(self, name: str, prompt: Prompt, part: ScriptPart) -> ScriptJob | None:
        """Returns the push of this part. With a higher epoch it starts over, in other blocks."""
        job = self._jobs.get(name)
        if job is not None and job.part_epoch >= part.part_epoch and not job.taken_back:
            return job
        blocks = self._shop.lend(name, prompt, part.terms.step)
        if blocks is None:
            return None
        if job is not None and not job.taken_back and job.blocks is not None:
            self._replaced[job.lease_id] = job.blocks
        self._jobs[name] = ScriptJob(name, prompt, blocks, part_epoch=part.part_epoch)
        return self._jobs[name]

    def _begin(self, job: ScriptJob, result: HandedOver) -> None:
        assert result.transfer is not None
        job.transfer_id, job.lease_id = result.transfer.id, result.lease.id
        self._live[job.transfer_id] = self._jobs[job.name] = job

    def _call(self, ask: Callable[[Call], FinishedBlocks], fields: dict[str, str] | None = None) -> Result:
        given: list[Result] = []
        self._host.call(ask, ENGINE, given.append, **fields or {})
        return given[0]

    def _refused(self, name: str, result: Result) -> None:
        assert isinstance(result, KVGrpcError)
        self._say(name, f"refused with {result.reason.value}")
