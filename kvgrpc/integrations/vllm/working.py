"""The connector in a worker of vLLM: its rank, and the steps that it reports."""

import json
import logging
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine import LeadDied, Rank, RankTicket
from kvgrpc.integrations.vllm.device import AfterDevice, MarkNow, marks_of
from kvgrpc.integrations.vllm.meeting import ATTACHED, TICKET, Step, wait_for
from kvgrpc.integrations.vllm.options import OTHER_MODEL, Options

_log = logging.getLogger(__name__)

Marks = Callable[[torch.device], MarkNow | None]


class WorkerSide:
    """One worker's: its rank attaches when it has a ticket."""

    def __init__(self, options: Options, layout: PoolLayout, marks: Marks = marks_of) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="kvgrpc-vllm-")
        self.folder = Path(self._home.name)
        self._options = options
        self._layout = layout
        self._rank: Rank | None = None
        self._over = False
        self._marks = marks
        self._after: AfterDevice | None = None
        self._tensors: list[torch.Tensor] = []
        self._number: dict[str, int] = {}
        """Of each layer, by its name."""

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError for tensors that are not what the pool says."""
        group = self._layout.groups[0]
        nbytes = self._layout.total_bytes // group.layers
        if len(caches) != group.layers:
            raise ValueError(
                f"KVGrpcConnector serves layers that have KV of their own; this model has {len(caches)} layers with "
                f"the KV of {group.layers}. To do: {OTHER_MODEL}"
            )
        for name, tensor in caches.items():
            # vLLM shows heads before tokens, in whatever order they are stored.
            stored = tensor.transpose(1, 2) if group.order == "token_major" and tensor.dim() > 2 else tensor
            if tensor.shape[0] != group.blocks or not stored.is_contiguous() or tensor.nbytes != nbytes:
                raise ValueError(
                    f"KVGrpcConnector takes one run of {nbytes} bytes with {group.blocks} {group.order} blocks for "
                    f"each layer; {name} is {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
                )
        self._number = {name: number for number, name in enumerate(caches)}
        self._tensors = list(caches.values())
        mark = self._marks(self._tensors[0].device)
        self._after = AfterDevice(mark) if mark is not None else None

    def attach(self) -> None:
        """Takes the ticket when it comes, in a thread of its own. To be called when the scheduler is about to give it:
        between this and `register` vLLM may compile for minutes.
        """
        threading.Thread(target=self._attach, name="kvgrpc-attach", daemon=True).start()

    def _attach(self) -> None:
        try:
            wait_for(self.folder / TICKET)
            row = json.loads((self.folder / TICKET).read_text())
            (self.folder / TICKET).unlink()  # it has a secret, and is for one
            rank, secret = row.pop("rank"), bytes.fromhex(row.pop("secret"))
            self._rank = Rank(
                RankTicket(**row, secret=secret), rank, self._tensors, data_paths=self._options.data_paths,
                copy_threads=self._options.copy_threads,
            )  # fmt: skip
            (self.folder / ATTACHED).touch()
        except Exception:  # noqa: BLE001 - logged: the scheduler waits for it in vain, and says so
            _log.exception("kvgrpc: the worker could not attach")

    def layer_done(self, layer: str, step: Step) -> None:
        if step.report and self._options.layers_per_part:
            self._say(step, layer)

    def step_done(self, step: Step) -> None:
        if step.report:
            self._say(step)

    def _say(self, step: Step, layer: str = "") -> None:
        """Reports it when it is there: no hook waits for a device."""
        if self._after is None:
            self._report(step, layer)
        else:
            self._after.say(partial(self._report, step, layer))

    def _report(self, step: Step, layer: str) -> None:
        """Never raises: vLLM ends an engine whose worker does. Where its session is over, the scheduler knows."""
        if self._rank is None or self._over:
            return
        try:
            if layer:
                self._rank.layers_done(step.number, self._number[layer], 1)
            else:
                self._rank.step_done(step.number)
        except LeadDied as error:
            _log.warning("kvgrpc is over in this worker: %s", error)
            self._over = True

    def close(self) -> None:
        if self._after is not None:
            self._after.close()
        if self._rank is not None:
            self._rank.close()
        self._home.cleanup()
