"""Request ids that name the two engines of a request.

Proxies for several prefill and decode engines (XpYd) choose two engines that have registered with them. They give both
legs of a request one id with the addresses of both stores, and say nothing else. vLLM puts the kind of answer before
it, and the number of the prompt, if a request may have several, and eight random characters behind it.
"""

import re

from kvgrpc.integrations.derived_keys import derived_key
from kvgrpc.integrations.params import TensorWish

_ADDRESS = r"[0-9A-Za-z.:\[\]%-]{3,261}"
_HEX = "[0-9a-f]"
_UUID = rf"{_HEX}{{32}}|{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
_ID = re.compile(
    rf"___prefill_addr_(?P<prefill>{_ADDRESS})___decode_addr_(?P<decode>{_ADDRESS})_(?P<uuid>{_UUID})"
    rf"(?:-(?P<item>\d{{1,6}}))?(?:-{_HEX}{{8}})?"
)


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
