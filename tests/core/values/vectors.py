"""The committed vectors, made by the shortest code that follows the text of the two encodings.

The code shares nothing with the core. `python -m tests.core.values.vectors` writes the vectors.
"""

import base64
import hashlib
import hmac
import json
import struct
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "proto" / "vectors"


def lp(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


def content_digests(case: dict[str, Any]) -> list[str]:
    """Returns h_1, h_2, ... in hex; the last unit may be short."""
    texts = ("kvgrpc content v1", case["adapter"], case["cache_salt"], case["weights_revision"])
    h = hashlib.sha256(b"".join(lp(text.encode()) for text in texts)).digest()
    found = []
    tokens = case["token_ids"]
    items = sorted(case["items"], key=lambda item: (item["offset"], item["length"], item["digest"]))
    for start in range(0, len(tokens), 16):
        unit = tokens[start : start + 16]
        data = h
        for token in unit:
            data += token.to_bytes(4, "little")
        for item in items:
            first, end = item["offset"], item["offset"] + item["length"]
            if first < start + len(unit) and end > start:
                data += lp(bytes.fromhex(item["digest"]))
                data += first.to_bytes(4, "little") + item["length"].to_bytes(4, "little")
        h = hashlib.sha256(data).digest()
        found.append(h.hex())
    return found


def content_case(name: str, token_ids: list[int], at: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    """Makes a case; `at` are lengths within a unit, at which a shorter offer of the same tokens ends."""
    case = {
        "name": name,
        "token_ids": token_ids,
        "adapter": "",
        "cache_salt": "",
        "weights_revision": "",
        "items": [],
        **fields,
    }
    ends = [{"tokens": k, "digest": content_digests({**case, "token_ids": token_ids[:k]})[-1]} for k in at]
    return {**case, "digests": content_digests(case), "ends_within_a_unit": ends}


def content_cases() -> list[dict[str, Any]]:
    forty = list(range(100, 140))
    image, clip = "aa" * 32, "0b"
    return [
        content_case("one token", [7]),
        content_case("one whole unit", list(range(16))),
        content_case("one unit and one token", list(range(17))),
        content_case("a ragged end", forty, at=(1, 35, 39)),
        content_case("the first 32 of it: its first two digests", forty[:32]),
        content_case("the first 35 of it: another third digest", forty[:35]),
        content_case("the largest token ids", [0, 2**32 - 1]),
        content_case("an adapter", forty, adapter="lora-1@3"),
        content_case("a salt", forty, cache_salt="tenant 7"),
        content_case("weights", forty, weights_revision="main"),
        content_case("all three", forty, adapter="a", cache_salt="b", weights_revision="c"),
        content_case("lengths tell fields apart: ab + c", [1], adapter="ab", cache_salt="c"),
        content_case("lengths tell fields apart: a + bc", [1], adapter="a", cache_salt="bc"),
        content_case("text is UTF-8", [1], adapter="Grüße, 世界"),
        content_case("an item within a unit", forty, items=[{"digest": image, "offset": 3, "length": 4}]),
        content_case("an item over three units", forty, (9, 12), items=[{"digest": image, "offset": 10, "length": 25}]),
        content_case("an item that ends with a unit", forty, items=[{"digest": image, "offset": 8, "length": 8}]),
        content_case("an item that begins with a unit", forty, items=[{"digest": image, "offset": 16, "length": 1}]),
        content_case("an item past the end", forty, items=[{"digest": image, "offset": 40, "length": 8}]),
        content_case(
            "two items, in the order of their places",
            forty,
            items=[{"digest": image, "offset": 20, "length": 2}, {"digest": clip, "offset": 2, "length": 16}],
        ),
        content_case(
            "two items in one place, in the order of their digests",
            forty,
            items=[{"digest": image, "offset": 2, "length": 2}, {"digest": clip, "offset": 2, "length": 2}],
        ),
    ]


def grant_token(case: dict[str, Any]) -> bytes:
    """Returns a token: version, access, on_abort (1 byte each), incarnation (8), TTL in ms, blocks, tokens (4 each), in
    version 2 the request time (8); engine id, address, lease id, tenant and transfer key, each after one byte of
    length; and an HMAC-SHA256 of all that, with key HMAC-SHA256(session secret, "kvgrpc grant key v1"). Numbers are
    little-endian.
    """
    access = {"READ": 1, "WRITE": 2}[case["access"]]
    on_abort = {"RELEASE": 1, "KEEP": 2}[case["on_abort"]]
    time_us = case.get("request_time_us", 0)
    payload = bytes([2 if time_us else 1, access, on_abort]) + struct.pack("<Q", int(case["incarnation"], 16))
    payload += struct.pack("<III", case["ttl_ms"], case["block_count"], case["token_count"])
    payload += struct.pack("<Q", time_us) if time_us else b""
    for name in ("engine_id", "address", "lease_id", "tenant"):
        text = case[name].encode()
        payload += bytes([len(text)]) + text
    key = bytes.fromhex(case["transfer_key"])
    payload += bytes([len(key)]) + key
    signing = hmac.new(bytes.fromhex(case["session_secret"]), b"kvgrpc grant key v1", hashlib.sha256).digest()
    return payload + hmac.new(signing, payload, hashlib.sha256).digest()


def grant_case(name: str, **fields: Any) -> dict[str, Any]:
    case = {
        "name": name,
        "session_secret": "11" * 32,
        "access": "READ",
        "on_abort": "RELEASE",
        "engine_id": "prefill-0",
        "incarnation": "00000000000000ab",
        "address": "10.0.0.7:50051",
        "lease_id": "l-00000000000000ab-0123456789abcdef",
        "tenant": "",
        "transfer_key": "00112233445566778899aabbccddeeff",
        "ttl_ms": 30000,
        "block_count": 3,
        "token_count": 40,
        **fields,
    }
    token = grant_token(case)
    host, port = case["address"].rsplit(":", 1) if ":" in case["address"] else (case["address"], "0")
    params = {
        "do_remote_prefill": case["access"] == "READ",
        "do_remote_decode": case["access"] == "WRITE",
        "remote_engine_id": case["engine_id"],
        "remote_request_id": case["lease_id"],
        "remote_host": host,
        "remote_port": int(port),
        "remote_block_ids": [],
        "remote_num_tokens": case["token_count"],
        "kvgrpc_grant": base64.b64encode(token).decode().replace("+", "-").replace("/", "_"),
    }
    return {**case, "token": token.hex(), "kv_transfer_params": params}


def grant_cases() -> list[dict[str, Any]]:
    return [
        grant_case("what a pull takes"),
        grant_case("of a push", access="WRITE"),
        grant_case("other consumers may come after an abort", on_abort="KEEP"),
        grant_case("a tenant, and a transfer key of 32 bytes", tenant="blue", transfer_key="7f" * 32),
        grant_case("IPv6", address="[fd00::1]:443"),
        grant_case("an address without a port", address="prefill.internal"),
        grant_case("text is UTF-8", engine_id="Prüfstand-世界"),
        grant_case("with the time of its request", request_time_us=1_700_000_000_123_456),
        grant_case("the largest numbers", incarnation="ff" * 8, ttl_ms=2**32 - 1, block_count=2**32 - 1),
    ]


FILES = {
    "content.json": (
        "The digest chain over tokens; see `Content` in common.proto. Bytes are in hex. `digests` are h_1, h_2, ...; "
        "`ends_within_a_unit` are h_K at other K, for whoever uses a shorter offer of the same tokens as a whole.",
        content_cases,
    ),
    "grant.json": (
        "Tokens of grants, and their JSON form for routers; see `Grant` in common.proto. Bytes and the incarnation are "
        "in hex, `kvgrpc_grant` is the token in URL-safe base64; it is signed with HMAC-SHA256 under the key "
        "HMAC-SHA256(session_secret, `kvgrpc grant key v1`).",
        grant_cases,
    ),
}


def text(name: str) -> str:
    """Returns the text of the file of that name."""
    about, cases = FILES[name]
    return json.dumps({"about": about, "cases": cases()}, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for file in FILES:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / file).write_text(text(file), encoding="utf-8")
