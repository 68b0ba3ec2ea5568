"""`kv_transfer_params` as routers write and relay them, and the requests that an engine reads from them."""

import hmac
import json
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.core.policy.values import Give, ModeChoice
from kvgrpc.core.values import grants
from kvgrpc.engine.scheduler import Offer, ScheduledRequest, Source
from kvgrpc.errors import InvalidRequest, Reason
from kvgrpc.integrations.derived_keys import read_secret, room_key
from kvgrpc.integrations.params import (
    Defaults,
    RecentKeys,
    TensorWish,
    answered,
    answered_named,
    answered_push,
    offered,
    tensor_wish,
    traceparent_of,
    wanted,
)
from tests.engine.support import refused

KEY = b"k" * 16
SECRET = b"s" * 32
INTENT = {"transferKey": "a2tra2tra2tra2tra2traw==", "mode": "TRANSFER_MODE_PUSH"}
PROMPT = [1, 2, 3]
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def token(access: grants.AccessKind) -> bytes:
    claims = grants.Claims(access, "p", 1, "10.0.0.1:50051", "l-1", KEY, 30.0, 1, 3)
    return grants.mint(claims, b"s" * 32)


READ, WRITE = token(grants.AccessKind.READ), token(grants.AccessKind.WRITE)


def read(params: dict[str, Any], **defaults: Any) -> ScheduledRequest:
    """Reads params as they come out of a request's JSON."""
    found = wanted("r", PROMPT, json.loads(json.dumps(params)), Defaults(**defaults))
    assert found is not None
    return found


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": False, "do_remote_prefill": False}, {"other": 1}])
def test_params_without_a_flag_ask_for_nothing(params: dict[str, Any]) -> None:
    assert wanted("r", PROMPT, params, Defaults()) is None


def test_what_the_usual_proxy_sends_to_prefill_asks_for_a_hand_over() -> None:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    params |= {"remote_host": None, "remote_port": None}
    found = read(params)
    assert (found.take, found.give, found.target, found.ttl_s) == (None, Give(ModeChoice.AUTO), b"", None)
    pulled = [read(params, mode=ModeChoice.PULL) for _ in range(2)]
    assert {len(each.transfer_key) for each in pulled} == {16}
    assert pulled[0].transfer_key != pulled[1].transfer_key


def test_what_prefill_answers_is_what_decode_takes_with_whatever_a_router_adds() -> None:
    relayed = answered(READ, prefilled=True) | {"remote_port": 7, "tp_size": 1, "x": {"y": None}}
    found = read(relayed)
    assert (found.take, found.give) == (Offer(READ), None)


@pytest.mark.parametrize(
    "params",
    [
        answered(READ, prefilled=True) | {"kvgrpc_intent": {"transferKey": INTENT["transferKey"]}},
        {"do_remote_prefill": True, "kvgrpc_intent": INTENT},
        {"do_remote_prefill": True, "kvgrpc_intent": {"mode": "TRANSFER_MODE_PUSH"}, "transfer_id": "abc"},
    ],
    ids=["pull", "push", "named_push"],
)
def test_a_decode_engine_that_offers_back_gives_under_a_key_of_its_own(params: dict[str, Any]) -> None:
    found, defaults = read(params, offer_ttl_s=60), Defaults(offer_ttl_s=60)
    offers = [offered(found, defaults) for _ in range(2)]
    assert all(offer and (offer.take, offer.give) == (None, Give(ModeChoice.PULL, prefill=False)) for offer in offers)
    assert all(offer and (offer.request_id, offer.prompt, offer.ttl_s) == ("r", tuple(PROMPT), 60) for offer in offers)
    keys = {offer.transfer_key for offer in offers if offer} | {found.transfer_key, KEY}
    assert len(keys) == 3 + (found.transfer_key != KEY)
    assert {len(key) for key in keys} <= {16, 32}


