"""The connector in a worker of vLLM: its rank, and the steps that it reports."""

import json
import logging
import tempfile
import threading
from pathlib import Path

import torch

from kvgrpc.core.layout import PoolLayout
from kvgrpc.engine import LeadDied, Rank, RankTicket
from kvgrpc.integrations.vllm.meeting import ATTACHED, TICKET, Step, wait_for
from kvgrpc.integrations.vllm.options import Options

_log = logging.getLogger(__name__)


class WorkerSide:
    """One worker's: its rank attaches when it has a ticket."""

    def __init__(self, options: Options, layout: PoolLayout) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="kvgrpc-vllm-")
        self.folder = Path(self._home.name)
        self._options = options
        self._layout = layout
        self._rank: Rank | None = None
        self._over = False
        self._on_device = False
        self._number: dict[str, int] = {}
        """Of each layer, by its name."""

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Raises ValueError for tensors that are not what the pool says."""
        group = self._layout.groups[0]
        nbytes = self._layout.total_bytes // group.layers
        for name, tensor in caches.items():
            if tensor.shape[0] != group.blocks or not tensor.is_contiguous() or tensor.nbytes != nbytes:
                raise ValueError(
                    f"KVGrpcConnector takes one run of {nbytes} bytes with {group.blocks} blocks for each layer; "
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}"
                )
        self._number = {name: number for number, name in enumerate(caches)}
        tensors = list(caches.values())
        self._on_device = tensors[0].device.type != "cpu"
        threading.Thread(target=self._attach, args=(tensors,), name="kvgrpc-attach", daemon=True).start()

    def _attach(self, tensors: list[torch.Tensor]) -> None:
        try:
            wait_for(self.folder / TICKET)
            row = json.loads((self.folder / TICKET).read_text())
            (self.folder / TICKET).unlink()  # it has a secret, and is for one
            ticket = RankTicket(**{**row, "secret": bytes.fromhex(row["secret"])})
            paths = self._options.data_paths
            self._rank = Rank(ticket, 0, tensors, data_paths=paths, copy_threads=self._options.copy_threads)
            (self.folder / ATTACHED).touch()
        except Exception:  # noqa: BLE001 - logged: the scheduler waits for it in vain, and says so
            _log.exception("kvgrpc: the worker could not attach")

    def layer_done(self, layer: str, step: Step) -> None:
        if step.report and self._options.layers_per_part and not self._on_device:
            self._report(step, layer)

    def step_done(self, step: Step) -> None:
        if not step.report:
            return
        if self._on_device:
            torch.cuda.current_stream().synchronize()
        self._report(step)

    def _report(self, step: Step, layer: str = "") -> None:
        """Never raises: vLLM ends an engine whose worker does. Where nobody listens any more, the scheduler knows."""
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
        if self._rank is not None:
            self._rank.close()
        self._home.cleanup()
