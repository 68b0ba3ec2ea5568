"""`kv_transfer_params`, the object that routers relay between engines, as requests for a Scheduler.

Read are the flags that routers set (`do_remote_decode`, `do_remote_prefill`), our grant (`kvgrpc_grant`), our intent
(`kvgrpc_intent`), the other side's address where a router knows it (`remote_host`, `remote_port`, `remote_engine_id`),
the name that newer routers give a push (`transfer_id`), and the trace (`traceparent`). All other fields are relayed and
ignored.
"""

import base64
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from kvgrpc.core.policy.spec import began_at
from kvgrpc.core.policy.values import Give, Mode
from kvgrpc.core.values import grants
from kvgrpc.core.values.ids import TRANSFER_KEY_BYTES_MIN
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Source
from kvgrpc.errors import InvalidRequest, Reason
from kvgrpc.v1.common_pb2 import (
    ON_ABORT_KEEP,
    TRANSFER_MODE_PULL,
    TRANSFER_MODE_PUSH,
    TRANSFER_MODE_UNSPECIFIED,
    Intent,
)
from kvgrpc.wire.answers import readable_trace

Params = Mapping[str, Any]
TRACEPARENT = "traceparent"
"""The field of the trace, as W3C's Trace Context names the HTTP header."""


@dataclass(frozen=True)
class Defaults:
    """What an engine does where a router does not say."""

    mode: Mode = Mode.PULL
    ttl_s: float | None = None
    """Of hand-overs; None: the lead's default."""
    firm_ttl_s: float | None = None
    """How long the blocks of a hand-over are kept though nobody has come for them; None: the lead's default."""
    offer_ttl_s: float = 0.0
    """A decode engine offers what it has for the next turn, for so long; 0: it does not."""