@pytest.mark.parametrize("ttl_s", [0.0, 60.0])
def test_a_prefill_engine_offers_nothing_beside_what_it_was_asked_for(ttl_s: float) -> None:
    """A prefill engine that took history does not either: it gives the prompt anyway."""
    for params in ({"do_remote_decode": True}, answered(READ, prefilled=False)):
        assert offered(read(params, offer_ttl_s=ttl_s), Defaults(offer_ttl_s=ttl_s)) is None
    assert (offered(read(answered(READ, prefilled=True)), Defaults(offer_ttl_s=ttl_s)) is not None) is (ttl_s > 0)


def test_routers_that_push_without_knowing_kvgrpc_are_understood_where_push_is_configured() -> None:
    """Their params name the transfer and say where prefill listens; nothing in them is specific to kvgrpc."""
    prefill = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "xfer-7c1e",
        "remote_engine_id": None,
    }
    decode = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "xfer-7c1e", "remote_engine_id": "p"}
    decode |= {"remote_host": "10.0.0.1", "remote_port": 50051, "remote_request_id": "cmpl-1", "tp_size": 1}
    gives, takes = (read(params, mode=ModeChoice.PUSH) for params in (prefill, decode))
    assert (gives.give, gives.take) == (Give(ModeChoice.PUSH), None)
    assert (takes.take, takes.give) == (Source("10.0.0.1:50051", "p"), None)
    assert gives.transfer_key == takes.transfer_key


def test_a_prefill_is_asked_for_history_only_by_a_grant() -> None:
    """Coordinates and block ids of another connector name no KV that could be verified, so the prompt is computed."""
    found = read({
        "do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "d",
        "remote_request_id": "cmpl-1", "remote_host": "10.0.0.2", "remote_port": 5600, "tp_size": 1,
        "remote_num_tokens": 48,
    })  # fmt: skip
    assert (found.take, found.give, found.target) == (None, Give(ModeChoice.AUTO), b"")


def test_what_decode_answers_is_history_for_the_next_prefill() -> None:
    found = read(answered(READ, prefilled=False))
    assert (found.take, found.give) == (Offer(READ), Give(ModeChoice.AUTO))


def test_a_push_is_paired_by_the_intent_and_finds_its_source_by_whichever_address_there_is() -> None:
    decode = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 50051, "kvgrpc_intent": INTENT}
    found = read(decode)
    assert (found.take, found.transfer_key) == (Source("10.0.0.1:50051"), KEY)
    assert read(decode | {"remote_host": "fd00::1", "remote_engine_id": "p"}).take == Source("[fd00::1]:50051", "p")
    peer = INTENT | {"peer": {"address": "h:1", "engineId": "p"}, "onAbort": "ON_ABORT_KEEP"}
    assert read(decode | {"kvgrpc_intent": peer}).take == Source("h:1", "p", keep=True)
    assert read({"do_remote_prefill": True, "kvgrpc_intent": INTENT}).take == Source()
    assert read({"do_remote_decode": True, "kvgrpc_intent": INTENT}).give == Give(ModeChoice.PUSH)


def test_a_write_grant_says_where_a_prefill_is_pushed() -> None:
    found = read({**grants.to_json(WRITE), "kvgrpc_intent": {"transferKey": INTENT["transferKey"]}})
    assert (found.target, found.give, found.take) == (WRITE, Give(ModeChoice.PUSH), None)


def test_the_name_that_a_router_gives_a_push_pairs_it() -> None:
    sides = [{flag: True, "transfer_id": "abc"} for flag in ("do_remote_decode", "do_remote_prefill")]
    first, second = (read(side, mode=ModeChoice.PUSH) for side in sides)
    assert first.transfer_key == second.transfer_key
    assert read(sides[0] | {"transfer_id": "abd"}, mode=ModeChoice.PUSH).transfer_key != first.transfer_key


