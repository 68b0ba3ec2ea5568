"""`kv_transfer_params`, the object that routers relay between engines, as requests for a Scheduler.

These fields are read: the flags that routers set (`do_remote_decode`, `do_remote_prefill`), our grant (`kvgrpc_grant`),
our intent (`kvgrpc_intent`), the other side's address if a router knows it (`remote_host`, `remote_port`,
`remote_engine_id`), the name that newer routers give a push (`transfer_id`), and the trace (`traceparent`). All other
fields are relayed and ignored.

A decode engine goes by what it is given, not by a mode: it pulls a READ grant, and waits for a push if it has only the
address of a prefill engine. If nobody names the transfer, both engines derive its name from the request id that the
router gave both legs, and from the prompt.
"""

import base64
import hashlib
import os
import re
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict, ParseError

from kvgrpc.core.policy.spec import began_at
from kvgrpc.core.policy.values import Give, ModeChoice
from kvgrpc.core.values import grants
from kvgrpc.core.values.ids import TRANSFER_KEY_BYTES_MIN
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Source
from kvgrpc.errors import InvalidRequest, Reason
from kvgrpc.integrations.derived_keys import derived_key, room_key
from kvgrpc.v1.common_pb2 import (
    ON_ABORT_KEEP,
    TRANSFER_MODE_PULL,
    TRANSFER_MODE_PUSH,
    TRANSFER_MODE_UNSPECIFIED,
    Intent,
)
from kvgrpc.wire.answers import readable_trace

Params = Mapping[str, Any]
PREFILLED_HERE, PREFILLED_ELSEWHERE = FLAGS = "do_remote_decode", "do_remote_prefill"
"""Flags that routers set on the request of a prefill engine, and on that of a decode engine."""
TRACEPARENT = "traceparent"
"""Field of the trace, named like the HTTP header of W3C's Trace Context."""
ROOM, ROOM_END = "bootstrap_room", 1 << 63
"""Field of the room, by which SGLang's routers name a request at both engines, and the end of its numbers."""

RECENT_KEYS = 16_384
"""Maximum number of recent keys; an engine uses fewer in the two minutes for which a lead refuses a used key."""
_ADDED = re.compile(r"^[0-9]+_|-[0-9a-f]{8}$")
"""Additions of each vLLM engine to a request's id: the number of one of several answers, or random characters."""


@dataclass(frozen=True)
class Defaults:
    """The choices of an engine for what a router does not say."""

    mode: ModeChoice = ModeChoice.AUTO
    """Mode in which a prefill hands over."""
    ttl_s: float | None = None
    """TTL of hand-overs, in seconds; None: the lead's default."""
    firm_ttl_s: float | None = None
    """Time that blocks are kept though nobody has come for them, in seconds; None: the lead's default."""
    offer_ttl_s: float = 0.0
    """Time for which a decode engine offers its KV for the next turn, in seconds; 0: it does not."""
    pairing_secret: bytes = field(default=b"", repr=False)
    """Secret that only the two engines know, for the keys that they derive; empty: keys are derived without one."""


