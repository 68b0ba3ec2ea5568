"""Conversion of named tensors: requests to the core's values, and a lead's tensors to messages."""

from kvgrpc.core.tables.transfer_table import TransferTable
from kvgrpc.core.tables.transfers import pair_id
from kvgrpc.core.tensors.bundles import TENSORS_MAX
from kvgrpc.core.tensors.descriptions import (
    CONSUMERS_MAX,
    DIMENSIONS_MAX,
    Description,
    ExpectedTensor,
    Get,
    LeadAddress,
    NamedTensor,
    Put,
    Release,
    TensorId,
    WantedTensor,
)
from kvgrpc.core.tensors.rows import Tensor, TensorOffer, TensorStage
from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.core.values.limits import Limits, granted_ttl
from kvgrpc.errors import invalid
from kvgrpc.v1 import common_pb2, tensor_pb2
from kvgrpc.wire.bounds import check_count
from kvgrpc.wire.requests import consumers
from kvgrpc.wire.values import claims_of, duration, seconds, timeout_s

_STATES = {
    TensorStage.ARRIVING: tensor_pb2.TENSOR_STATE_ARRIVING,
    TensorStage.STORED: tensor_pb2.TENSOR_STATE_STORED,
    TensorStage.SPILLING: tensor_pb2.TENSOR_STATE_SPILLED,
    TensorStage.SPILLED: tensor_pb2.TENSOR_STATE_SPILLED,
    TensorStage.RETURNING: tensor_pb2.TENSOR_STATE_SPILLED,
    TensorStage.HELD: tensor_pb2.TENSOR_STATE_HELD,
}


# -- requests


def put(request: tensor_pb2.PutTensorRequest, limits: Limits) -> Put:
    """Converts PutTensor. Raises InvalidRequest, or OutOfRange for too many consumers."""
    location, here = request.WhichOneof("location"), request.allocation_id
    if location is None or (location == "allocation_id" and not here):
        raise invalid("location", "is required: allocation_id at the source, grant at a consumer")
    if location != "grant" and request.bundled_tensors:
        raise invalid("bundled_tensors", "is for a consumer")
    only = [name for name in ("consumers", "consumer_count", "asynchronous", "tenant") if getattr(request, name)]
    if location == "grant" and only:
        raise invalid(only[0], "is for the source")
    check_count("consumers", len(request.consumers), CONSUMERS_MAX)
    leads = tuple([lead_address(f"consumers[{i}]", value) for i, value in enumerate(request.consumers)])
    if len({one.address for one in leads}) < len(leads):
        raise invalid("consumers", "names an address twice")
    ttl_s = seconds(request, "ttl")
    if ttl_s is not None:
        ttl_s = granted_ttl(ttl_s, limits)
    if location == "grant":
        claims_of(request.grant)
    check_count("bundled_tensors", len(request.bundled_tensors), TENSORS_MAX - 1)
    key = request.tensor.transfer_key
    return Put(
        tensor_id(request.tensor), described(request.description), here, request.grant.token, leads,
        len(leads) or consumers(request.consumer_count), ttl_s, timeout_s(request, "timeout"), request.asynchronous,
        request.request_id,
        tuple([NamedTensor(_of_request(f"bundled_tensors[{i}].tensor", key, value.tensor), described(value.description))
               for i, value in enumerate(request.bundled_tensors)]),
    )  # fmt: skip


def get(request: tensor_pb2.GetTensorRequest) -> Get:
    """Converts GetTensor. Raises InvalidRequest."""
    source = lead_address("source", request.source) if request.HasField("source") else None
    if source is not None and request.as_offer:
        raise invalid("source", "is for an engine that fetches, and as_offer for its source")
    if request.bundled_tensors and not request.as_offer:
        raise invalid("bundled_tensors", "is for a source")
    check_count("bundled_tensors", len(request.bundled_tensors), TENSORS_MAX - 1)
    key = request.tensor.transfer_key
    return Get(
        tensor_id(request.tensor), _expected(request.expected), source, request.as_offer,
        timeout_s(request, "timeout"), request.request_id,
        tuple([WantedTensor(_of_request(f"bundled_tensors[{i}].tensor", key, value.tensor), _expected(value.expected))
               for i, value in enumerate(request.bundled_tensors)]),
        request.page_count_max,
    )  # fmt: skip


def release(request: tensor_pb2.ReleaseTensorsRequest) -> Release:
    """Converts ReleaseTensors. Raises InvalidRequest."""
    key = request.transfer_key
    check_transfer_key(key)
    names = [_of_request(f"names[{i}]", key, name) for i, name in enumerate(request.names)]
    source = lead_address("source", request.source) if request.HasField("source") else None
    return Release(key, tuple(names), source)


