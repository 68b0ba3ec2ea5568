"""Prefill's side of one request: a push, which hands over the chunks of the prompt."""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

from sglang.srt.disaggregation.base import BaseKVSender, KVPoll
from sglang.srt.disaggregation.base.conn import KVTransferMetric
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.environ import envs

from kvgrpc.core.values.ids import request_label
from kvgrpc.engine import BlocksReturned, Event, Failed
from kvgrpc.engine.scheduler import TAKEN_BACK_S
from kvgrpc.errors import KVGrpcError, Reason
from kvgrpc.integrations.sglang.manager import KVManager

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.managers.schedule_batch import Req

    from kvgrpc.engine import Content, Push

_log = logging.getLogger(__name__)


class KVSender(BaseKVSender):
    """One request of prefill. SGLang polls it, and releases its pages once a poll says Success or Failed."""

    def __init__(
        self, mgr: KVManager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self._key = mgr.key_of(bootstrap_room)
        self._content: Content | None = None
        self._request_id = ""
        self._push: Push | None = None
        """The push, from the first word to the lead on: block ids are of the life in which it is made."""
        self._registered = False
        self._pages = self._sent_pages = 0
        self._row: int | None = None
        self._bytes: int | None = None
        self._failure = ""
        self._over = self._taken_back = False
        """True if the lead has returned the pages; or if nobody vouches for them any more, though they may be read."""
        self._due = time.monotonic() + envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get()

    def begin(self, req: "Req") -> None:
        """Waits for decode's registration from now on."""
        if self.kv_mgr.engine is None:
            return
        self._request_id = request_label(str(req.rid))
        try:
            self._content = self.kv_mgr.content_of(req, self.bootstrap_room, 0)
        except KVGrpcError as error:
            self._fail(error)
        else:
            self.kv_mgr.expect(self._key, self)

    def wanted(self) -> None:
        """Hears that decode has registered: its pages are reserved, and it waits for parts."""
        self._registered = True
        self._say(lambda push: push.expect())

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._pages, self._row = num_kv_indices, aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: "NDArray[np.int32]", state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """Hands a chunk over: pages, and with the last one aux and states."""
        step = self.kv_mgr.next_step()
        if self._failure:
            return
        sent = self._sent_pages + len(kv_indices)
        last = sent >= self._pages
        blocks = self.kv_mgr.blocks_of(kv_indices, self._row if last else None, state_indices)
        self._say(lambda push: push.finished(blocks, last=last, after_step=step))
        if not self._failure:
            self._sent_pages = sent

    def poll(self) -> Any:
        """Returns how far the request is, by KVPoll. The first rank's word counts: the least of all ranks'."""
        if self.kv_mgr.engine is None:
            return KVPoll.Success
        self.kv_mgr.hear()
        if not (self._registered or self._failure) and time.monotonic() > self._due:
            self.abort("decode did not come")
        if self._failure:
            own = self._over or self._taken_back or not self._sent_pages
            return KVPoll.Failed if own else KVPoll.Transferring
        if self._sent_pages:
            return KVPoll.Success if self._over else KVPoll.Transferring
        return KVPoll.WaitingForInput if self._registered else KVPoll.Bootstrapping

    def hear(self, event: Event) -> None:
        match event:
            case Failed(_, reason, message):
                self._failure = self._failure or f"{reason}: {message}"
                self._take_back()
                if not event.transfer.transfer_id and reason is not Reason.ENGINE_LOST:
                    self.kv_mgr.gives_nothing(self._key, self._failure)
            case BlocksReturned(_, telemetries):
                self._over = True
                self._bytes = sum(found.nbytes for found in telemetries) or None

    def abort(self, why: str = "the request was aborted at prefill") -> None:
        """Ends the request. On return nobody vouches for its pages: SGLang may release them at once."""
        if self._over or self._failure:
            return
        self._failure = why
        self.kv_mgr.expect_no_more(self._key)
        self._take_back()
        self._say(lambda push: push.fail(why))
        deadline = time.monotonic() + TAKEN_BACK_S
        while not (self._taken_back or self._over) and (left_s := deadline - time.monotonic()) > 0:
            self.kv_mgr.hear(left_s)

    def _take_back(self) -> None:
        self._taken_back = self._push is None or self._push.start_over()

    def failure_exception(self) -> Never:
        raise KVTransferError(self.bootstrap_room, self._failure, is_from_another_rank=self.kv_mgr.engine is None)

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric(transfer_total_bytes=self._bytes)

    def clear(self) -> None:
        self.kv_mgr.expect_no_more(self._key)

    def _say(self, say: Any) -> None:
        """Calls `say` with the push, once begun; a lead that cannot be asked is a failure of this request."""
        engine = self.kv_mgr.engine
        if engine is None or self._content is None:
            return
        try:
            if self._push is None:
                self._push = engine.push(self._content, transfer_key=self._key, request_id=self._request_id)
            say(self._push)
        except KVGrpcError as error:
            self._fail(error)
        else:
            self.kv_mgr.own(self._push, self)

    def _fail(self, error: KVGrpcError) -> None:
        self._failure = self._failure or str(error)
        _log.warning("kvgrpc: room %d: %s", self.bootstrap_room, error)
