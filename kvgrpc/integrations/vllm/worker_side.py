"""The connector in a worker of vLLM: its rank, and the steps that it reports."""

import contextlib
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import torch
from torch.distributed import DistError

from kvgrpc.core.values.layout import PoolLayout
from kvgrpc.engine import Device, LeadDied, Rank, RankTicket
from kvgrpc.integrations.vllm.block_copies import BlockCopies, CopyBlocks
from kvgrpc.integrations.vllm.device import AfterDevice, MarkNow, device_of, marks_of
from kvgrpc.integrations.vllm.geometry import memory_of
from kvgrpc.integrations.vllm.identity import kernels_of
from kvgrpc.integrations.vllm.insides import told
from kvgrpc.integrations.vllm.meeting import ATTACHED, MEET_S, TICKET, BlockStep, WorkerGreeting
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.places import MeetingPlace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

_log = logging.getLogger(__name__)

Marks = Callable[[torch.device], MarkNow | None]
Devices = Callable[[torch.Tensor], Device]


class WorkerSide:
    """The side of one worker: its rank attaches when it has a ticket."""

    def __init__(
        self, options: BlockOptions, layout: PoolLayout, marks: Marks = marks_of, devices: Devices | None = None
    ) -> None:
        """`marks` and `devices`: for the memory that vLLM computes in; without `devices`, `device_of` chooses."""
        self._home = tempfile.TemporaryDirectory(prefix="kvgrpc-vllm-")
        self.folder = Path(self._home.name)
        self._options = options
        self._layout = layout
        self._rank: Rank | None = None
        self._over = False
        self._marks = marks
        self._devices = devices or partial(device_of, layout)
        self._after: AfterDevice | None = None
        self._memory = torch.empty(0)
        self._caches: Mapping[str, torch.Tensor] = {}
        self._device: Device | None = None
        """The Device that the mirror copies; None: there is no mirror."""
        self._names: Sequence[Sequence[str]] = ()
        self._number: dict[str, int] = {}
        """Number of each layer within its group, by name. Layers of earlier pipeline stages have the first numbers."""
        self._layers: dict[int, set[str]] = {}
        """The layers of each number, at most one of a group."""
        self._done: set[str] = set()
        """Layers that the step `_done_in` has computed."""
        self._done_in = 0

    def register(self, caches: Mapping[str, torch.Tensor], layers: Sequence[Sequence[str]]) -> None:
        """Takes the caches. `layers`: names of each group's layers. Raises ValueError for tensors that are not where
        the pool says, and for those that no mirror can be made of, if there is to be one.
        """
        self._memory = memory_of(self._layout, caches, layers)
        self._device = self._devices(self._memory) if self._options.mirror else None
        self._caches, self._names = caches, layers
        self._count([0] * len(layers))
        mark = self._marks(self._memory.device)
        self._after = AfterDevice(mark) if mark is not None else None

    def copy_by(self, copy: CopyBlocks) -> None:
        """Takes the function by which vLLM copies blocks between this device and the host. Called after `register`."""
        if isinstance(self._device, BlockCopies):
            self._device.copy = copy

    def greet(self, config: "VllmConfig", *, alone: bool) -> WorkerGreeting:
        """Returns what the scheduler's side is to know of this worker, which attaches then. `alone`: see
        `WorkerGreeting`.
        """
        parallel = config.parallel_config
        kernels = [kernels_of(config, list(names)) for names in self._names]
        layout = told(config, self._layout, self._caches, self._names)
        store = f"{parallel.master_addr}:{parallel.master_port}" if parallel.node_rank_within_dp else ""
        greeting = WorkerGreeting(str(self.folder), kernels, layout, gethostname(), alone, store)
        self.attach(greeting.place)
        return greeting

    def attach(self, place: MeetingPlace) -> None:
        """Takes the ticket when it comes, in a thread of its own. Call it when the scheduler is about to give the
        ticket: after `register` vLLM may compile for minutes.
        """
        threading.Thread(target=self._attach, args=(place,), name="kvgrpc-attach", daemon=True).start()

    def _attach(self, place: MeetingPlace) -> None:
        try:
            row = json.loads(place.hear(TICKET, MEET_S))
            place.remove(TICKET)  # it has a secret, and is for one worker
            rank, secret = row.pop("rank"), bytes.fromhex(row.pop("secret"))
            self._count(row.pop("first_layers"))
            self._rank = Rank(
                RankTicket(**row, secret=secret), rank, [] if self._device else [self._memory], device=self._device,
                data_paths=self._options.data_paths, copy_threads=self._options.copy_threads,
            )  # fmt: skip
            place.say(ATTACHED, "")
        except Exception as error:  # noqa: BLE001 - logged, and the scheduler says so
            _log.exception("kvgrpc: the worker could not attach")
            with contextlib.suppress(OSError, DistError):  # this side is closed, or the other one is gone
                place.say(ATTACHED, f"{type(error).__name__}: {error}")

    def _count(self, first_layers: Sequence[int]) -> None:
        """Numbers the layers of each group, from its first number here on."""
        for first, names in zip(first_layers, self._names, strict=True):
            self._number |= {name: first + number for number, name in enumerate(names)}
        self._layers = {}
        for name, number in self._number.items():
            self._layers.setdefault(number, set()).add(name)

    def begin(self, step: BlockStep) -> None:
        """Begins a step (`start_load_kv`). Loads run beside the steps, so nothing is done."""

    def layer_done(self, layer: str, step: BlockStep) -> None:
        """Notes that a layer is computed; a draft's layer comes more than once. A number is reported once its layers in
        all groups are computed.
        """
        if not (step.report and self._options.layers_per_part):
            return
        if self._done_in != step.number:
            self._done_in = step.number
            self._done.clear()
        self._done.add(layer)
        number = self._number[layer]
        if self._layers[number] <= self._done:
            self._say(step, number)

    def step_done(self, step: BlockStep) -> None:
        if step.report:
            self._say(step)

    def bad_blocks(self) -> set[int]:
        """Returns nothing: loads that failed are in the step."""
        return set()

    def heard(self) -> "KVConnectorWorkerMetadata | None":
        """Returns None: a rank reports to its lead."""
        return None

    def _say(self, step: BlockStep, layer: int | None = None) -> None:
        """Reports a step or a layer when its results are there: no hook waits for a device."""
        if self._after is None:
            self._report(step, layer)
        else:
            self._after.say(partial(self._report, step, layer))

    def _report(self, step: BlockStep, layer: int | None) -> None:
        """Makes a report. Never raises, which would end the engine: the scheduler knows when a session is over."""
        if self._rank is None or self._over:
            return
        try:
            if layer is None:
                self._rank.step_done(step.number)
            else:
                self._rank.layers_done(step.number, layer, 1)
        except LeadDied as error:
            _log.warning("kvgrpc is over in this worker: %s", error)
            self._over = True

    def close(self) -> None:
        if self._after is not None:
            self._after.close()
        if self._rank is not None:
            self._rank.close()
        self._home.cleanup()