class RecentKeys:
    """The transfer keys under which an engine handed over lately."""

    def __init__(self, most: int = RECENT_KEYS) -> None:
        self._most = most
        self._keys: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        """Notes that a key was used now; with too many keys the oldest one is forgotten."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: object) -> bool:
        return key in self._keys


def wanted(
    request_id: str, prompt: Sequence[int], params: Params, defaults: Defaults, *, arrived_us: int = 0,
    used_keys: Container[bytes] = (), **more: Any,
) -> ScheduledRequest | None:  # fmt: skip
    """Returns what a request with these params wants; None: nothing. A request whose flags are both false takes and
    gives nothing; what it computes can be `offered`. `arrived_us`: when its engine heard of it, as by time.time_ns() //
    1000; 0 is now. `used_keys`: keys under which this engine handed over lately; a prefill that comes again under such
    a key gets another one. `more`: further fields of the request.

    Raises InvalidRequest: GRANT_INVALID for an invalid grant, and for a decode without a grant or an address;
    INVALID_FIELD for an invalid intent, and for both flags at once.
    """
    prefills, decodes = _flags(params)
    if not prefills and not decodes and not (defaults.offer_ttl_s and params.keys() & FLAGS):
        return None
    intent, arrived_us = _intent(params), arrived_us or time.time_ns() // 1000
    if not prefills and not decodes:
        began_us = began_at(None, None, intent.request_time_us, arrived_us)
        return ScheduledRequest(
            request_id, prompt, priority=intent.priority, label=intent.request_id, request_time_us=began_us, **more
        )
    token = grants.from_json(params) if "kvgrpc_grant" in params else b""
    writes = bool(token) and grants.read_claims(token).access is grants.AccessKind.WRITE
    mode = _mode(intent, defaults, pushes=writes)
    fields: dict[str, Any] = {
        "consumers": intent.consumer_count or 1,
        "on_abort": grants.OnAbort.KEEP if intent.on_abort == ON_ABORT_KEEP else grants.OnAbort.RELEASE,
        "ttl_s": intent.ttl.ToMilliseconds() / 1000 if intent.HasField("ttl") else defaults.ttl_s,
        "firm_ttl_s": intent.firm_ttl.ToMilliseconds() / 1000 if intent.HasField("firm_ttl") else defaults.firm_ttl_s,
        "priority": intent.priority,
        "label": intent.request_id,
        **more,
    }
    if prefills:
        fields["give"] = Give(mode)
        if writes:
            fields["target"] = token
        elif token:
            fields["take"] = Offer(token)
    else:
        fields["take"] = _source(params, intent, token, mode)
    key, shared = (
        _key(intent, params, defaults.pairing_secret),
        isinstance(fields.get("take"), Source) or (prefills and mode is not ModeChoice.PULL),
    )
    if not key and shared:
        key = _shared_key(request_id, prompt, more.get("cache_salt", ""), defaults.pairing_secret)
    if prefills and key in used_keys:  # its lead refuses it; readers go by the grant in the answer
        key = b""
    fields["transfer_key"] = key or os.urandom(TRANSFER_KEY_BYTES_MIN)
    began_us = began_at(fields.get("take"), fields.get("give"), intent.request_time_us, arrived_us)
    fields["request_time_us"] = began_us
    return ScheduledRequest(request_id, prompt, **fields)


def offered(found: ScheduledRequest, defaults: Defaults) -> ScheduledRequest | None:
    """Returns what a decode engine offers for the next turn, once it has answered; None: nothing.

    The offer has a key of its own: a cancel of the transfer that brought the prompt does not mean the offer.
    """
    if found.give is not None or not defaults.offer_ttl_s:
        return None
    key, give = os.urandom(TRANSFER_KEY_BYTES_MIN), Give(ModeChoice.PULL, prefill=False)
    return replace(found, take=None, give=give, transfer_key=key, ttl_s=defaults.offer_ttl_s, firm_ttl_s=None)


def answered(grant: bytes, *, prefilled: bool, traceparent: str = "") -> dict[str, Any]:
    """Returns the object for the next engine: after a prefill the decode engine, after an answer the next prefill. That
    prefill is a request of its own and does not join this trace.
    """
    flags = {"do_remote_prefill": prefilled, "do_remote_decode": not prefilled}
    return {**grants.to_json(grant), **flags, **(_traced(traceparent) if prefilled else {})}


def traceparent_of(params: Params) -> str:
    """Returns the W3C trace context that a router, or the engine before, put beside the flags; empty: none."""
    stated = params.get(TRACEPARENT)
    return readable_trace(stated) if isinstance(stated, str) else ""


def _traced(traceparent: str) -> dict[str, str]:
    return {TRACEPARENT: traceparent} if traceparent else {}


def answered_push(key: bytes, engine_id: str, address: str, tokens: int, traceparent: str = "") -> dict[str, Any]:
    """Returns the object of a prefill that is pushed, for a later decode engine: the push's key and its source. The
    fields beside the intent have the names that routers look at.
    """
    found = answered_named(key, address, puts=True, traceparent=traceparent)
    found["kvgrpc_intent"]["peer"]["engineId"] = engine_id
    return {**found, "remote_engine_id": engine_id, "remote_block_ids": [], "remote_num_tokens": tokens}


@dataclass(frozen=True)
class TensorWish:
    """A request's wish for named tensors: to give those of its prompt, or to take them."""

    key: bytes
    gives: bool
    peer: str
    """Address of the other engine's store; empty: not stated."""
    ttl_s: float | None
    label: str
    puts: bool | None = None
    """True: the engine that gives puts the tensors at the other one. False: it keeps them until the other one fetches
    them. None: not stated.
    """
    traceparent: str = ""


def tensor_wish(params: Params, ttl_s: float | None = None, traceparent: str = "") -> TensorWish | None:
    """Returns what a request with these params wants of named tensors; None: nothing. `ttl_s`: the default TTL, in
    seconds.

    Raises InvalidRequest (INVALID_FIELD) for an invalid intent, for both flags at once, and for taking without a name.
    """
    prefills, decodes = _flags(params)
    if not prefills and not decodes:
        return None
    intent = _intent(params)
    if decodes and not intent.transfer_key and not params.get("transfer_id"):
        raise _invalid("kvgrpc_intent.transferKey", "is required to take tensors: it is in the answer of the prefill")
    source = _address(params, intent)
    key = _key(intent, params) or os.urandom(TRANSFER_KEY_BYTES_MIN)
    ttl_s = intent.ttl.ToMilliseconds() / 1000 if intent.HasField("ttl") else ttl_s
    puts = {TRANSFER_MODE_PUSH: True, TRANSFER_MODE_PULL: False}.get(intent.mode)
    return TensorWish(key, prefills, source.address, ttl_s, intent.request_id, puts, traceparent)


