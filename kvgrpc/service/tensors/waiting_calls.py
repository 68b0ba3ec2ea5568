"""Calls that wait for tensors, and their answers."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from kvgrpc.core.tensors.descriptions import ANY, ExpectedTensor, TensorId
from kvgrpc.core.tensors.rows import Purpose, Tensor, TensorOffer, TensorWait
from kvgrpc.core.values.owners import ANONYMOUS
from kvgrpc.errors import KVGrpcError
from kvgrpc.service.callers import payer
from kvgrpc.service.runner import copied
from kvgrpc.service.tensors.life import Life, gone

Result = Tensor | TensorOffer


class WaitingCalls:
    """The waiting calls of one life. `left` is called when one waits no more."""

    def __init__(self, life: Life, left: Callable[[], None]) -> None:
        self._life = life
        self._left = left
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Result | KVGrpcError]] = {}

    def begin(  # noqa: PLR0913 - by name, each with a default
        self, id_: TensorId, purpose: Purpose, until: float, expected: ExpectedTensor = ANY, *, fetches: bool = False,
        caller: str = ANONYMOUS, tenant: str = "",
    ) -> int:  # fmt: skip
        """Adds a waiting call and returns its number. Raises a refusal; nothing is left of the call then."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            try:
                wait = TensorWait(number, id_, purpose, until, expected, fetches, caller, payer(), tenant)
                self._life.table.ask(wait, self._life.time())
            finally:
                self._life.perform()
        except BaseException:
            self.leave(number)
            raise
        return number

    def begin_all(self, ids: Iterable[TensorId], purpose: Purpose, until: float, tenant: str) -> list[int]:
        """Adds a waiting call for each tensor. Raises a refusal of one; nothing is left of any then."""
        numbers: list[int] = []
        try:
            for id_ in ids:
                numbers.append(self.begin(id_, purpose, until, tenant=tenant))
        except BaseException:
            for number in numbers:
                self.leave(number)
            raise
        return numbers

    def leave(self, number: int) -> None:
        """Ends a call, if it still waits. A tensor given to it is not taken."""
        answer = self._answers.get(number)
        if answer is not None:
            self._forget(number)
            self._not_taken(answer)

    def answer(self, number: int, result: Result | KVGrpcError) -> None:
        future = self._answers.get(number)
        if future is not None and not future.done():
            future.set_result(result)

    async def end_of(self, number: int) -> Result:
        """Returns the call's result when it is there. Raises its refusal. A caller that leaves at the moment of its
        answer takes nothing.
        """
        answer = self._answers[number]
        try:
            result = await answer
        except asyncio.CancelledError:
            self._not_taken(answer)
            raise
        finally:
            self._forget(number)
        if self._life.over:
            raise gone(self._life.lead)
        if isinstance(result, KVGrpcError):
            raise copied(result)
        return result

    async def end_of_all(self, numbers: Sequence[int]) -> list[Tensor]:
        """Returns the tensors of several calls when all are stored. Raises the first refusal."""
        left, found = list(numbers), []
        try:
            while left:
                result = await self.end_of(left.pop(0))
                assert isinstance(result, Tensor), "what is stored is no offer"
                found.append(result)
        finally:
            for number in left:
                self._forget(number)
        return found

    def stop(self) -> None:
        """Refuses all calls: the life is over."""
        for future in self._answers.values():
            if not future.done():
                future.set_result(gone(self._life.lead))

    def _not_taken(self, answer: "asyncio.Future[Result | KVGrpcError]") -> None:
        if answer.done() and not answer.cancelled() and isinstance(given := answer.result(), Tensor):
            self._life.table.not_taken(given, self._life.time())
            self._life.perform()

    def _forget(self, number: int) -> None:
        self._life.table.waits.forget(number)
        del self._answers[number]
        if not self._life.over:
            self._left()
