"""Steps whose work continues after their hooks, on a device that is done when its test says so."""

import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvgrpc.core.values.block_ids import Ids
from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region, TensorKind
from kvgrpc.integrations.vllm import modes
from kvgrpc.integrations.vllm.device import AfterDevice, marks_of
from kvgrpc.integrations.vllm.geometry import strides_of
from kvgrpc.integrations.vllm.meeting import BlockStep
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.worker_side import WorkerSide
from tests.vllm.cores import BLOCK_TOKENS, BLOCKS, LAYERS, PROMPT, Core, pool_of, request_of
from tests.vllm.engines import PREFILL, pushed, wait_until

KEY = b"k" * 16


class Place:
    """A mark in the device's queue of work."""

    def __init__(self) -> None:
        self._passed, self._error = threading.Event(), ""

    def synchronize(self) -> None:
        self._passed.wait()
        if self._error:
            raise RuntimeError(self._error)

    def passed(self, error: str = "") -> None:
        self._error = error
        self._passed.set()


class Queue:
    """The queue of a device that computes nothing before `works` is called."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.marked = 0

    def mark(self) -> Place:
        self.places.append(Place())
        self.marked += 1
        return self.places[-1]

    def works(self, error: str = "") -> None:
        """Computes up to the next mark."""
        self.places.pop(0).passed(error)


@pytest.fixture
def device() -> Queue:
    return Queue()


def test_what_a_device_computes_is_told_of_in_order_when_it_is_there(device: Queue) -> None:
    after, said = AfterDevice(device.mark), []
    for number in range(3):
        after.say(lambda n=number: said.append(n))  # type: ignore[misc]
    for number in range(3):
        assert said == list(range(number))
        device.works()
        wait_until(lambda n=number: len(said) == n + 1)  # type: ignore[misc]
    after.close()
    assert said == [0, 1, 2]


def test_of_a_device_that_failed_nothing_is_told_any_more(device: Queue, caplog: pytest.LogCaptureFixture) -> None:
    after, said = AfterDevice(device.mark), []
    for number in range(2):
        after.say(lambda n=number: said.append(n))  # type: ignore[misc]
    device.works("an illegal address")
    wait_until(lambda: "an illegal address" in caplog.text)
    device.works()
    after._thread.join()
    assert said == []


class Event:
    """A stand-in for events of XPUs."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = ""

    def record(self, stream: str) -> None:
        self.recorded = stream


def test_the_work_of_any_device_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Event=Event, current_stream=str)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    mark = marks_of(torch.device("xpu", 1))
    assert mark is not None
    marked: Any = mark()
    assert marked.recorded == "xpu:1"
    assert marks_of(torch.device("cpu")) is None


@pytest.mark.parametrize("layers_per_part", [0, 1], ids=["whole", "layers"])
def test_no_hook_waits_for_a_device_and_nothing_goes_uncomputed(device: Queue, layers_per_part: int) -> None:
    p = Core("P", layers_per_part=layers_per_part, marks=lambda _: device.mark)
    with closing(p), closing(Core("D")) as d:
        source = request_of("p", {**PREFILL, **pushed(KEY)})
        p.tables["p"] = blocks = p.computing(source)
        for layer in p.memory.values():
            layer[blocks] = 99  # the old content
        target = d.begin(request_of("d", {"do_remote_prefill": True, **pushed(KEY, p.side.engine.address)}))
        d.step()
        p.step({"p": len(PROMPT)})  # the hooks of the step return, and the request may leave
        assert device.marked == (LAYERS if layers_per_part else 0) + 1
        p.left(source, blocks)
        for number, layer in enumerate(p.memory.values()):
            layer[blocks] = 40 + number
            if layers_per_part:
                device.works()
        device.works()
        wait_until(lambda: p.step() and d.step() and d.told.loaded == {"d"})
        assert not d.told.failed
        assert all(torch.all(layer[target] == 40 + number) for number, layer in enumerate(d.memory.values()))
        while device.places:
            device.works()


