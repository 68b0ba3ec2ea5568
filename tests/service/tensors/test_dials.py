"""Unverified grants of puts name sources that a server dials. Such dials are bounded like those of pulls."""

import socket
from contextlib import ExitStack
from dataclasses import replace

from kvgrpc.core.values.grants import mint, read_claims
from kvgrpc.v1 import common_pb2, tensor_pb2
from tests.service.api import refused
from tests.service.tensors.conftest import Begin
from tests.service.tensors.stores import PAGE, TENSORS, Store, described, name_of
from tests.service.values import dur

EACH = 4
BOUNDED = f"{TENSORS}[limits]\ndials_per_connection = {EACH}\nconnect_timeout_s = 60.0\n"
OPEN_S = 20.0


def put_from(source: str, key: bytes, name: str, token: bytes) -> tensor_pb2.PutTensorRequest:
    """Returns a put with a forged grant, which says that the tensor is at that source."""
    forged = mint(replace(read_claims(token), address=source, engine_id=f"engine-{name}"), b"nobody's key")
    tensor = name_of(key, name)
    return tensor_pb2.PutTensorRequest(
        tensor=tensor, description=described(PAGE), grant=common_pb2.Grant(token=forged), timeout=dur(OPEN_S)
    )


def kept(store: Store, key: bytes) -> bytes:
    """Returns the grant of a tensor that is kept in the store."""
    store.put(key, b"k" * PAGE)
    answer = store.api.tensors.GetTensor(store.wanted(key, as_offer=True))
    return bytes(answer.grant.token)


def test_handshakes_that_puts_cause_by_the_addresses_they_name_are_bounded(begin: Begin, key: bytes) -> None:
    p, d = begin(TENSORS, BOUNDED)
    token = kept(p, key)
    with ExitStack() as stack:
        for number in range(EACH):
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port.settimeout(OPEN_S)
            call = d.api.tensors.PutTensor.future(
                put_from(f"127.0.0.1:{port.getsockname()[1]}", key, f"{number}", token)
            )
            stack.callback(call.cancel)
            stack.enter_context(port.accept()[0])
        with refused(d.api, "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"):
            d.api.tensors.PutTensor(put_from("127.0.0.1:9", key, "more", token))
    p.release_tensors(key)
