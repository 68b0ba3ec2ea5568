"""Managers of prefill and decode in a test's own process: real leads and transfers, without SGLang's servers."""

import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.sglang.servers import ON_CPU, STAND_IN, free_port

if TYPE_CHECKING:
    from kvgrpc.integrations.sglang.receiver import KVReceiver
    from kvgrpc.integrations.sglang.sender import KVSender

PAGES, PAGE_TOKENS, LAYERS = 64, 16, 4
PAGE_BYTES = PAGE_TOKENS * 2 * 32 * 2
"""Bytes of a page of keys in one layer, of the model that `write_model` writes."""
ROWS, ROW_BYTES = 8, 256
SOON_S = 120.0
FAILED, INPUT, SUCCESS = 0, 2, 4
"""Values of SGLang's KVPoll."""


class Side:
    """One engine: a manager, and the memory that SGLang would have."""

    def __init__(self, mode: str, model: Path) -> None:
        os.environ.update(ON_CPU)
        sys.path.append(str(STAND_IN))
        from sglang.srt.disaggregation.base import KVArgs
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.runtime_context import create_context, use_context
        from sglang.srt.server_args import ServerArgs

        from kvgrpc.integrations.sglang.manager import KVManager

        self.kv = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(2 * LAYERS)]
        self.aux = [np.zeros((ROWS, ROW_BYTES), np.uint8) for _ in range(2)]
        memory: Any = KVArgs()
        for name, arrays in (("kv", self.kv), ("aux", self.aux)):
            setattr(memory, f"{name}_data_ptrs", [of.ctypes.data for of in arrays])
            setattr(memory, f"{name}_data_lens", [of.nbytes for of in arrays])
            setattr(memory, f"{name}_item_lens", [of[0].nbytes for of in arrays])
        memory.state_types = memory.state_data_ptrs = memory.state_data_lens = memory.state_item_lens = []
        memory.kv_cache_dtype_str, memory.page_size = "auto", PAGE_TOKENS
        settings = ServerArgs(
            model_path=str(model), device="cpu", dtype="bfloat16", page_size=PAGE_TOKENS, host="127.0.0.1",
            disaggregation_mode=mode, disaggregation_transfer_backend="kvgrpc",
            disaggregation_bootstrap_port=free_port(),
            skip_tokenizer_init=True, attention_backend="torch_native", sampling_backend="pytorch",
            disable_cuda_graph=True, disable_overlap_schedule=True, mem_fraction_static=0.2,
        )  # fmt: skip
        context = create_context(settings, role="scheduler")
        with use_context(context):
            context.parallel.override_permanently(tp_rank=0, attn_tp_rank=0)
            self.manager = KVManager(memory, DisaggregationMode(mode), settings)
        assert self.manager.engine is not None, "the only rank is the first one"
        self.engine: Final = self.manager.engine

    def close(self) -> None:
        self.manager._rank.close()  # a scheduler's ends with its process
        self.engine.close()


@contextmanager
def side(mode: str, model: Path) -> Iterator[Side]:
    made = Side(mode, model)
    try:
        yield made
    finally:
        made.close()


def request(tokens: int, room: int) -> Any:
    """Returns SGLang's request of a prompt."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(f"r{room}", "", array("q", range(3, 3 + tokens)), SamplingParams(), bootstrap_room=room)


def sends(prefill: Side, req: Any, pages: Sequence[int], row: int = 0) -> "KVSender":
    """Returns a sender that waits for decode's registration, as SGLang makes one."""
    from kvgrpc.integrations.sglang.sender import KVSender

    sender = KVSender(prefill.manager, "", req.bootstrap_room)
    sender.begin(req)
    sender.init(len(pages), row)
    return sender


def receives(decode: Side, prefill: Side, req: Any, pages: Sequence[int], row: int = 0) -> "KVReceiver":
    """Returns a receiver with its pages reserved, as SGLang makes one."""
    from kvgrpc.integrations.sglang.receiver import KVReceiver

    receiver = KVReceiver(decode.manager, prefill.engine.address, req.bootstrap_room)
    receiver.req = req
    receiver.init(0)
    receiver.send_metadata(numbers(pages), row)
    return receiver


def numbers(pages: Sequence[int]) -> NDArray[np.int32]:
    return np.array(pages, np.int32)


def registered(sender: "KVSender", receiver: "KVReceiver") -> None:
    """Polls both until decode has registered at prefill."""
    polled_until(lambda: (receiver.poll(), sender.poll())[1] == INPUT, lambda: (sender._failure, receiver._failure))


def replaced(of: Side, life: int) -> None:
    """Idles, as a scheduler without requests does, until the engine has another lead than in the life `life`."""

    def another() -> bool:
        of.manager.wait()
        return of.engine.incarnation != life

    polled_until(another, lambda: "no other lead serves")


def polled_until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Polls, as a scheduler does at every step, until the condition holds."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"did not come: {what()}"