@pytest.mark.parametrize("mode", ModeChoice)
def test_what_a_prefill_answers_decides_how_decode_takes_it_whatever_its_mode(mode: ModeChoice) -> None:
    found = read(answered(READ, prefilled=True), mode=mode)
    assert (found.take, found.give) == (Offer(READ), None)
    pushes = answered_push(KEY, "p", "10.0.0.1:50051", 3)
    found = read(pushes | {"router": "added"}, mode=mode)
    assert (found.take, found.transfer_key) == (Source("10.0.0.1:50051", "p"), KEY)
    assert (pushes["remote_host"], pushes["remote_port"], pushes["remote_engine_id"]) == ("10.0.0.1", 50051, "p")
    found = read({"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 50051}, mode=mode)
    assert found.take == Source("10.0.0.1:50051")


def test_an_address_of_ipv6_has_no_brackets_where_its_host_stands_alone() -> None:
    for answer in (answered_push(KEY, "p", "[::1]:50051", 3), answered_named(KEY, "[::1]:50051", puts=False)):
        assert (answer["remote_host"], answer["remote_port"]) == ("::1", 50051)
        where = {"remote_host": answer["remote_host"], "remote_port": answer["remote_port"]}
        assert read({"do_remote_prefill": True, **where}, mode=ModeChoice.PUSH).take == Source("[::1]:50051")


def shared(
    request_id: str, flag: str, prompt: list[int], mode: ModeChoice = ModeChoice.PUSH, secret: bytes = b"", **more: Any
) -> bytes:
    """Returns the key of a request with this id that its router did not name."""
    params, defaults = {flag: True, "remote_host": "h", "remote_port": 1}, Defaults(mode, pairing_secret=secret)
    found = wanted(request_id, prompt, params, defaults, **more)
    assert found is not None
    return found.transfer_key


@pytest.mark.parametrize("mode", [ModeChoice.PUSH, ModeChoice.AUTO])
@pytest.mark.parametrize("id_", ["cmpl-7c1e-0", "chatcmpl-7c1e"])
def test_a_transfer_without_a_name_has_one_key_on_both_sides_by_request_id_and_prompt(
    id_: str, mode: ModeChoice
) -> None:
    """vLLM's engines append eight digits to the id that they are given."""
    prefill = shared(f"{id_}-0123abcd", "do_remote_decode", PROMPT, mode)
    assert prefill == shared(f"{id_}-fedc9876", "do_remote_prefill", PROMPT, mode)
    assert prefill == shared(f"1_{id_}-fedc9876", "do_remote_prefill", PROMPT, mode)
    others = {
        shared("cmpl-7c1e-1-0123abcd", "do_remote_prefill", PROMPT),
        shared(f"{id_}-0123abcd", "do_remote_prefill", [*PROMPT, 4]),
        shared(f"{id_}-0123abcd", "do_remote_prefill", PROMPT[:2]),
        shared(f"{id_}-0123abcd", "do_remote_prefill", PROMPT, cache_salt="of another tenant"),
    }
    assert len(others | {prefill}) == 5


def test_a_key_that_engines_derive_by_a_secret_nobody_else_derives() -> None:
    keys = [
        {shared("a", flag, PROMPT, secret=secret) for flag in ("do_remote_decode", "do_remote_prefill")}
        for secret in (b"", SECRET, b"t" * 32)
    ]
    assert [len(both_sides) for both_sides in keys] == [1, 1, 1]
    assert len(set.union(*keys)) == 3
    assert {len(key) for key in set.union(*keys)} == {32}
    (key,) = keys[1]
    said = b"request_id:" + b"".join(_said("a", PROMPT))
    assert key == hmac.digest(SECRET, said, "sha256")


def test_what_a_router_names_has_its_name_whatever_secret_engines_share() -> None:
    sides = [{flag: True, "transfer_id": "abc"} for flag in ("do_remote_decode", "do_remote_prefill")]
    with_secret = {read(side, mode=ModeChoice.PUSH, pairing_secret=SECRET).transfer_key for side in sides}
    assert with_secret == {read(sides[0], mode=ModeChoice.PUSH).transfer_key}


def test_a_room_names_the_same_transfer_for_engines_of_both_programs() -> None:
    place = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
    for secret in (b"", SECRET):
        defaults = Defaults(pairing_secret=secret)
        takes = wanted("r-1", PROMPT, {"do_remote_prefill": True, **place}, defaults)
        gives = wanted("r-2", PROMPT, {"do_remote_decode": True, "bootstrap_room": 7}, defaults)
        assert takes is not None
        assert gives is not None
        assert takes.take == Source("10.0.0.1:8998", "")
        assert takes.transfer_key == gives.transfer_key == room_key(secret, 7)


@pytest.mark.parametrize("room", [-1, 1 << 63, 1.5, "7", True])
def test_a_room_that_is_no_room_is_refused(room: Any) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        wanted("r-1", PROMPT, {"do_remote_decode": True, "bootstrap_room": room}, Defaults())


def test_a_secret_is_in_no_text_of_what_an_engine_is_told() -> None:
    assert "s" * 32 not in repr(Defaults(pairing_secret=SECRET))
    assert "pairing_secret" not in repr(Defaults(pairing_secret=SECRET))


def test_a_secret_is_read_from_its_file_without_the_end_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert read_secret(str(file)) == SECRET
    assert read_secret("") == b""


def test_a_secret_that_is_none_stops_the_start_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match=r"pairing_secret_file: .*No such file"):
        read_secret(str(file))
    file.write_bytes(b"hunter2\n")
    with pytest.raises(ValueError, match=r"pairing_secret_file: .* has 7 bytes; write 16") as raised:
        read_secret(str(file))
    assert "hunter2" not in str(raised.value)


def _said(request_id: str, prompt: list[int]) -> list[bytes]:
    """Returns what both engines know, as bytes that no other request has."""
    name = request_id.encode()
    return [len(name).to_bytes(4, "little"), name, bytes(4), *(token.to_bytes(8, "little") for token in prompt)]


def test_a_request_id_that_comes_again_to_prefill_gets_another_key() -> None:
    keys = RecentKeys(2)
    first = shared("a", "do_remote_decode", PROMPT, used_keys=keys)
    keys.add(first)
    again = shared("a", "do_remote_decode", PROMPT, used_keys=keys)
    assert again != first
    assert shared("a", "do_remote_prefill", PROMPT, used_keys=keys) == first, "what decode takes it was told"
    for key in (again, b"other"):
        keys.add(key)
    assert shared("a", "do_remote_decode", PROMPT, used_keys=keys) == first


def test_everything_else_that_an_intent_says_is_taken_over() -> None:
    intent = {
        "ttl": "2.5s",
        "priority": -5,
        "consumerCount": 3,
        "requestId": "r-1",
        "onAbort": "ON_ABORT_KEEP",
        "new": 1,
    }
    found = read({"do_remote_decode": True, "kvgrpc_intent": intent}, ttl_s=9.0)
    assert (found.ttl_s, found.priority, found.consumers, found.label) == (2.5, -5, 3, "r-1")
    assert found.on_abort is grants.OnAbort.KEEP


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"do_remote_prefill": True, "do_remote_decode": True}, Reason.INVALID_FIELD),
        ({"do_remote_prefill": True}, Reason.GRANT_INVALID),
        ({"do_remote_prefill": True, "kvgrpc_grant": "??"}, Reason.GRANT_INVALID),
        ({"do_remote_prefill": True, "kvgrpc_grant": None}, Reason.GRANT_INVALID),
        ({"do_remote_decode": True, "kvgrpc_intent": []}, Reason.INVALID_FIELD),
        ({"do_remote_decode": True, "kvgrpc_intent": {"mode": "PUSH"}}, Reason.INVALID_FIELD),
        ({"do_remote_prefill": True, "kvgrpc_intent": {"mode": "TRANSFER_MODE_PUSH"}}, Reason.GRANT_INVALID),
        (
            {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1, "remote_block_ids": [[1]]},
            Reason.GRANT_INVALID,
        ),
        ({"do_remote_prefill": True, "remote_host": 1, "kvgrpc_intent": INTENT}, Reason.INVALID_FIELD),
        ({"do_remote_prefill": True, "remote_host": "h", "kvgrpc_intent": INTENT}, Reason.INVALID_FIELD),
    ],
)
def test_params_that_make_no_sense_are_refused_with_their_field(params: dict[str, Any], reason: Reason) -> None:
    with refused(reason, InvalidRequest):
        wanted("r", PROMPT, params, Defaults())


