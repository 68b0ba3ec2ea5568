"""The decisions of a scheduler about KV that is elsewhere: a connector's logic, without its transfers.

The scheduler of one engine calls a hook at each turn of a request's life:

    arrived             the tokens to compute; a pull begins here, so that its source holds the KV from now on
    match               the number of tokens that could come; changes nothing, and may be asked any number of times
    allocated           the blocks are there: the missing KV begins to come, or the source is let go
    wanted              a destination has registered for what a prefill gives: it is pushed from now on
    computed            a step was scheduled: a push may send finished parts, a staged engine saves its blocks
    preempted           a prefill begins anew, in other blocks
    finished, aborted   the request left; the answer says whether its blocks must be kept

It gets `Told` from `take_told`. `take_tasks` gives the `Task`s for transfers, each named after its request. The
transfers report with `received`, `failed` and `returned`, each end exactly once. So every allocation that waits for KV
ends in one LoadEnded, and everything that was kept ends in one SendEnded.

Hooks are idempotent, and may be late. A hook that contradicts earlier ones is refused and changes nothing.
"""

from kvgrpc.core.policy.request import Request, RequestStage, cut, prefills, usable, whole, with_layers, without_backoff
from kvgrpc.core.policy.values import (
    Admitted,
    Arrival,
    Begin,
    Cancel,
    Finished,
    Give,
    GiveUp,
    HandOverBlocks,
    HandOverPart,
    Lists,
    Load,
    LoadEnded,
    Loss,
    Match,
    ModeChoice,
    OnLoss,
    Outcome,
    RequestSide,
    Reserve,
    Rules,
    Save,
    SendEnded,
    Start,
    StartOver,
    Table,
    TakeLost,
    Task,
    Told,
)
from kvgrpc.errors import AlreadyExists, NextStep, Reason, full, invalid


def name_taken(request_id: str) -> AlreadyExists:
    """Returns the refusal of a request whose id another one has."""
    what = f"another request is called {request_id!r}, until it has left and its blocks are back"
    return AlreadyExists(Reason.TRANSFER_EXISTS, f"{what}: name this one otherwise")