class Cache:
    """A tensor that kvgrpc sees only by its copies. A copy is instant, but none runs before `may_copy` is set."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.nbytes = memory.nbytes
        self.may_copy = threading.Event()
        self.copied = 0
        self._memory = memory.view(torch.uint8).view(-1).numpy()

    def open(self, mirror: NDArray[np.uint8]) -> None:
        self._mirror = mirror

    def to_host(self, offsets: Ids, nbytes: Ids) -> "Copied":
        return Copied(self, self._mirror, self._memory, offsets, nbytes)

    def to_device(self, offsets: Ids, nbytes: Ids) -> "Copied":
        return Copied(self, self._memory, self._mirror, offsets, nbytes)

    def close(self) -> None:
        self._mirror = self._memory[:0]


class Copied:
    def __init__(self, cache: Cache, *copy: NDArray[Any]) -> None:
        self._cache, self._copy = cache, copy

    def synchronize(self) -> None:
        self._cache.may_copy.wait()
        into, of, offsets, nbytes = self._copy
        for at, count in zip(offsets.tolist(), nbytes.tolist(), strict=True):
            into[at : at + count] = of[at : at + count]
            self._cache.copied += count


def test_a_mirror_of_what_is_on_no_device_stops_the_start_of_the_worker() -> None:
    layout, memory = pool_of(states=False)
    caches = {str(layer): memory[layer] for layer in range(LAYERS)}
    with (
        closing(WorkerSide(BlockOptions(mirror=True), layout)) as worker,
        pytest.raises(
            ValueError, match=r"mirrors of caches on devices; this one is in memory of the host\. To do: .*mirror"
        ),
    ):
        worker.register(caches, [list(caches)])


class Unlockable(Cache):
    def open(self, mirror: NDArray[np.uint8]) -> None:
        raise MemoryError(f"{mirror.nbytes} bytes could not be page-locked")


def test_a_worker_that_cannot_attach_stops_the_start_of_its_scheduler_with_the_reason() -> None:
    what = r"worker 0 could not attach: MemoryError: \d+ bytes could not be page-locked"
    with pytest.raises(RuntimeError, match=what):
        Core("P", devices=Unlockable)


def test_a_worker_that_makes_a_mirror_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "MEET_S", 0.0)
    with pytest.raises(TimeoutError, match="within 0 s"):
        Core("P")
    with closing(Core("P", devices=Cache)) as p:
        assert p.worker.folder.exists()


@pytest.mark.parametrize("layers_per_part", [0, 1], ids=["whole", "layers"])
def test_what_a_cache_behind_a_mirror_holds_is_pushed_once_it_is_copied(device: Queue, layers_per_part: int) -> None:
    caches: list[Cache] = []

    def cache(memory: torch.Tensor) -> Cache:
        caches.append(Cache(memory))
        return caches[-1]

    p = Core("P", layers_per_part=layers_per_part, marks=lambda _: device.mark, devices=cache)
    with closing(p), closing(Core("D", devices=cache)) as d:
        mine, theirs = caches
        theirs.may_copy.set()
        source = request_of("p", {**PREFILL, **pushed(KEY)})
        p.tables["p"] = blocks = p.computing(source)
        target = d.begin(request_of("d", {"do_remote_prefill": True, **pushed(KEY, p.side.engine.address)}))
        d.step()
        p.step({"p": len(PROMPT)})
        p.left(source, blocks)
        for number, layer in enumerate(p.memory.values()):
            layer[blocks] = 40 + number
        while device.places:
            device.works()
        assert not (p.step() and d.step() and d.told.loaded)
        mine.may_copy.set()
        wait_until(lambda: p.step() and d.step() and d.told.loaded == {"d"})
        assert not d.told.failed
        assert all(torch.all(layer[target] == 40 + number) for number, layer in enumerate(d.memory.values()))
        assert mine.copied == theirs.copied == 3 * LAYERS * 2 * BLOCK_TOKENS * 8 * 2
        while device.places:
            device.works()


@pytest.mark.parametrize(
    ("first_layers", "numbers", "then"),
    [([0, 0], [0, 1, 0, 1], [0, 0, 0, 1, 2]), ([2, 1], [2, 3, 1, 2], [0, 0, 1, 2, 3])],
    ids=["the only stage", "a later stage"],
)
def test_a_layer_of_several_groups_is_told_of_when_the_last_group_here_has_computed_it(
    device: Queue, first_layers: list[int], numbers: list[int], then: list[int]
) -> None:
    """A draft's layer is computed more than once in a step; its first time counts. The numbers of layers begin after
    those of earlier pipeline stages, for each group.
    """
    names, block_bytes = [["w0", "w1"], ["f0", "f1"]], 2 * BLOCK_TOKENS * 8 * 2
    shape = (BLOCK_TOKENS, BLOCKS, 1, 8, "float16")
    window = Group("w", GroupKind.SLIDING_WINDOW, 2, *shape, window_tokens=32, space="kv")
    groups, strides = (window, Group("f", GroupKind.FULL_ATTENTION, 2, *shape, space="kv")), strides_of(window, 2)
    rows, sizes = [(group, layer) for group in range(2) for layer in range(2)], (block_bytes, block_bytes)
    regions = [Region(*row, 1, row[1] * BLOCKS * block_bytes, *sizes, strides=strides) for row in rows]
    memory = torch.zeros(2, BLOCKS, 1, BLOCK_TOKENS, 2 * 8, dtype=torch.float16)
    layout = PoolLayout(groups, tuple(regions), memory.nbytes)
    options = BlockOptions(layers_per_part=1)
    with closing(WorkerSide(options, layout, lambda _: device.mark)) as worker:
        worker.register({name: memory[layer] for of in names for layer, name in enumerate(of)}, names)
        worker._count(first_layers)  # as the worker's ticket says
        assert [worker._number[name] for of in names for name in of] == numbers
        for number in (1, 2):
            before, marked = device.marked, []
            for name in ("w0", "w0", "w1", "f0", "f1"):
                worker.layer_done(name, BlockStep(number))
                marked.append(device.marked - before)
            assert marked == then
        while device.places:
            device.works()


def test_layers_with_states_are_told_of_when_their_step_is_over(device: Queue) -> None:
    """vLLM reports no states before the end of the step."""
    names, block_bytes, state_bytes = [["s0"], ["f0", "f1"]], 2 * BLOCK_TOKENS * 8 * 2, 256
    states = Group("s", GroupKind.STATE, 1, 2048, BLOCKS, 1, 64, "float32", space="kv")
    groups = (states, Group("f", GroupKind.FULL_ATTENTION, 2, BLOCK_TOKENS, BLOCKS, 1, 8, "float16", space="kv"))
    strides, sizes = strides_of(groups[1], 2), (block_bytes, block_bytes)
    regions = [Region(1, layer, 1, layer * BLOCKS * block_bytes, *sizes, strides=strides) for layer in range(2)]
    regions.append(Region(0, 0, 1, 0, block_bytes, state_bytes, TensorKind.STATE))
    memory = torch.zeros(2, BLOCKS, 1, 1, block_bytes, dtype=torch.int8)
    attention = memory.view(torch.float16).view(2, BLOCKS, 1, BLOCK_TOKENS, 2 * 8)
    layout = PoolLayout(groups, tuple(regions), memory.nbytes)
    with closing(WorkerSide(BlockOptions(layers_per_part=1), layout, lambda _: device.mark)) as worker:
        worker.register({"s0": memory[0, ..., :state_bytes], "f0": attention[0], "f1": attention[1]}, names)
        worker.layer_done("f0", BlockStep(1))
        assert device.marked == 0
        worker.layer_done("f1", BlockStep(1))
        assert device.marked == 1, "no state is in a part of this layer"
        worker.step_done(BlockStep(1))
        assert device.marked == 2
        while device.places:
            device.works()


def test_a_step_of_which_nothing_is_told_marks_nothing(device: Queue) -> None:
    with closing(Core("P", overlap=False, marks=lambda _: device.mark)) as p:
        p.step()
        assert device.marked == 0
        p.tables["p"] = p.computing(request_of("p", {**PREFILL, **pushed(KEY)}))
        p.step({"p": len(PROMPT)})
        assert device.marked == 1
        device.works()