def test_an_answer_of_named_tensors_is_what_decode_takes_with_whatever_a_router_adds() -> None:
    prefill = tensor_wish({"do_remote_decode": True, "kvgrpc_intent": {"ttl": "2.5s", "requestId": "r"}}, 9.0)
    assert prefill is not None
    assert (prefill.gives, prefill.peer, prefill.ttl_s, prefill.label) == (True, "", 2.5, "r")
    assert prefill.puts is None
    for puts in (True, False):
        relayed = {**answered_named(prefill.key, "10.0.0.1:50051", puts=puts), "router": "added"}
        assert tensor_wish(json.loads(json.dumps(relayed)), 9.0) == TensorWish(
            prefill.key, False, "10.0.0.1:50051", 9.0, "", puts
        )


@pytest.mark.parametrize("address", ["10.0.0.1:50051", "[::1]:50051", "engine.local:50051"])
def test_a_router_with_an_intent_of_its_own_leaves_decode_the_address_of_what_is_kept(address: str) -> None:
    answered = answered_named(KEY, address, puts=False)
    mine = {"transferKey": INTENT["transferKey"], "mode": "TRANSFER_MODE_PULL", "requestId": "r"}
    assert tensor_wish(answered | {"kvgrpc_intent": mine}) == TensorWish(KEY, False, address, None, "r", puts=False)