def answered_named(key: bytes, address: str, *, puts: bool, traceparent: str = "") -> dict[str, Any]:
    """Returns the object of a prefill for the decode engine: the tensors' key, their engine's address, and whether that
    engine has put them or keeps them. The address is there twice: some routers have an intent of their own.
    """
    mode = "TRANSFER_MODE_PUSH" if puts else "TRANSFER_MODE_PULL"
    intent = {"transferKey": base64.b64encode(key).decode(), "mode": mode, "peer": {"address": address}}
    flags = {"do_remote_prefill": True, "do_remote_decode": False}
    return {**flags, "kvgrpc_intent": intent, **_remote(address), **_traced(traceparent)}


def _remote(address: str) -> dict[str, Any]:
    """Returns an address in the fields that routers look at; IPv6 without the brackets."""
    host, _, port = address.rpartition(":")
    return {"remote_host": host.removeprefix("[").removesuffix("]"), "remote_port": int(port)}


def asked_of(params: object) -> set[str]:
    """Returns the flags that are set in a request's params, if it has any."""
    return {flag for flag in FLAGS if params.get(flag) is True} if isinstance(params, Mapping) else set()


def _flags(params: Params) -> tuple[bool, bool]:
    """Returns whether the request is prefilled here for another engine, and whether another engine prefills it."""
    asked = asked_of(params)
    prefills, decodes = (flag in asked for flag in FLAGS)
    if prefills and decodes:
        raise _invalid("do_remote_decode and do_remote_prefill", "cannot both be set: where is it prefilled?")
    return prefills, decodes


def _mode(intent: Intent, defaults: Defaults, *, pushes: bool) -> ModeChoice:
    if intent.mode == TRANSFER_MODE_UNSPECIFIED:
        return ModeChoice.PUSH if pushes else defaults.mode
    return {TRANSFER_MODE_PULL: ModeChoice.PULL, TRANSFER_MODE_PUSH: ModeChoice.PUSH}.get(intent.mode, defaults.mode)


def _key(intent: Intent, params: Params, secret: bytes = b"") -> bytes:
    """Returns the key by which a router names the transfer on both sides; empty: none."""
    if intent.transfer_key:
        return intent.transfer_key
    if (room := params.get(ROOM)) is not None:
        if not isinstance(room, int) or isinstance(room, bool) or not 0 < room < ROOM_END:
            raise _invalid(ROOM, "is a whole number from 1 to 2**63 - 1")
        return room_key(secret, room)
    name = params.get("transfer_id")
    return hashlib.sha256(b"transfer_id:" + name.encode()).digest() if isinstance(name, str) and name else b""


def _shared_key(request_id: str, prompt: Sequence[int], cache_salt: str, secret: bytes) -> bytes:
    """Returns the key that both engines derive for a request that came to both under one id. Clients may choose ids:
    with the prompt in the key, requests of others that have the same id do not meet this one.
    """
    texts = (_ADDED.sub("", request_id).encode(), cache_salt.encode())
    named = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return derived_key(secret, b"request_id:" + named + np.asarray(prompt, dtype="<i8").tobytes())


def _source(params: Params, intent: Intent, token: bytes, mode: ModeChoice) -> Offer | Source:
    if token:
        return Offer(token)
    source = _address(params, intent)
    if params.get("remote_block_ids"):
        raise InvalidRequest(Reason.GRANT_INVALID, "kv_transfer_params names blocks of an engine without kvgrpc")
    if not source.address and not (mode is ModeChoice.PUSH and _key(intent, params)):
        what = "kv_transfer_params has no kvgrpc_grant and no address of a prefill engine: nothing can come"
        raise InvalidRequest(Reason.GRANT_INVALID, what)
    return source


def _address(params: Params, intent: Intent) -> Source:
    """Returns where the other engine serves; an empty address: not stated."""
    peer, keep = intent.peer, intent.on_abort == ON_ABORT_KEEP
    if peer.address:
        return Source(peer.address, peer.engine_id, keep)
    host, port, engine_id = (params.get(f"remote_{name}") for name in ("host", "port", "engine_id"))
    if not host:
        host, port = params.get("bootstrap_host"), params.get("bootstrap_port")
    if not host:
        return Source("", "", keep)
    if not (isinstance(host, str) and isinstance(port, int) and isinstance(engine_id, str | None)):
        raise _invalid(
            "remote_host, remote_port, remote_engine_id",
            "are a name, a number and a name; so are bootstrap_host and bootstrap_port, in place of the first two",
        )
    return Source(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", engine_id or "", keep)


def _intent(params: Params) -> Intent:
    stated = params.get("kvgrpc_intent")
    if stated is None:
        return Intent()
    if not isinstance(stated, Mapping):
        raise _invalid("kvgrpc_intent", "is an object")
    # The parser's own way to ignore fields of later versions would also ignore unknown values of known fields.
    known = {name for field in Intent.DESCRIPTOR.fields for name in (field.name, field.json_name)}
    try:
        return ParseDict({name: value for name, value in stated.items() if name in known}, Intent())
    except ParseError as error:
        raise _invalid("kvgrpc_intent", str(error)) from error


def _invalid(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_FIELD, f"kv_transfer_params: {field} {what}")