def wanted(
    request_id: str, prompt: Sequence[int], params: Params, defaults: Defaults, *, arrived_us: int = 0, **more: Any
) -> ScheduledRequest | None:
    """What a request with these params wants; None: nothing. `arrived_us`: when its engine heard of it, as by
    time.time_ns() // 1000; 0 is now. `more` are further fields of it.

    Raises InvalidRequest: GRANT_INVALID for what is no grant, and for a prefill by pull of which there is none;
    INVALID_FIELD for an intent that is none, for a push without a name for both sides, and for both flags at once.
    """
    prefills, decodes = _flags(params)
    if not prefills and not decodes:
        return None
    intent = _intent(params)
    token = grants.from_json(params) if "kvgrpc_grant" in params else b""
    writes = bool(token) and grants.read_claims(token).access is grants.Access.WRITE
    mode = _mode(intent, defaults, pushes=writes)
    fields: dict[str, Any] = {
        "transfer_key": _key(intent, params, mode),
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
    arrived_us = arrived_us or time.time_ns() // 1000
    began_us = began_at(fields.get("take"), fields.get("give"), intent.request_time_us, arrived_us)
    fields["request_time_us"] = began_us
    return ScheduledRequest(request_id, prompt, **fields)


def offered(found: ScheduledRequest, defaults: Defaults) -> ScheduledRequest | None:
    """What a decode engine that took what it wanted offers for the next turn, once it has answered; None: nothing.

    Under a key of its own: a cancel of the transfer that brought the prompt does not mean this one.
    """
    if found.take is None or found.give is not None or not defaults.offer_ttl_s:
        return None
    key, give = os.urandom(TRANSFER_KEY_BYTES_MIN), Give(Mode.PULL, prefill=False)
    return replace(found, take=None, give=give, transfer_key=key, ttl_s=defaults.offer_ttl_s, firm_ttl_s=None)


def answered(grant: bytes, *, prefilled: bool, traceparent: str = "") -> dict[str, Any]:
    """The object for the engine that comes next: of a prefill for the decode engine, else of an answer for the next
    prefill, which is a request of its own and does not join the trace of this one.
    """
    flags = {"do_remote_prefill": prefilled, "do_remote_decode": not prefilled}
    return {**grants.to_json(grant), **flags, **(_traced(traceparent) if prefilled else {})}


def traceparent_of(params: Params) -> str:
    """The W3C trace context that a router, or the engine of the leg before, put beside the flags; empty: none."""
    stated = params.get(TRACEPARENT)
    return readable_trace(stated) if isinstance(stated, str) else ""


def _traced(traceparent: str) -> dict[str, str]:
    return {TRACEPARENT: traceparent} if traceparent else {}


@dataclass(frozen=True)
class Named:
    """What a request wants of named tensors: to give those of its prompt, or to take them."""

    key: bytes
    gives: bool
    peer: str
    """Address of the other engine's store; empty: not stated."""
    ttl_s: float | None
    label: str
    traceparent: str = ""


def named(params: Params, ttl_s: float | None = None, traceparent: str = "") -> Named | None:
    """What a request with these params wants of named tensors; None: nothing. `ttl_s`: where they do not say.

    Raises InvalidRequest (INVALID_FIELD) for an intent that is none, for both flags at once, and for tensors that are
    to be taken under no name.
    """
    prefills, decodes = _flags(params)
    if not prefills and not decodes:
        return None
    intent = _intent(params)
    if decodes and not intent.transfer_key and not params.get("transfer_id"):
        raise _invalid("kvgrpc_intent.transferKey", "is required to take tensors: it is in the answer of the prefill")
    source = _address(params, intent)
    return Named(
        _key(intent, params, Mode.PULL), prefills, source.address,
        intent.ttl.ToMilliseconds() / 1000 if intent.HasField("ttl") else ttl_s, intent.request_id, traceparent,
    )  # fmt: skip


def answered_named(key: bytes, address: str, traceparent: str = "") -> dict[str, Any]:
    """The object of a prefill for the decode engine: under which key the tensors are, and whose they are."""
    intent = {"transferKey": base64.b64encode(key).decode(), "peer": {"address": address}}
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvgrpc_intent": intent, **_traced(traceparent)}


def _flags(params: Params) -> tuple[bool, bool]:
    """Whether it is to be prefilled for another engine, and whether it was, or is, by another one."""
    prefills, decodes = params.get("do_remote_decode") is True, params.get("do_remote_prefill") is True
    if prefills and decodes:
        raise _invalid("do_remote_decode and do_remote_prefill", "cannot both be set: where is it prefilled?")
    return prefills, decodes


def _mode(intent: Intent, defaults: Defaults, *, pushes: bool) -> Mode:
    if intent.mode == TRANSFER_MODE_UNSPECIFIED:
        return Mode.PUSH if pushes else defaults.mode
    return {TRANSFER_MODE_PULL: Mode.PULL, TRANSFER_MODE_PUSH: Mode.PUSH}.get(intent.mode, defaults.mode)


def _key(intent: Intent, params: Params, mode: Mode) -> bytes:
    """What pairs both sides: of a push what the router named it, of a pull a new one, which its grant names."""
    if intent.transfer_key:
        return intent.transfer_key
    name = params.get("transfer_id")
    if isinstance(name, str) and name:
        return hashlib.sha256(b"transfer_id:" + name.encode()).digest()
    if mode is Mode.PUSH:
        raise _invalid("kvgrpc_intent.transferKey", "is required for a push, the same on both sides (or transfer_id)")
    return os.urandom(TRANSFER_KEY_BYTES_MIN)


def _source(params: Params, intent: Intent, token: bytes, mode: Mode) -> Offer | Source:
    if mode is Mode.PULL:
        if not token:
            raise InvalidRequest(Reason.GRANT_INVALID, "kv_transfer_params has no kvgrpc_grant: nothing can be pulled")
        return Offer(token)
    return _address(params, intent)


def _address(params: Params, intent: Intent) -> Source:
    """Where the other engine serves; an empty address: not stated."""
    peer, keep = intent.peer, intent.on_abort == ON_ABORT_KEEP
    if peer.address:
        return Source(peer.address, peer.engine_id, keep)
    host, port, engine_id = (params.get(f"remote_{name}") for name in ("host", "port", "engine_id"))
    if not host:
        return Source("", "", keep)
    if not (isinstance(host, str) and isinstance(port, int) and isinstance(engine_id, str | None)):
        raise _invalid("remote_host, remote_port, remote_engine_id", "are a name, a number and a name")
    return Source(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", engine_id or "", keep)


def _intent(params: Params) -> Intent:
    stated = params.get("kvgrpc_intent")
    if stated is None:
        return Intent()
    if not isinstance(stated, Mapping):
        raise _invalid("kvgrpc_intent", "is an object")
    # Not the parser's own way to ignore fields of later versions: it ignores unknown values of known fields, too.
    known = {name for field in Intent.DESCRIPTOR.fields for name in (field.name, field.json_name)}
    try:
        return ParseDict({name: value for name, value in stated.items() if name in known}, Intent())
    except ParseError as error:
        raise _invalid("kvgrpc_intent", str(error)) from error


def _invalid(field: str, what: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_FIELD, f"kv_transfer_params: {field} {what}")
