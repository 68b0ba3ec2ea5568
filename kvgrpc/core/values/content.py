"""Content: a digest chain over units of 16 tokens that says what KV was computed from.

    h_0 = SHA-256( lp("kvgrpc content v1") lp(adapter) lp(cache_salt) lp(weights_revision) )
    h_i = SHA-256( h_{i-1}  ids  items )        for unit i

lp(x) is the field's length as a little-endian uint32 followed by its bytes. ids are the unit's token ids as
little-endian uint32. items are, for each multimodal item that touches the unit in the order of (offset, length,
digest): lp(digest), offset and length as little-endian uint32. The last unit may be short. Test vectors:
proto/vectors/content.json.

The issuer keeps its whole chain. The other side names a K and its own h_K; K is a multiple of 16 or the whole offer.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvgrpc.core.values.records import dataclass
from kvgrpc.errors import InvalidRequest, OutOfRange, PreconditionFailed, Reason, invalid, too_many

UNIT_TOKENS = 16
DIGEST_BYTES = 32
OPAQUE_BYTES_MAX = 64
ITEM_DIGEST_BYTES_MAX = 64
PREFIX_BYTES_MAX = (1 << 16) * DIGEST_BYTES
"""Maximum bytes of the digests that a claim states: those of about a million tokens."""
TOUCHES_MAX = 1 << 17
"""Maximum number of (item, unit) overlaps. Items may overlap, and many long ones would cost more than the tokens."""
_ITEMS = "content.tokens.multimodal_items"
_UINT32_END = 1 << 32


@dataclass(frozen=True)
class Item:
    """A multimodal item: its digest and the token positions [offset, offset + length) that it occupies."""

    digest: bytes
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not 0 < len(self.digest) <= ITEM_DIGEST_BYTES_MAX:
            raise invalid(f"{_ITEMS}.digest", f"has 1 to {ITEM_DIGEST_BYTES_MAX} bytes, not {len(self.digest)}")
        if self.offset < 0 or self.length < 1 or self.offset + self.length > _UINT32_END:
            raise invalid(
                f"{_ITEMS}.length", f"an item occupies at least one token, not [{self.offset}, +{self.length})"
            )


@dataclass(frozen=True)
class ContentId:
    """Identifies the tokens that KV was computed from, by a digest chain or by an opaque id."""

    tokens: int
    digests: bytes = b""
    """h_1, h_2, ... concatenated: ceil(tokens / 16) digests. Empty for an opaque id."""
    opaque: bytes = b""
    partial: tuple[int, bytes] | None = None
    """(K, h_K) for one K that is not a multiple of 16: the length of an offer shorter than this content."""

    def __post_init__(self) -> None:
        if self.tokens <= 0:
            raise InvalidRequest(Reason.CONTENT_REQUIRED, "a content covers at least one token")
        if bool(self.digests) == bool(self.opaque) or len(self.opaque) > OPAQUE_BYTES_MAX:
            raise InvalidRequest(
                Reason.CONTENT_REQUIRED, "a content is a digest chain or an opaque id of at most 64 bytes"
            )
        if self.digests and len(self.digests) != -(-self.tokens // UNIT_TOKENS) * DIGEST_BYTES:
            raise invalid(
                "content.chain.digests",
                f"a chain over {self.tokens} tokens has {-(-self.tokens // UNIT_TOKENS)} digests of 32 bytes; "
                f"got {len(self.digests)} bytes",
            )

    def has_digest(self, tokens: int) -> bool:
        """Returns True if this chain has an h_K for K = `tokens`."""
        within = 0 < tokens <= self.tokens and (tokens % UNIT_TOKENS == 0 or tokens == self.tokens)
        return within or (self.partial is not None and self.partial[0] == tokens)

    def digest(self, tokens: int) -> bytes:
        """Returns h_K for K = `tokens`. Raises OutOfRange (CONTENT_RANGE) for a K at which this chain has no digest."""
        if self.partial and self.partial[0] == tokens:
            return self.partial[1]
        if self.has_digest(tokens):
            units = -(-tokens // UNIT_TOKENS)
            return self.digests[(units - 1) * DIGEST_BYTES : units * DIGEST_BYTES]
        raise OutOfRange(
            Reason.CONTENT_RANGE,
            f"{tokens} tokens is neither a multiple of 16 up to {self.tokens} nor the whole content",
        )

    def first(self, tokens: int) -> "ContentId":
        """Returns the content of the first `tokens` tokens. Raises OutOfRange (CONTENT_RANGE) if there is no digest."""
        if self.opaque:
            if tokens != self.tokens:
                raise OutOfRange(Reason.CONTENT_RANGE, "what an opaque id stands for cannot be cut")
            return self
        last = self.digest(tokens)
        return ContentId(tokens, self.digests[: (tokens - 1) // UNIT_TOKENS * DIGEST_BYTES] + last)


@dataclass(frozen=True)
class ContentClaim:
    """A consumer's statement of what it wants: the first `tokens` tokens, and their digest or opaque id."""

    tokens: int
    digest: bytes = b""
    opaque: bytes = b""
    prefix: bytes = b""
    """h_1, h_2, ... of the whole units, if fewer tokens are accepted than wanted; empty if not."""

    def __post_init__(self) -> None:
        if len(self.prefix) % DIGEST_BYTES or len(self.prefix) > self.tokens // UNIT_TOKENS * DIGEST_BYTES:
            raise invalid(
                "openings.content.prefix_digests",
                f"has a digest of {DIGEST_BYTES} bytes for each whole unit of {self.tokens} tokens at most; "
                f"got {len(self.prefix)} bytes",
            )