def test_tensors_find_their_peer_by_whichever_address_there_is() -> None:
    params = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "10.0.0.1", "remote_port": 50051}
    found = tensor_wish(params)
    assert found is not None
    assert (found.peer, found.ttl_s) == ("10.0.0.1:50051", None)
    assert tensor_wish({**params, "do_remote_decode": False}) == found
    assert tensor_wish({}) is None


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_decode": True, "kvgrpc_intent": 7},
    ],
)
def test_tensors_without_a_name_or_with_wrong_params_are_refused(params: dict[str, Any]) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        tensor_wish(params)


@pytest.mark.parametrize("flags", [{"do_remote_decode": False}, {"do_remote_prefill": False}])
def test_what_decode_prefilled_itself_is_offered_where_offers_are_made(flags: dict[str, Any]) -> None:
    asked = {**flags, "kvgrpc_intent": {"requestId": "x", "priority": 3}}
    assert wanted("r", PROMPT, asked, Defaults()) is None
    defaults = Defaults(offer_ttl_s=60)
    found = wanted("r", PROMPT, asked, defaults, arrived_us=5)
    assert found is not None
    assert (found.take, found.give, found.label, found.priority, found.request_time_us) == (None, None, "x", 3, 5)
    offer = offered(found, defaults)
    assert offer is not None
    assert (offer.give, offer.ttl_s) == (Give(ModeChoice.PULL, prefill=False), 60)


def test_the_trace_of_a_prefill_goes_on_at_decode_and_ends_with_the_answer() -> None:
    prefilled = json.loads(json.dumps(answered(READ, prefilled=True, traceparent=TRACE)))
    assert traceparent_of(prefilled) == TRACE
    assert traceparent_of(answered_named(KEY, "10.0.0.1:7", puts=False, traceparent=TRACE)) == TRACE
    assert traceparent_of(answered(READ, prefilled=False, traceparent=TRACE)) == "", "the next turn is another request"


@pytest.mark.parametrize("stated", [None, 7, "", "nonsense", TRACE.replace("00-", "ff-", 1), "00-" + "0" * 50])
def test_what_is_no_trace_is_none(stated: Any) -> None:
    assert traceparent_of({"traceparent": stated}) == ""
    assert "traceparent" not in answered(READ, prefilled=True)
