"""Mirrors of devices without CUDA, which use the block copies of vLLM's platform."""

import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from kvgrpc.core.values.layout import Group, GroupKind, PoolLayout, Region
from kvgrpc.errors import InternalError
from kvgrpc.integrations.vllm.block_copies import BlockCopies
from kvgrpc.integrations.vllm.options import BlockOptions
from kvgrpc.integrations.vllm.worker_side import WorkerSide
from tests.vllm.cores import BLOCK_TOKENS, LAYERS, Core, pool_of, request_of
from tests.vllm.engines import PREFILL, pushed, wait_until

KEY = b"k" * 16


class Platform:
    """The platform's copies of blocks. The device's memory is a tensor that nothing else touches."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, list[int]]] = []
        """Direction, number of tensors, and blocks of each copy."""
        self.errors: list[Exception] = []
        self._lock = threading.Lock()

    def copy(
        self, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], here: list[int], there: list[int],
        way: Any,
    ) -> None:  # fmt: skip
        with self._lock:
            if self.errors:
                raise self.errors.pop()
            assert source.keys() == target.keys()
            for name in source:
                target[name][torch.tensor(there)] = source[name][torch.tensor(here)]
            self.calls.append((way, len(source), here))


def runs(*rows: tuple[int, int]) -> tuple[Any, Any]:
    """Returns offsets and lengths."""
    offsets, nbytes = np.array(rows, dtype=np.int64).T
    return offsets, nbytes


def device_of(layout: PoolLayout) -> tuple[BlockCopies, Platform, torch.Tensor, Any]:
    """Returns a device with 1, 2, 3 … in its memory, and its empty mirror."""
    memory = torch.arange(layout.total_bytes, dtype=torch.int64).remainder(251).to(torch.uint8) + 1
    made, platform, mirror = BlockCopies(layout, memory), Platform(), np.zeros(layout.total_bytes, dtype=np.uint8)
    made.copy = platform.copy
    made.open(mirror)
    return made, platform, memory, mirror


GROUP = Group("full", GroupKind.FULL_ATTENTION, 2, 4, 8, 1, 4, "uint8")
BY_LAYER = PoolLayout((GROUP,), tuple(Region(0, layer, 1, layer * 256, 32, 32) for layer in range(2)), 512)
BY_BLOCK = PoolLayout((GROUP,), tuple(Region(0, layer, 1, layer * 32, 64, 32) for layer in range(2)), 512)
PADDED = PoolLayout((GROUP,), tuple(Region(0, layer, 1, layer * 320, 40, 32) for layer in range(2)), 640)


@pytest.mark.parametrize("layout", [BY_LAYER, BY_BLOCK, PADDED], ids=["by layer", "by block", "padded"])
def test_the_blocks_of_the_bytes_are_copied_and_none_beside_them(layout: PoolLayout) -> None:
    device, _, memory, mirror = device_of(layout)
    first, second = layout.regions
    asked = [(region.offset + block * region.stride_bytes, 32) for block in (2, 3, 7) for region in (first, second)]
    device.to_host(*runs(*sorted(asked))).synchronize()
    expected = np.zeros_like(mirror)
    for at, count in asked:
        expected[at : at + count] = memory[at : at + count]
    assert np.array_equal(mirror, expected)


def test_layers_of_which_the_same_blocks_are_copied_go_in_one_call() -> None:
    device, platform, *_ = device_of(BY_LAYER)
    device.to_host(*runs((64, 64), (320, 64))).synchronize()
    device.to_host(*runs((64, 32), (320, 64))).synchronize()
    assert platform.calls == [("d2h", 2, [2, 3]), ("d2h", 1, [2]), ("d2h", 1, [2, 3])]


def test_a_part_of_a_block_goes_as_the_whole_of_it_and_back() -> None:
    device, platform, memory, mirror = device_of(BY_LAYER)
    device.to_host(*runs((70, 4))).synchronize()
    assert np.array_equal(mirror[64:96], memory[64:96])
    assert np.count_nonzero(mirror) == 32
    mirror[64:96] = 99
    before = memory.clone()
    device.to_device(*runs((95, 1))).synchronize()
    assert (memory[64:96] == 99).all()
    before[64:96] = 99
    assert torch.equal(memory, before)
    assert [way for way, *_ in platform.calls] == ["d2h", "h2d"]
    device.close()
    device.close()


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_such_a_device_computes_comes_to_another(mode: str) -> None:
    platform, devices = Platform(), []

    def made(memory: torch.Tensor) -> BlockCopies:
        devices.append(BlockCopies(pool_of(states=False)[0], memory))
        devices[-1].copy = platform.copy
        return devices[-1]

    with closing(Core("P", devices=made)) as p, closing(Core("D", devices=made)) as d:
        if mode == "pull":
            target = d.begin(request_of("d", p.prefilled("p")))
        else:
            request = request_of("p", {**PREFILL, **pushed(KEY)})
            p.tables["p"] = p.computing(request)
            target = d.begin(request_of("d", {"do_remote_prefill": True, **pushed(KEY, p.side.engine.address)}))
            d.step()
            p.step({"p": 40})
            p.left(request, p.tables["p"])
        wait_until(lambda: p.step() and d.step() and d.told.loaded == {"d"})
        assert not d.told.failed
        assert all(torch.all(layer[target] == 7 + number) for number, layer in enumerate(d.memory.values()))
        assert {way for way, *_ in platform.calls} == {"d2h", "h2d"}


def test_a_platform_that_cannot_copy_fails_its_transfer_and_no_engine() -> None:
    platform = Platform()

    def made(memory: torch.Tensor) -> BlockCopies:
        device = BlockCopies(pool_of(states=False)[0], memory)
        device.copy = platform.copy
        return device

    p = Core("P", devices=made)
    with closing(Core("D")) as d:
        platform.errors = [RuntimeError("the device is gone")]
        d.begin(request_of("d", p.prefilled("p")))
        wait_until(lambda: p.step() and d.step() and d.told.failed == {"d"})
    with pytest.raises(InternalError, match="may still use its memory"):  # nothing proves that it copies no more
        p.close()


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on a device which does not exist here."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xpu")


def test_vllm_says_how_to_copy_once_the_caches_are_registered() -> None:
    layout, memory = pool_of(states=False)
    caches, platform = {str(layer): memory[layer] for layer in range(LAYERS)}, Platform()
    options = BlockOptions(mirror=True)
    with closing(WorkerSide(options, layout, devices=lambda of: BlockCopies(layout, of))) as worker:
        worker.register(caches, [list(caches)])
        worker.copy_by(platform.copy)
        assert isinstance(worker._device, BlockCopies)
        assert worker._device.copy == platform.copy
    with closing(WorkerSide(BlockOptions(), layout)) as worker:
        worker.register(caches, [list(caches)])
        worker.copy_by(platform.copy)  # nothing to copy


def test_memory_of_any_device_but_a_cuda_one_is_copied_by_its_platform() -> None:
    from kvgrpc.integrations.vllm.device import device_of as of

    layout, memory = pool_of(states=False)
    raw = memory.view(torch.uint8).flatten()
    assert raw.nbytes == LAYERS * 16 * 2 * BLOCK_TOKENS * 8 * 2
    assert isinstance(of(layout, raw.as_subclass(Elsewhere)), BlockCopies)
    with pytest.raises(ValueError, match=r"mirrors of caches on devices; this one is in memory of the host\. To do: "):
        of(layout, raw)
