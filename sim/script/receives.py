"""The receiving side of a scripted engine: pulls, and reservations for a push."""

from collections.abc import Callable
from hashlib import sha256

import numpy as np

from kvgrpc.core.actions import BlocksReserved, LayersReceivedNews, PullStarted, ReceivedNews
from kvgrpc.core.events import Call, Destination, GiveDestination, PullBlocks, PushSource, ReserveBlocks
from kvgrpc.core.values import grants
from kvgrpc.core.values.block_ids import Blocks
from kvgrpc.core.values.content import largest_use
from kvgrpc.core.values.owners import ENGINE
from kvgrpc.errors import KVGrpcError
from sim.script.hosts import HandHost
from sim.script.jobs import LATER, LOCAL, NOW, ReceiveTerms, ScriptJob, key_fields
from sim.script.workshop import Workshop, runs
from sim.world.memory import Prompt
from sim.world.network import Result


class ScriptReceives:
    """The pulls and reservations of one life of an engine. `jobs` has the last one of each request."""

    def __init__(
        self, host: HandHost, shop: Workshop, jobs: dict[str, ScriptJob], say: Callable[[str, str], None]
    ) -> None:
        self._host = host
        self._shop = shop
        self._jobs = jobs
        self._say = say
        self._live: dict[str, ScriptJob] = {}
        """Jobs in flight, by transfer."""
        self._asked: set[str] = set()
        """All transfers ever."""
        self._drawn = 0

    def pull(self, name: str, prompt: Prompt, token: bytes, wanted: ReceiveTerms) -> None:
        """Pulls with a grant."""
        job = self._job(name, prompt, _offered(token, prompt), wanted)
        destination = Destination((), job.use_tokens) if wanted.blocks == LOCAL else None
        if wanted.blocks not in (LOCAL, LATER):
            destination = self._destination(job, wanted)
            if destination is None:
                return
        self._drawn += 1
        access_id = sha256(f"{self._host.life}/{self._drawn}".encode()).digest()[:16]
        content = None if wanted.no_content else self._shop.content(prompt)

        def ask(call: Call) -> PullBlocks:
            return PullBlocks(
                call, token, content, access_id, wanted.use_tokens, destination, wanted.key, wanted.label or name,
                after_step=wanted.step, queue_timeout_s=wanted.queue_s, transfer_timeout_s=wanted.bytes_s,
            )  # fmt: skip

        begun = lambda result: self._begun(job, result, given=destination is not None)
        self._host.call(ask, ENGINE, begun, **key_fields("PullBlocks", wanted.retry_key))

    def give(self, name: str, wanted: ReceiveTerms) -> None:
        """Gives blocks to a pull that waits for them."""
        job = self._jobs[name]
        destination = self._destination(job, wanted)
        if destination is None:
            return

        def done(result: Result) -> None:
            if isinstance(result, KVGrpcError):
                self._shop.release(job.blocks)
                job.blocks = job.targets = None
                self._say(name, f"refused with {result.reason.value}")
            else:
                self._hand_in(job)

        self._host.call(lambda call: GiveDestination(call, job.transfer_id, destination, wanted.step), ENGINE, done)

    def reserve(self, name: str, prompt: Prompt, key: bytes, source: str, wanted: ReceiveTerms) -> bytes:
        """Reserves blocks for a push. Returns the grant, empty if it was refused or there was no room."""
        job = self._job(name, prompt, len(prompt.tokens), wanted)
        destination = self._destination(job, wanted)
        if destination is None:
            return b""
        known = PushSource(source) if source else None

        def ask(call: Call) -> ReserveBlocks:
            return ReserveBlocks(
                call, key, destination.blocks, self._shop.content(prompt), job.have_tokens, wanted.use_tokens, known,
                wanted.label or name, after_step=wanted.step, registration_timeout_s=wanted.queue_s,
            )  # fmt: skip

        given: list[Result] = []
        self._host.call(ask, ENGINE, given.append)
        self._begun(job, given[0], given=True)
        return given[0].token if isinstance(given[0], BlocksReserved) else b""

    def name_of(self, transfer_id: str) -> str | None:
        """Returns the request of a pull or reservation, or None."""
        job = self._live.get(transfer_id)
        return None if job is None else job.name

    def received(self, news: ReceivedNews) -> None:
        """Takes received KV, which must be what was asked for."""
        job = self._live.pop(news.transfer_id)
        if job.blocks is None:
            self._say(job.name, "done, nothing was to move")
            return
        for memory in self._shop.memories:
            memory.take_back(job.targets or ())
            memory.check_holds(job.blocks, job.prompt, news.use_tokens)
        self._say(job.name, f"received {news.use_tokens} tokens, and they are right")
        self._shop.keep(job.name, job.blocks)

    def layers(self, news: LayersReceivedNews) -> None:
        """Takes layers that may be used provisionally. They, too, must be what was asked for."""
        job = self._live[news.transfer_id]
        assert job.blocks is not None
        for memory in self._shop.memories:
            memory.check_holds(job.blocks, job.prompt, job.use_tokens, news.layers_done)
        layers = [layer for first, count in news.layers_done for layer in range(first, first + count)]
        what = f"layer{'s' if len(layers) > 1 else ''} {runs(np.array(layers))}" if layers else "no layer"
        self._say(job.name, f"here provisionally: {what}")

    def returned(self, transfer_id: str) -> bool:
        """Takes blocks that came back without KV. Returns False if they belong to no pull or reservation."""
        job = self._live.pop(transfer_id, None)
        if job is None:
            return False
        if job.targets is not None:
            for memory in self._shop.memories:
                memory.take_back(job.targets)
        self._shop.release(job.blocks)
        self._say(job.name, f"{self._shop.show(job.blocks)} came back")
        return True

    def check_idle(self) -> None:
        """Asserts that everything ended."""
        assert not self._live, "pulls never ended"

    def _job(self, name: str, prompt: Prompt, offered: int, wanted: ReceiveTerms) -> ScriptJob:
        use = wanted.use_tokens or largest_use(len(prompt.tokens), offered)
        return ScriptJob(name, prompt, use_tokens=use, have_tokens=wanted.have_tokens)

    def _destination(self, job: ScriptJob, wanted: ReceiveTerms) -> Destination | None:
        """Returns the blocks to fill, after computing the KV that the engine should already have; None without room."""
        if wanted.blocks not in (NOW, LATER):
            job.targets = listed(wanted.blocks)
            return Destination(tuple(enumerate(job.targets)), job.have_tokens)
        blocks = self._shop.take(job.name, job.use_tokens)
        if blocks is None:
            return None
        have = Prompt(job.prompt.tokens[: job.have_tokens], job.prompt.salt)
        for memory in self._shop.memories:
            memory.compute(self._shop.blocks.first(blocks, job.have_tokens), have)
        targets = self._shop.blocks.rest(blocks, job.have_tokens)
        job.blocks, job.targets = blocks, targets
        if wanted.step:
            self._shop.queue(wanted.step, targets, lambda rank, _: self._shop.memories[rank].soil(targets))
        return Destination(tuple(enumerate(targets)), job.have_tokens)

    def _begun(self, job: ScriptJob, result: Result, *, given: bool) -> None:
        if isinstance(result, KVGrpcError):
            self._shop.release(job.blocks)
            self._say(job.name, f"refused with {result.reason.value}")
            return
        assert isinstance(result, PullStarted | BlocksReserved)
        assert result.transfer is not None
        if result.transfer.id in self._asked:  # the answer to an earlier call under the same key
            self._shop.release(job.blocks)
            self._say(job.name, "was asked for already")
            return
        job.transfer_id = result.transfer.id
        self._asked.add(job.transfer_id)
        self._live[job.transfer_id] = self._jobs[job.name] = job
        if given:
            self._hand_in(job)

    def _hand_in(self, job: ScriptJob) -> None:
        if job.targets is not None:
            for memory in self._shop.memories:
                memory.give(job.targets, job.transfer_id)
        self._say(job.name, f"into {self._shop.show(job.targets)}")


def listed(text: str) -> Blocks:
    """Returns block ids of the first group from their list in a script."""
    return (np.array([int(id_) for id_ in text.split(",")], dtype=np.int64),)


def _offered(token: bytes, prompt: Prompt) -> int:
    """Returns the number of tokens that a grant offers."""
    try:
        return grants.read_claims(token).token_count
    except KVGrpcError:
        return len(prompt.tokens)
