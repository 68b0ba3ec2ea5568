"""TensorService: named tensors of a server whose pool is a staging store; see tensor.proto.

    tensors = client.tensors()
    await tensors.put(key, "layers.0.k", description, allocation_id=blocks.allocation_id, to=["10.0.0.2:50051"])
    found = await tensors.get(key, "layers.0.k", within_s=5.0)     # its pages, held until they are released
    await tensors.release(key)

Only descriptions travel here: the bytes are in the store, which an engine's own process maps. Calls may be repeated: a
name stands for one tensor.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from kvgrpc.client import options as opt
from kvgrpc.client.caller import Caller
from kvgrpc.client.values import duration
from kvgrpc.v1 import tensor_pb2 as pb
from kvgrpc.v1.common_pb2 import Grant, PeerAddress

if TYPE_CHECKING:
    from kvgrpc.v1.tensor_pb2_grpc import TensorServiceAsyncStub

MARGIN_S = 5.0
"""Extra time that a call gets beyond its own timeout, in seconds, so that the server can report the timeout."""


class Tensors:
    """The calls for named tensors at one server; `Client.tensors` makes it."""

    def __init__(self, caller: Caller, stub: "TensorServiceAsyncStub") -> None:
        self._call = caller
        self._stub = stub

    async def put(  # noqa: PLR0913 - by name, each with a default
        self,
        transfer_key: bytes,
        name: str,
        description: pb.TensorDescription,
        *,
        allocation_id: str = "",
        grant: Grant | None = None,
        to: Sequence[str] = (),
        part: int = 0,
        within_s: float = 60.0,
        **options: Unpack[opt.PutTensorOptions],
    ) -> pb.PutTensorResponse:
        """Puts a tensor from an allocation of this server's store to the leads at `to`, or keeps it for others if `to`
        is empty. With the `grant` of its source, puts the tensor into this server's store.
        """
        request = pb.PutTensorRequest(
            tensor=_named(transfer_key, name, part),
            description=description,
            consumers=[PeerAddress(address=address) for address in to],
            timeout=duration(within_s),
            consumer_count=options.get("consumers", 0),
            asynchronous=options.get("asynchronous", False),
            request_id=options.get("request_id", ""),
        )
        if grant is not None:
            request.grant.CopyFrom(grant)
        else:
            request.allocation_id = allocation_id
        if "ttl_s" in options:
            request.ttl.CopyFrom(duration(options["ttl_s"]))
        return await self._call.read(self._stub.PutTensor, request, {"timeout_s": within_s + MARGIN_S, **options})

    async def get(  # noqa: PLR0913 - by name, each with a default
        self,
        transfer_key: bytes,
        name: str,
        *,
        part: int = 0,
        expected: pb.ExpectedTensor | None = None,
        source: str = "",
        as_offer: bool = False,
        within_s: float = 30.0,
        **options: Unpack[opt.CallOptions],
    ) -> pb.GetTensorResponse:
        """Returns the pages of a tensor once it is there, or with `as_offer` the grant of one that is kept for
        others.
        """
        request = pb.GetTensorRequest(
            tensor=_named(transfer_key, name, part), expected=expected, as_offer=as_offer, timeout=duration(within_s)
        )
        if source:
            request.source.address = source
        return await self._call.read(self._stub.GetTensor, request, {"timeout_s": within_s + MARGIN_S, **options})

    async def release(
        self, transfer_key: bytes, names: Sequence[str] = (), *, source: str = "", **options: Unpack[opt.CallOptions]
    ) -> pb.ReleaseTensorsResponse:
        """Releases these tensors, part 0 of each, or the whole request; also at the lead at `source`, which keeps them
        for this one.
        """
        rows = [pb.TensorName(name=name) for name in names]
        request = pb.ReleaseTensorsRequest(transfer_key=transfer_key, names=rows)
        if source:
            request.source.address = source
        return await self._call.read(self._stub.ReleaseTensors, request, options)

    async def list(
        self,
        transfer_key: bytes = b"",
        *,
        states: Sequence["pb.TensorState.ValueType"] = (),
        **options: Unpack[opt.ListOptions],
    ) -> pb.ListTensorsResponse:
        """Returns who holds which tensors, oldest first."""
        request = pb.ListTensorsRequest(transfer_key=transfer_key, states=states)
        return await self._call.pages(self._stub.ListTensors, request, options, "tensors")

    async def status(self, **options: Unpack[opt.CallOptions]) -> pb.GetStagingStatusResponse:
        """Returns how full the store is."""
        return await self._call.read(self._stub.GetStagingStatus, pb.GetStagingStatusRequest(), options)


def _named(transfer_key: bytes, name: str, part: int) -> pb.TensorName:
    return pb.TensorName(transfer_key=transfer_key, name=name, part=part)