def tensor_id(value: tensor_pb2.TensorName) -> TensorId:
    """Converts a tensor's name. Raises InvalidRequest."""
    return TensorId(value.transfer_key, value.name, value.part)


def _of_request(field: str, key: bytes, value: tensor_pb2.TensorName) -> TensorId:
    """Converts the name of a further tensor of the request with this key. Raises InvalidRequest."""
    if value.transfer_key not in (b"", key):
        raise invalid(f"{field}.transfer_key", "is the request's, or left out")
    return TensorId(key, value.name, value.part)


def described(value: tensor_pb2.TensorDescription) -> Description:
    """Converts a tensor's description. Raises InvalidRequest."""
    layer = value.layer if value.HasField("layer") else None
    return Description(value.dtype, tuple(value.shape_sizes), value.nbytes, layer, value.content_digest)


def lead_address(field: str, value: common_pb2.PeerAddress) -> LeadAddress:
    """Converts a lead's address. Raises InvalidRequest."""
    if not value.address:
        raise invalid(f"{field}.address", "is required")
    return LeadAddress(value.address, value.engine_id)


def _expected(value: tensor_pb2.ExpectedTensor) -> ExpectedTensor:
    if len(value.shape_sizes) > DIMENSIONS_MAX:
        raise invalid("expected.shape_sizes", f"has at most {DIMENSIONS_MAX} dimensions")
    return ExpectedTensor(
        value.dtype or None,
        tuple(value.shape_sizes) if value.shape_sizes or value.scalar else None,
        value.layer if value.HasField("layer") else None,
        value.content_digest or None,
    )


# -- messages


def name_to_proto(id_: TensorId) -> tensor_pb2.TensorName:
    return tensor_pb2.TensorName(transfer_key=id_.key, name=id_.name, part=id_.part)


def description_to_proto(value: Description) -> tensor_pb2.TensorDescription:
    """Makes the message of a description: the inverse of `described`."""
    digest = value.content_digest
    return tensor_pb2.TensorDescription(
        dtype=value.dtype, shape_sizes=value.shape, nbytes=value.nbytes, layer=value.layer, content_digest=digest
    )


def bundled_to_proto(value: NamedTensor) -> tensor_pb2.BundledTensor:
    """Makes a further bundled tensor of a request to another lead. The request has the key."""
    name = tensor_pb2.TensorName(name=value.id.name, part=value.id.part)
    return tensor_pb2.BundledTensor(tensor=name, description=description_to_proto(value.described))


def wanted_to_proto(value: Get) -> tensor_pb2.WantedTensor:
    """Makes a further wanted tensor of a request to another lead. The request has the key."""
    name = tensor_pb2.TensorName(name=value.id.name, part=value.id.part)
    return tensor_pb2.WantedTensor(tensor=name, expected=expected_to_proto(value.expected))


def expected_to_proto(value: ExpectedTensor) -> tensor_pb2.ExpectedTensor:
    """Makes the message of an expectation, in the form that `get` reads."""
    dtype, shape, digest = value.dtype or "", value.shape or (), value.content_digest or b""
    return tensor_pb2.ExpectedTensor(
        dtype=dtype, shape_sizes=shape, scalar=value.shape == (), layer=value.layer, content_digest=digest
    )


def row(value: Tensor | TensorOffer, now: float, transfers: TransferTable) -> tensor_pb2.Tensor:
    """Makes the row of a tensor. For an offer, its transfer tells how many consumers are done."""
    read = transfers.find(value.transfer_id) if isinstance(value, TensorOffer) else None
    return tensor_pb2.Tensor(
        name=value.id.name,
        part=value.id.part,
        pair_id=pair_id(value.id.key),
        description=description_to_proto(value.described),
        state=state_of(value),
        page_count=value.pages,
        age=duration(now - value.since),
        peer_address="" if isinstance(value, TensorOffer) else value.peer,
        transfer_id=value.transfer_id,
        consumer_count=value.consumer_count if isinstance(value, TensorOffer) else 0,
        done_consumer_count=0 if read is None else read.consumers_done,
        tenant=value.tenant,
    )


def state_of(value: Tensor | TensorOffer) -> "tensor_pb2.TensorState.ValueType":
    """Returns the state that a row shows."""
    return tensor_pb2.TENSOR_STATE_OFFERED if isinstance(value, TensorOffer) else _STATES[value.stage]
