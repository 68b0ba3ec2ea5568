"""The pairing of a request with the other engine, and the way of its tensors between the two.

A prefill engine puts the tensors where the router, the request's id, or a configuration with one decode engine says.
If none of them says it, the prefill engine keeps the tensors and says so in its answer: the decode engine fetches them.

Proxies for several prefill and decode engines (XpYd) choose two engines that have registered with them. They give both
legs of a request one id with the addresses of both stores, and say nothing else. vLLM puts the kind of answer before
it, and the number of the prompt, if a request may have several, and eight random characters behind it.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from kvgrpc.core.values.ids import check_transfer_key
from kvgrpc.errors import InvalidRequest, PermissionDenied, Reason
from kvgrpc.integrations.derived_keys import derived_key, read_secret
from kvgrpc.integrations.params import TensorWish, tensor_wish
from kvgrpc.integrations.vllm.prompts import trace_of
from kvgrpc.integrations.vllm.tensors.options import SendMode, TensorOptions, address_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ADDRESS = r"[0-9A-Za-z.:\[\]%-]{3,261}"
_HEX = "[0-9a-f]"
_UUID = rf"{_HEX}{{32}}|{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
_ID = re.compile(
    rf"___prefill_addr_(?P<prefill>{_ADDRESS})___decode_addr_(?P<decode>{_ADDRESS})_(?P<uuid>{_UUID})"
    rf"(?:-(?P<item>\d{{1,6}}))?(?:-{_HEX}{{8}})?"
)


class Pairing:
    """The pairing of one engine's requests."""

    def __init__(self, options: TensorOptions, address: str, ranks: int) -> None:
        """`address`: address of the store of rank 0."""
        self._options, self._address, self._ranks = options, address, ranks
        self._reads_ids = bool(options.proxy_ip or options.peers)
        """True if the configuration says that proxies make the ids: any client of an engine can choose an id."""
        self._secret = read_secret(options.pairing_secret_file)

    def wanted(self, request: "Request") -> TensorWish | None:
        """Returns what a request wants; None: nothing. Its params take precedence over its id. Raises InvalidRequest as
        `tensor_wish` does.
        """
        own = self._address if self._reads_ids else ""
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        trace = trace_of(request, params)
        by_id = named_by_id(request.request_id, own, self._options.ttl_s, self._secret)
        wants = tensor_wish(params, self._options.ttl_s, trace)
        if wants is None:
            return None if by_id is None else replace(by_id, traceparent=trace)
        if by_id is not None and by_id.gives and wants.gives and not wants.peer:
            return replace(wants, peer=by_id.peer)
        return wants

    def check(self, wants: TensorWish) -> None:
        """Raises KVGrpcError for what no request may want. The lead checks which addresses may be dialled."""
        check_transfer_key(wants.key)
        if wants.ttl_s is not None and wants.ttl_s <= 0:
            raise InvalidRequest(Reason.TTL_INVALID, f"kv_transfer_params: a ttl of {wants.ttl_s} s keeps nothing")
        try:
            address_of(wants.peer or self._address, self._ranks)
        except ValueError as error:
            raise InvalidRequest(Reason.INVALID_FIELD, f"kv_transfer_params: kvgrpc_intent.peer: {error}") from error
        if self._options.peers and wants.peer not in ("", *self._options.peers):
            raise PermissionDenied(
                Reason.DIAL_REFUSED, f"{wants.peer} is none of this engine's `peers` (kv_connector_extra_config)"
            )
        if not wants.gives and self.fetches(wants) and not wants.peer:
            text = "kv_transfer_params: kvgrpc_intent.peer.address is missing: where tensors are fetched from"
            raise InvalidRequest(Reason.INVALID_FIELD, text)

    def consumer(self, wants: TensorWish) -> str:
        """Returns the address at which the tensors of this request are put; empty: they are kept."""
        puts = self._options.send is not SendMode.GET if wants.puts is None else wants.puts
        sole = self._options.peers[0] if len(self._options.peers) == 1 else ""
        return (wants.peer or sole) if puts else ""

    def fetches(self, wants: TensorWish) -> bool:
        return self._options.send is SendMode.GET if wants.puts is None else not wants.puts


def named_by_id(request_id: str, own: str, ttl_s: float | None = None, secret: bytes = b"") -> TensorWish | None:
    """Returns what a request with this id wants of the engine whose store is at `own`. Returns None if the id has no
    addresses, names other engines, or names this engine on both sides. `secret`: the secret that both engines share.
    """
    found = _ID.search(request_id)
    if found is None or found.end() != len(request_id):
        return None
    prefill, decode = found["prefill"], found["decode"]
    if (prefill == own) is (decode == own):
        return None
    said = "|".join((prefill, decode, found["uuid"], found["item"] or ""))
    key = derived_key(secret, b"request_id:" + said.encode())
    return TensorWish(key, prefill == own, decode if prefill == own else prefill, ttl_s, request_id)
