"""Decode's side of one request: a reservation, which prefill's chunks fill."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

from sglang.srt.disaggregation.base import BaseKVReceiver, KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvgrpc.core.values.ids import request_label
from kvgrpc.engine import BlocksReturned, Event, Failed, Received
from kvgrpc.errors import KVGrpcError, Reason
from kvgrpc.integrations.sglang.manager import KVManager

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sglang.srt.disaggregation.base.conn import KVTransferDestination
    from sglang.srt.managers.schedule_batch import Req

    from kvgrpc.engine import Reservation

_log = logging.getLogger(__name__)


class KVReceiver(BaseKVReceiver):
    """One request of decode. SGLang polls it, and holds its pages after Failed until the manager says that they are at
    rest; if SGLang is set not to hold them, Failed is not said before.
    """

    def __init__(self, mgr: KVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        assert bootstrap_room is not None, "SGLang gives every request a room"
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self.req: Req | None = None
        self.conclude_state: Any = None
        self.abort_notified = False
        self.bootstrap_infos: list[object] = []
        """Rows by which SGLang counts the acknowledgements that it waits for; the manager needs none."""
        self._source = bootstrap_addr
        self._transfer: Reservation | None = None
        self._found = self._asked = False
        self._failure = ""
        self._received = self._at_rest = False

    def init(self, prefill_dp_rank: int) -> None:
        """Notes that prefill is known: its lead is asked once pages are there."""
        self._found = True

    def send_metadata(
        self, kv_indices: "NDArray[np.int32]", aux_index: int | None = None, state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None, destination: "KVTransferDestination | None" = None,
    ) -> None:  # fmt: skip
        """Reserves the pages at this engine, which its lead then registers at prefill's."""
        step = self.kv_mgr.next_step()
        self._asked = True
        engine, found = self.kv_mgr.engine, self.kv_mgr
        if engine is None or self._failure:
            return
        try:
            self._transfer = engine.reserve(
                found.blocks_of(kv_indices, aux_index, state_indices),
                found.content_of(self.req, self.bootstrap_room, len(kv_indices)),
                transfer_key=found.key_of(self.bootstrap_room), have_tokens=decode_prefix_len or 0,
                source_address=self._source, after_step=step,
                request_id=request_label(str(self.req.rid)) if self.req is not None else "",
            )  # fmt: skip
        except KVGrpcError as error:
            self._failure = str(error)
            return
        found.hold(self.bootstrap_room, self)
        found.own(self._transfer, self)

    def poll(self) -> Any:
        """Returns how far the request is, by KVPoll. The first rank's word counts: the least of all ranks'."""
        if self.kv_mgr.engine is None:
            return KVPoll.Success
        self.kv_mgr.hear()
        if self._failure:
            held = self._transfer is not None and not self._at_rest
            said = self.kv_mgr.enable_deferred_decode_kv_release or not held
            self.conclude_state = KVPoll.Failed if said else None
            return KVPoll.Failed if said else KVPoll.Transferring
        if self._received:
            return KVPoll.Success
        if self._asked:
            return KVPoll.Transferring
        return KVPoll.WaitingForInput if self._found else KVPoll.Bootstrapping

    def hear(self, event: Event) -> None:
        match event:
            case Received():
                self._received = self._at_rest = True
            case Failed(_, reason, message, cancelled=cancelled):
                self._failure = self._failure or f"{reason}: {message}"
                if reason not in (Reason.SOURCE_FAILED, Reason.ENGINE_LOST) and not cancelled:
                    self.kv_mgr.let_go(self._source, self.bootstrap_room, self._failure)
            case BlocksReturned():
                self._at_rest = True
        if self._at_rest:
            self.kv_mgr.at_rest(self.bootstrap_room, self)

    def abort(self, why: str = "the request was aborted at decode") -> None:
        """Ends the request. Its pages stay held until nothing can write to them any more."""
        if self._received:
            return
        if not self._failure:
            self._failure = why
            if self._transfer is None and self.req is not None:
                self.kv_mgr.takes_nothing(
                    self._source, self.bootstrap_room, self.kv_mgr.content_of(self.req, self.bootstrap_room, 0)
                )
        self.ensure_abort_notified()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Cancels the transfer, of which prefill hears, and makes SGLang hold the pages."""
        if self._transfer is None or self.abort_notified:
            return
        self.abort_notified = True
        self._transfer.cancel(self._failure)
        self.kv_mgr.flush()

    def is_abort_release_safe(self) -> bool:
        """Returns whether nothing can write to the pages any more: the lead has returned them."""
        self.kv_mgr.hear()
        return self._transfer is None or self._at_rest

    def failure_exception(self) -> Never:
        raise KVTransferError(self.bootstrap_room, self._failure, is_from_another_rank=self.kv_mgr.engine is None)