def chain(
    token_ids: Sequence[int],
    *,
    adapter: str = "",
    cache_salt: str = "",
    weights_revision: str = "",
    items: Sequence[Item] = (),
    also_at: int = 0,
) -> ContentId:
    """Returns the content of `token_ids`. `also_at` asks for one more digest, at that many tokens (a peer's offer)."""
    head = (b"kvgrpc content v1", adapter.encode(), cache_salt.encode(), weights_revision.encode())
    previous = hashlib.sha256(b"".join(_prefixed(field) for field in head)).digest()
    try:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise invalid("content.tokens.token_ids", "lie in [0, 2**32)") from error
    touching = _touching(items, len(token_ids))
    digests = []
    partial = None
    also_in = also_at // UNIT_TOKENS if also_at % UNIT_TOKENS else -1
    sha256 = hashlib.sha256
    for unit in range(-(-len(token_ids) // UNIT_TOKENS)):
        start = unit * UNIT_TOKENS
        if unit != also_in and unit not in touching:
            # Fast path of what follows: long prompts have thousands of units, and most hold nothing but tokens.
            previous = sha256(previous + packed[4 * start : 4 * (start + UNIT_TOKENS)]).digest()
            digests.append(previous)
            continue
        end = min(start + UNIT_TOKENS, len(token_ids))
        here = touching.get(unit, [])
        if start < also_at < end:
            partial = (also_at, _digest(previous, packed, here, (start, also_at)))
        previous = _digest(previous, packed, here, (start, end))
        digests.append(previous)
    return ContentId(len(token_ids), b"".join(digests), partial=partial)


def largest_use(own_tokens: int, offer_tokens: int) -> int:
    """Returns the largest K for a prompt of known tokens: the whole offer, or the own prompt in whole units."""
    return offer_tokens if offer_tokens <= own_tokens else own_tokens - own_tokens % UNIT_TOKENS


def claim(own: ContentId, offer_tokens: int, use_tokens: int, *, prefix: bool = False) -> ContentClaim:
    """Makes the claim on an offer of `offer_tokens` tokens. `use_tokens` 0 takes the largest K allowed. With `prefix`,
    fewer tokens are accepted if the offer differs from some token on.

    Raises OutOfRange (CONTENT_RANGE) if `use_tokens` is not allowed, or no K is.
    """
    if own.opaque:
        if use_tokens not in (0, offer_tokens) or own.tokens != offer_tokens:
            raise OutOfRange(Reason.CONTENT_RANGE, "a content stated as an opaque id is used whole or not at all")
        return ContentClaim(offer_tokens, opaque=own.opaque)
    wanted = use_tokens or largest_use(own.tokens, offer_tokens)
    if not use_tokens and not own.has_digest(wanted):
        wanted -= wanted % UNIT_TOKENS
    _check_use(wanted, offer_tokens, own.tokens)
    stated = own.digests[: wanted // UNIT_TOKENS * DIGEST_BYTES] if prefix else b""
    return ContentClaim(wanted, own.digest(wanted), prefix=stated if len(stated) <= PREFIX_BYTES_MAX else b"")


def check(offer: ContentId, wanted: ContentClaim) -> int:
    """Returns the number of common first tokens: all that are wanted, or the equal whole units if fewer are accepted.

    Raises CONTENT_RANGE, CONTENT_REQUIRED or CONTENT_MISMATCH if there are none.
    """
    if bool(offer.opaque) != bool(wanted.opaque):
        raise PreconditionFailed(
            Reason.CONTENT_REQUIRED, "one side states its content as digests, the other as an opaque id"
        )
    _check_use(wanted.tokens, offer.tokens, wanted.tokens)
    if offer.opaque:
        same = offer.opaque == wanted.opaque and offer.tokens == wanted.tokens
    else:
        same = offer.digest(wanted.tokens) == wanted.digest
    tokens = wanted.tokens if same else UNIT_TOKENS * _common_units(offer, wanted.prefix)
    if not tokens:
        raise PreconditionFailed(
            Reason.CONTENT_MISMATCH, "the KV on offer was computed from other tokens, another adapter, salt or weights"
        )
    return tokens


def _common_units(offer: ContentId, prefix: bytes) -> int:
    """Returns the number of common first units, by bisection: a digest covers all units up to its own."""
    low, high = 0, min(len(prefix), len(offer.digests)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        last = slice((middle - 1) * DIGEST_BYTES, middle * DIGEST_BYTES)
        if prefix[last] == offer.digests[last]:
            low = middle
        else:
            high = middle - 1
    return low


def _check_use(tokens: int, offer_tokens: int, own_tokens: int) -> None:
    aligned = tokens % UNIT_TOKENS == 0 or tokens == offer_tokens
    if not (0 < tokens <= offer_tokens and tokens <= own_tokens and aligned):
        raise OutOfRange(
            Reason.CONTENT_RANGE,
            f"{tokens} tokens cannot be used of an offer of {offer_tokens} for a prompt of {own_tokens}: it takes a "
            "multiple of 16 or the whole offer, at most the own prompt",
        )


def _touching(items: Sequence[Item], tokens: int) -> dict[int, list[Item]]:
    """Returns the items that touch each unit of the first `tokens` tokens, in the order of the encoding."""
    found: dict[int, list[Item]] = {}
    touches = 0
    for item in sorted(items, key=lambda item: (item.offset, item.length, item.digest)):
        last = min(item.offset + item.length, tokens) - 1
        units = range(item.offset // UNIT_TOKENS, last // UNIT_TOKENS + 1)
        touches += len(units)
        if touches > TOUCHES_MAX:
            raise too_many(f"multimodal items lie over more than {TOUCHES_MAX} units of tokens", TOUCHES_MAX)
        for unit in units:
            found.setdefault(unit, []).append(item)
    return found


def _digest(previous: bytes, packed: bytes, items: Sequence[Item], span: tuple[int, int]) -> bytes:
    """Returns the digest after the tokens [start, end) of one unit, which `items` may touch."""
    start, end = span
    touching = b"".join(
        _prefixed(item.digest) + struct.pack("<II", item.offset, item.length) for item in items if item.offset < end
    )
    return hashlib.sha256(previous + packed[4 * start : 4 * end] + touching).digest()


def _prefixed(field: bytes) -> bytes:
    return struct.pack("<I", len(field)) + field