class Policy:
    """The policy of one engine's scheduler."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._requests: dict[str, Request] = {}
        self._tasks: list[Task] = []
        self._told: list[Told] = []

    def __len__(self) -> int:
        """Returns the number of remembered requests: those that have not left, and those whose blocks are kept."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def pushes(self, request_id: str) -> bool:
        """Returns whether the request's KV goes by parts, as it is computed."""
        request = self._requests.get(request_id)
        return request is not None and request.pushes and request.gives

    def awaits(self, request_id: str) -> bool:
        """Returns whether a push to this request may still come, or go on."""
        request = self._requests.get(request_id)
        return request is not None and request.awaits_push

    def take_tasks(self) -> list[Task]:
        """Removes and returns the tasks for transfers, in order."""
        tasks, self._tasks = self._tasks, []
        return tasks

    def take_told(self) -> list[Told]:
        """Removes and returns the news for the scheduler."""
        told, self._told = self._told, []
        return told

    # ---- hooks of the scheduler

    def admits(self, arrival: Arrival) -> Admitted:
        """Returns, or raises, what `arrived` would now. Changes nothing."""
        known = self._requests.get(arrival.request_id)
        if known is None and len(self._requests) >= self.rules.requests_max:
            raise full(f"{len(self._requests)} requests are known", self.rules.requests_max)
        if known is not None and known.arrival != arrival:
            raise name_taken(arrival.request_id)
        prompt = arrival.prompt_tokens
        if prefills(arrival) and not arrival.needs_all_outputs:
            prompt = without_backoff(self.rules, prompt)
        return Admitted(prompt, prefills(arrival))

    def arrived(self, arrival: Arrival) -> Admitted:
        """Takes a new request. The scheduler calls this before it looks in the prefix cache.

        Raises AlreadyExists (TRANSFER_EXISTS) for another request of that id, Exhausted (LIMIT_EXCEEDED).
        """
        admitted = self.admits(arrival)
        if arrival.request_id not in self._requests:
            self._admit(arrival)
        return admitted

    def match(self, request_id: str, computed_tokens: int) -> Match:
        """Returns how many tokens beyond the computed ones can come from elsewhere."""
        request = self._requests.get(request_id)
        if request is None or request.take is not RequestStage.OPEN:
            return Match(0)
        if request.take_loss is not None and (request.taken_back or self.rules.on_loss is OnLoss.RECOMPUTE):
            return Match(0)
        missing = request.use_tokens - computed_tokens
        worth = self.rules.recompute_threshold_tokens if request.prefills else 1
        return Match(missing if missing >= worth else 0)

    def allocated(
        self, request_id: str, table: Table, computed_tokens: int, external_tokens: int, after_step: int = 0
    ) -> None:
        """Takes a request's blocks. `external_tokens`: the tokens that `match` returned, or 0 if none are to come.

        `after_step`: the last step that may still use the blocks' old content. Raises InvalidRequest for another number
        of tokens (INVALID_FIELD), or too few blocks for them (BLOCK_COUNT_MISMATCH).
        """
        request = self._requests.get(request_id)
        if request is None or request.take is not RequestStage.OPEN:
            return
        if external_tokens not in (0, self.match(request_id, computed_tokens).tokens):
            text = f"{external_tokens} tokens are not what can come beyond {computed_tokens}"
            raise invalid("external_tokens", text)
        if not external_tokens:
            self._let_go(request, after_step)
            return
        request.filled = cut(self.rules, table, computed_tokens, request.use_tokens)
        request.have_tokens = computed_tokens
        request.take = RequestStage.BUSY
        if request.take_loss is not None:
            self._load_ended(request)
        else:
            self._fill(request, after_step)

    def computed(self, request_id: str, table: Table, computed_tokens: int, step: int) -> None:
        """Takes a scheduled step: once `step` is done, `computed_tokens` tokens have KV. A prefill's push sends whole
        blocks, a staged engine saves new ones. A decode engine sends all at its end, when it is known what the KV is
        of.
        """
        request = self._requests.get(request_id)
        if request is None or request.over or not request.gives:
            return
        self._save(request, table, computed_tokens)
        if request.pushes and request.prefills:
            named = request.named_tokens(self.rules, computed_tokens)
            tokens = min(computed_tokens, named)
            blocks = cut(self.rules, table, 0, tokens, named)
            self._send(request, blocks, whole(self.rules, tokens, named), last=False, step=step)

    def wanted(self, request_id: str) -> bool:
        """Notes that a destination registered for a prefill's KV. Returns whether the KV goes by parts from now on."""
        request = self._requests.get(request_id)
        if request is None or request.over or request.give is not RequestStage.OPEN:
            return False
        request.awaited = True
        request.pushes = request.pushes or request.arrival.give == Give(ModeChoice.AUTO)
        return request.pushes

    def preempted(self, request_id: str) -> None:
        """Starts a request over: its blocks were taken, and it will be computed again in other blocks."""
        request = self._requests.get(request_id)
        if request is None or request.over:
            return
        request.saved_tokens = 0
        if any(request.sent) and request.give is RequestStage.BUSY:
            request.sent = [0] * len(self.rules.groups)
            self._tasks.append(StartOver(request_id))

    def given_tokens(self, request_id: str, computed_tokens: int, outcome: Outcome) -> int:
        """Returns how many tokens `finished` would hand over, so that the caller can name their content first."""
        request = self._requests.get(request_id)
        if request is None or request.over or outcome is not Outcome.COMPLETE:
            return 0
        return request.given_tokens(self.rules, computed_tokens)

    def finished(
        self, request_id: str, table: Table, computed_tokens: int, outcome: Outcome, step: int = 0
    ) -> Finished:
        """Ends a request that left. Its `computed_tokens` tokens have KV once `step` is done.

        Raises InvalidRequest (BLOCK_COUNT_MISMATCH) for a table that does not hold them.
        """
        request = self._requests.get(request_id)
        if request is None:
            return Finished(keep=False, handed_over=False)
        if request.over:
            return Finished(request.busy, request.give is RequestStage.BUSY)
        tokens = self.given_tokens(request_id, computed_tokens, outcome)
        blocks = cut(self.rules, table, 0, tokens, request.named_tokens(self.rules, tokens)) if tokens else ()
        self._end_take(request, step)
        if tokens:
            self._save(request, table, tokens)
            self._hand_over(request, blocks, tokens, step)
        else:
            done = outcome is Outcome.COMPLETE and computed_tokens
            self._give_up(request, "its state is of more tokens" if done else "its request did not finish")
        return self._left(request)

    def aborted(self, request_id: str, message: str = "aborted") -> Finished:
        """Ends a request that is not wanted any more, in any state."""
        request = self._requests.get(request_id)
        if request is None:
            return Finished(keep=False, handed_over=False)
        self._end_take(request, 0, message)
        if request.over and request.give is RequestStage.BUSY and request.give_loss is None:
            request.give_loss = Loss(Reason.CANCELLED, message, NextStep.RECOMPUTE)
            self._tasks.append(Cancel(request_id, RequestSide.GIVE, message))
        elif not request.over:
            self._give_up(request, message)
        return self._left(request)

    def loaded(self, request_id: str) -> None:
        """Ends the load of a staged engine, which has copied the received blocks."""
        request = self._requests.get(request_id)
        if request is not None and request.take is RequestStage.LOADING:
            self._load_ended(request)

    # ---- how transfers fare

    def received(self, request_id: str, tokens: int) -> None:
        """Takes a transfer's success: the blocks have the KV of the prompt's first `tokens` tokens. These are fewer
        than asked for if the source's tokens differ from there on.
        """
        request = self._requests.get(request_id)
        if request is None or request.take is not RequestStage.BUSY:
            return
        request.use_tokens = max(min(request.use_tokens, tokens), request.have_tokens)
        if self.rules.staged and not request.over:
            request.take = RequestStage.LOADING
            self._told.append(Load(request_id, request.filled))
        else:
            self._load_ended(request)

    def failed(self, request_id: str, side: RequestSide, loss: Loss) -> None:
        """Takes the failure of a transfer; its blocks return later."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if side is RequestSide.GIVE:
            request.give_loss = request.give_loss or loss
        elif request.take_loss is None and request.take in (RequestStage.OPEN, RequestStage.BUSY):
            request.take_loss = loss
            if request.take is RequestStage.OPEN:
                request.taken_back = loss.reason is Reason.LEASE_RECLAIMED
                on_loss = OnLoss.RECOMPUTE if request.taken_back else self.rules.on_loss
                self._told.append(TakeLost(request_id, loss, on_loss))

    def returned(self, request_id: str, side: RequestSide) -> None:
        """Takes the return of blocks: nothing of an ended transfer uses them any more."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if side is RequestSide.TAKE and request.take is RequestStage.BUSY:
            gone = Loss(Reason.CANCELLED, "the transfer ended without a word", NextStep.RECOMPUTE)
            request.take_loss = request.take_loss or gone
            self._load_ended(request)
        elif side is RequestSide.GIVE and request.give is RequestStage.BUSY:
            request.give = RequestStage.OVER
            if request.over:
                self._told.append(SendEnded(request_id, request.give_loss))
        self._forget(request)

    # ---- what comes

    def _admit(self, arrival: Arrival) -> None:
        request = self._requests[arrival.request_id] = Request(arrival, sent=[0] * len(self.rules.groups))
        if arrival.give is not None and arrival.prompt_tokens:
            request.give = RequestStage.OPEN
            request.pushes = arrival.give.mode is ModeChoice.PUSH
            request.awaited = arrival.give.mode is not ModeChoice.PULL
        if arrival.take is None:
            return
        request.take, request.use_tokens = RequestStage.OPEN, usable(self.rules, arrival)
        if not arrival.prompt_tokens:
            request.use_tokens = 0
            loss = Loss(Reason.CONTENT_REQUIRED, "a prompt without token ids takes no KV", NextStep.RECOMPUTE)
            request.take = RequestStage.OVER
            self._told.append(TakeLost(arrival.request_id, loss, self.rules.on_loss))
        elif not request.use_tokens:
            self._let_go(request, 0)
        elif arrival.take.mode is ModeChoice.PULL:
            self._tasks.append(Begin(arrival.request_id, request.use_tokens))

    def _let_go(self, request: Request, after_step: int) -> None:
        """Tells the source to free its blocks: none is missing here, or none can be used."""
        arrival = request.arrival
        assert arrival.take is not None
        request.take = RequestStage.OVER
        if request.take_loss is not None:
            return
        if arrival.take.mode is ModeChoice.PULL:
            if not request.use_tokens:  # it did not begin
                self._tasks.append(Begin(arrival.request_id, 0))
            self._tasks.append(Start(arrival.request_id, (), 0, after_step))
        else:
            held = request.use_tokens or arrival.take.offer_tokens
            self._tasks.append(Reserve(arrival.request_id, (), held, held, after_step))

    def _fill(self, request: Request, after_step: int) -> None:
        arrival = request.arrival
        assert arrival.take is not None
        if arrival.take.mode is ModeChoice.PULL:
            task: Task = Start(arrival.request_id, request.filled, request.have_tokens, after_step)
        else:
            have, use = request.have_tokens, request.use_tokens
            task = Reserve(arrival.request_id, request.filled, have, use, after_step)
        self._tasks.append(task)

    def _end_take(self, request: Request, step: int, message: str = "its request is over") -> None:
        """Ends a request's wait for KV; blocks that are being filled return when they are at rest."""
        arrival = request.arrival
        if arrival.take is None or request.take not in (RequestStage.OPEN, RequestStage.BUSY):
            return
        wanted = request.take_loss is None
        if wanted and (request.take is RequestStage.BUSY or arrival.take.mode is ModeChoice.PULL):
            self._tasks.append(Cancel(arrival.request_id, RequestSide.TAKE, message))
            request.take_loss = Loss(Reason.CANCELLED, message, NextStep.RECOMPUTE)
        elif wanted and not arrival.take.keep:
            self._let_go(request, step)
        if request.take is RequestStage.OPEN:
            request.take = RequestStage.OVER

    def _load_ended(self, request: Request) -> None:
        loss, blocks = request.take_loss, request.filled
        request.take, request.filled = RequestStage.OVER, ()
        tokens = request.use_tokens if loss is None else request.have_tokens
        id_ = request.arrival.request_id
        self._told.append(LoadEnded(id_, tokens, loss, blocks if loss else (), self.rules.on_loss))
        self._forget(request)

    # ---- what goes

    def _send(self, request: Request, all_blocks: Lists, whole: list[int], *, last: bool, step: int) -> None:
        """Hands over blocks that a push has not handed over yet, up to `whole` blocks of each group."""
        blocks = tuple(ids[sent:end] for ids, sent, end in zip(all_blocks, request.sent, whole, strict=True))
        if not any(blocks) and not last:
            return
        ranges = self.rules.layer_ranges if any(blocks) and self.rules.layer_ranges else (None,)
        for layers in ranges:
            ends = last and layers == ranges[-1]
            within = with_layers(self.rules, blocks, layers)
            if any(within) or ends:
                self._tasks.append(HandOverPart(request.arrival.request_id, within, layers, ends, step))
        request.sent = [max(sent, end) for sent, end in zip(request.sent, whole, strict=True)]
        request.give = RequestStage.BUSY

    def _save(self, request: Request, table: Table, computed_tokens: int) -> None:
        if self.rules.staged and computed_tokens > request.saved_tokens:
            blocks = cut(self.rules, table, request.saved_tokens, computed_tokens)
            request.saved_tokens = computed_tokens
            self._told.append(Save(request.arrival.request_id, blocks))

    def _hand_over(self, request: Request, blocks: Lists, tokens: int, step: int) -> None:
        if not request.pushes:
            self._tasks.append(HandOverBlocks(request.arrival.request_id, blocks, tokens, step))
            request.give = RequestStage.BUSY
        else:
            self._send(request, blocks, [len(ids) for ids in blocks], last=True, step=step)

    def _give_up(self, request: Request, message: str) -> None:
        """Tells a destination that waits for a push that none will come."""
        if not request.gives:
            return
        if request.awaited:
            self._tasks.append(GiveUp(request.arrival.request_id, message))
            request.give_loss = Loss(Reason.CANCELLED, message, NextStep.RECOMPUTE)
        if request.give is RequestStage.OPEN:
            request.give = RequestStage.OVER

    # ---- the end

    def _left(self, request: Request) -> Finished:
        request.over = True
        self._forget(request)
        return Finished(request.busy, request.give is RequestStage.BUSY and request.give_loss is None)

    def _forget(self, request: Request) -> None:
        if request.over and not request.busy:
            self._requests.pop(request.arrival.request_id, None)
