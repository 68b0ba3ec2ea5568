"""Servers whose pool is a staging store, driven like by any engine: over gRPC, with bytes in the shared memory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvgrpc.v1 import common_pb2, pool_pb2, tensor_pb2
from tests.service.engines import Engine
from tests.service.values import dur, ids_of

PAGE = 4096
PAGES = 64
TENSORS = f"[tensors]\nstore_bytes = {PAGES * PAGE}\npage_bytes = {PAGE}\n"
ARRIVING, STORED, SPILLED, HELD, OFFERED = (
    tensor_pb2.TENSOR_STATE_ARRIVING, tensor_pb2.TENSOR_STATE_STORED, tensor_pb2.TENSOR_STATE_SPILLED,
    tensor_pb2.TENSOR_STATE_HELD, tensor_pb2.TENSOR_STATE_OFFERED,
)  # fmt: skip


def name_of(key: bytes, name: str = "a", part: int = 0) -> tensor_pb2.TensorName:
    return tensor_pb2.TensorName(transfer_key=key, name=name, part=part)


def described(nbytes: int, **fields: Any) -> tensor_pb2.TensorDescription:
    usual: dict[str, Any] = {"dtype": "uint8", "shape_sizes": [nbytes], "nbytes": nbytes}
    return tensor_pb2.TensorDescription(**(usual | fields))


def data_of(nbytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


class Store(Engine):
    """A server with a store."""

    def place(self, data: bytes) -> str:
        """Puts bytes into pages of a new allocation. Returns its id."""
        pages = -(-len(data) // PAGE)
        counts = [pool_pb2.GroupBlockCount(group=0, block_count=pages)]
        blocks = self.api.pool.AllocateBlocks(pool_pb2.AllocateBlocksRequest(group_block_counts=counts)).blocks
        for i, page in enumerate(ids_of(blocks)):
            self._page(page, data[i * PAGE : (i + 1) * PAGE])
        return blocks.allocation_id

    def request(
        self, key: bytes, data: bytes, to: Sequence["Store"] = (), name: str = "a", **fields: Any
    ) -> tensor_pb2.PutTensorRequest:
        """Returns a PutTensor for the source. The bytes lie in its store."""
        usual: dict[str, Any] = {
            "tensor": name_of(key, name),
            "description": described(len(data)),
            "consumers": [common_pb2.PeerAddress(address=store.address) for store in to],
            "timeout": dur(20.0),
        }
        if "allocation_id" not in fields and "grant" not in fields:
            usual["allocation_id"] = self.place(data)
        return tensor_pb2.PutTensorRequest(**(usual | fields))

    def put(self, key: bytes, data: bytes, to: Sequence["Store"] = (), name: str = "a", **fields: Any) -> Any:
        return self.api.tensors.PutTensor(self.request(key, data, to, name, **fields))

    def wanted(self, key: bytes, name: str = "a", source: "Store | None" = None, **fields: Any) -> Any:
        """Returns a GetTensor request."""
        usual: dict[str, Any] = {"tensor": name_of(key, name), "timeout": dur(20.0)}
        if source is not None:
            usual["source"] = common_pb2.PeerAddress(address=source.address)
        return tensor_pb2.GetTensorRequest(**(usual | fields))

    def get_tensor(self, key: bytes, name: str = "a", source: "Store | None" = None, **fields: Any) -> bytes:
        """Gets a tensor and returns its bytes. The tensor is held from then on."""
        return self.bytes_of(self.api.tensors.GetTensor(self.wanted(key, name, source, **fields)))

    def bytes_of(self, answer: tensor_pb2.GetTensorResponse) -> bytes:
        read = self.api.pool.ReadBlocks(pool_pb2.ReadBlocksRequest(blocks=answer.pages)).blocks
        return b"".join(row.data for row in read)[: answer.tensor.description.nbytes]

    def release_tensors(self, key: bytes, *names: str) -> int:
        request = tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=[name_of(key, name) for name in names])
        return self.api.tensors.ReleaseTensors(request).released_count

    def give_back(self, key: bytes, source: str, *names: str) -> int:
        """Releases tensors here, and at an address that keeps them. Returns the number released there."""
        named, place = [name_of(key, name) for name in names], common_pb2.PeerAddress(address=source)
        request = tensor_pb2.ReleaseTensorsRequest(transfer_key=key, names=named, source=place)
        return self.api.tensors.ReleaseTensors(request).source_released_count

    def listed(self, **fields: Any) -> dict[str, int]:
        """Returns the state of each tensor by its name."""
        rows = self.api.tensors.ListTensors(tensor_pb2.ListTensorsRequest(**fields)).tensors
        return {row.name: int(row.state) for row in rows}

    def status(self) -> tensor_pb2.GetStagingStatusResponse:
        return self.api.tensors.GetStagingStatus(tensor_pb2.GetStagingStatusRequest())

    def used(self) -> int:
        """Returns the number of pages that are given out or pinned."""
        return self.status().used_page_count

    def _page(self, page: int, data: bytes) -> None:
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        pool = next(line for line in maps.splitlines() if "memfd:kvgrpc-pool" in line and " rw-s " in line)
        fd = os.open(f"/proc/{self.process.pid}/mem", os.O_RDWR)
        try:
            os.pwrite(fd, data, int(pool.partition("-")[0], 16) + page * PAGE)
        finally:
            os.close(fd)
