"""The digest chain and claims on an offer: KV is never used for other tokens, adapter, salt or weights."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvgrpc.core.values.content import PREFIX_BYTES_MAX, TOUCHES_MAX, ContentClaim, ContentId, Item, chain, check, claim
from kvgrpc.errors import InvalidRequest, OutOfRange, PreconditionFailed, Reason
from tests.core.nodes import refused
from tests.core.values import vectors

Items = list[tuple[bytes, int, int]]
"""Items as (digest, offset, length)."""

CASES: list[dict[str, Any]] = json.loads((vectors.FOLDER / "content.json").read_text(encoding="utf-8"))["cases"]
FORTY = list(range(100, 140))


def test_the_committed_vectors_are_what_the_text_of_the_encoding_says() -> None:
    assert (vectors.FOLDER / "content.json").read_text(encoding="utf-8") == vectors.text("content.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_chain_gives_the_committed_digests(case: dict[str, Any]) -> None:
    items = [Item(bytes.fromhex(i["digest"]), i["offset"], i["length"]) for i in case["items"]]
    made = chain(
        case["token_ids"],
        adapter=case["adapter"],
        cache_salt=case["cache_salt"],
        weights_revision=case["weights_revision"],
        items=items[::-1],
    )
    assert made.digests.hex() == "".join(case["digests"])
    assert made.tokens == len(case["token_ids"])
    for end in case["ends_within_a_unit"]:
        longer = chain(
            case["token_ids"],
            adapter=case["adapter"],
            cache_salt=case["cache_salt"],
            weights_revision=case["weights_revision"],
            items=items,
            also_at=end["tokens"],
        )
        assert longer.digest(end["tokens"]).hex() == end["digest"]
        assert longer.digests == made.digests


def test_no_two_committed_cases_end_in_the_same_digest_unless_they_say_the_same() -> None:
    ends = [case["digests"][-1] for case in CASES]
    # An item past the end touches no token, so it does not change the digest.
    assert len(set(ends)) == len(ends) - 1


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70),
    st.text(max_size=5),
    st.text(max_size=5),
    st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.integers(0, 80), st.integers(1, 40)), max_size=4),
)
def test_the_chain_is_what_the_text_says(token_ids: list[int], adapter: str, salt: str, items: Items) -> None:
    case = {
        "token_ids": token_ids,
        "adapter": adapter,
        "cache_salt": salt,
        "weights_revision": "w",
        "items": [{"digest": d.hex(), "offset": o, "length": n} for d, o, n in items],
    }
    made = chain(
        token_ids, adapter=adapter, cache_salt=salt, weights_revision="w", items=[Item(*item) for item in items]
    )
    assert made.digests.hex() == "".join(vectors.content_digests(case))


@given(st.integers(1, 70), st.integers(1, 70))
def test_a_prefix_of_tokens_has_a_prefix_of_the_chain(tokens: int, cut: int) -> None:
    whole, part = chain(range(tokens)), chain(range(min(cut, tokens)))
    for units in range(1, part.tokens // 16 + 1):
        assert whole.digest(16 * units) == part.digest(16 * units)
    asked = chain(range(tokens), also_at=part.tokens)
    assert asked.digest(part.tokens) == part.digest(part.tokens)


@given(st.integers(1, 70), st.data())
def test_another_token_changes_every_digest_from_its_unit_on_and_none_before(tokens: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, tokens - 1))
    one = list(range(tokens))
    other = [*one[:at], data.draw(st.integers(100, 2**32 - 1)), *one[at + 1 :]]
    assert_differs_from(chain(one), chain(other), at // 16)


@pytest.mark.parametrize("field", ["adapter", "cache_salt", "weights_revision"])
def test_another_adapter_salt_or_revision_changes_every_digest(field: str) -> None:
    def of(text: str) -> ContentId:
        fields: dict[str, Any] = {field: text}
        return chain(range(70), **fields)

    assert_differs_from(of(""), of("x"), 0)
    assert_differs_from(of("x"), of("y"), 0)


ITEM = Item(b"image", 20, 30)


@pytest.mark.parametrize(
    ("other", "unit"),
    [
        ([], 1),
        ([Item(b"other", 20, 30)], 1),
        ([Item(b"image", 21, 30)], 1),
        ([Item(b"image", 20, 31)], 1),
        ([Item(b"image", 40, 30)], 1),
        ([Item(b"image", 0, 30)], 0),
        ([ITEM, ITEM], 1),
        ([ITEM, Item(b"clip", 63, 1)], 3),
        ([ITEM, Item(b"clip", 64, 1)], 4),
    ],
)
def test_another_item_changes_every_digest_from_the_first_unit_that_it_touches(other: list[Item], unit: int) -> None:
    assert_differs_from(chain(range(70), items=[ITEM]), chain(range(70), items=other), unit)


def assert_differs_from(one: ContentId, other: ContentId, unit: int) -> None:
    """Asserts that every digest differs from that unit on, and none before."""
    assert one.tokens == other.tokens
    units = range(0, len(one.digests), 32)
    same = [one.digests[i : i + 32] == other.digests[i : i + 32] for i in units]
    assert same == [True] * unit + [False] * (len(units) - unit)


def test_an_item_past_a_cut_leaves_the_digest_at_the_cut_alone() -> None:
    item = Item(b"image", 38, 10)
    assert chain(FORTY, items=[item], also_at=37).digest(37) == chain(FORTY[:37]).digest(37)
    assert chain(FORTY, items=[item], also_at=39).digest(39) == chain(FORTY[:39], items=[item]).digest(39)


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_content_covers_at_least_one_token(tokens: int) -> None:
    with refused(Reason.CONTENT_REQUIRED, InvalidRequest):
        ContentId(tokens, opaque=b"x")
    with refused(Reason.CONTENT_REQUIRED, InvalidRequest):
        chain([])


def test_a_content_is_a_chain_or_an_opaque_id_and_never_both() -> None:
    for digests, opaque in ((b"", b""), (b"d" * 32, b"x"), (b"", b"x" * 65)):
        with refused(Reason.CONTENT_REQUIRED, InvalidRequest):
            ContentId(1, digests, opaque)


@pytest.mark.parametrize(("tokens", "nbytes"), [(16, 31), (16, 64), (17, 32), (1, 33)])
def test_a_chain_has_one_digest_for_each_unit(tokens: int, nbytes: int) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        ContentId(tokens, b"d" * nbytes)


@pytest.mark.parametrize("token_ids", [[-1], [2**32], [1, 2, -3]])
def test_token_ids_are_unsigned_32_bits(token_ids: list[int]) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        chain(token_ids)


@pytest.mark.parametrize("item", [(b"", 0, 1), (b"x" * 65, 0, 1), (b"x", -1, 1), (b"x", 0, 0), (b"x", 2**32 - 1, 2)])
def test_an_item_has_a_digest_and_occupies_tokens(item: tuple[bytes, int, int]) -> None:
    with refused(Reason.INVALID_FIELD, InvalidRequest):
        Item(*item)


def test_what_is_as_long_as_it_may_be_is_accepted() -> None:
    assert Item(b"x" * 64, 2**32 - 1, 1).length == 1
    assert ContentId(1, opaque=b"x" * 64).tokens == 1


def test_items_that_would_cost_more_than_the_tokens_are_refused() -> None:
    items = [Item(b"x", 0, 2**20)] * 70
    with refused(Reason.LIMIT_EXCEEDED, OutOfRange):
        chain([0] * (TOUCHES_MAX // 4), items=items)


def test_a_digest_exists_at_multiples_of_16_and_at_the_end() -> None:
    made = chain(FORTY, also_at=20)
    assert len({made.digest(k) for k in (16, 20, 32, 40)}) == 4
    assert chain(FORTY).partial is None
    assert chain(FORTY, also_at=32).partial is None
    for tokens in (-16, 0, 1, 17, 39, 41, 48):
        with refused(Reason.CONTENT_RANGE, OutOfRange):
            made.digest(tokens)


@pytest.mark.parametrize("tokens", [16, 32, 37, 40])
def test_the_content_of_the_first_tokens_is_what_they_alone_would_have(tokens: int) -> None:
    assert chain(FORTY, also_at=37).first(tokens) == chain(FORTY[:tokens])


def test_only_what_has_a_digest_can_be_cut_there() -> None:
    opaque = ContentId(40, opaque=b"prompt")
    assert opaque.first(40) == opaque
    for made, tokens in ((chain(FORTY), 39), (chain(FORTY), 0), (chain(FORTY), 41), (opaque, 32)):
        with refused(Reason.CONTENT_RANGE, OutOfRange):
            made.first(tokens)


@pytest.mark.parametrize(
    ("own", "offer", "use", "expected"),
    [
        (40, 40, 0, 40),  # the same prompt
        (60, 32, 0, 32),  # the offer is shorter, and ends with a unit
        (60, 40, 0, 32),  # the offer ends within a unit, where this side has no digest
        (40, 60, 0, 32),  # the offer is longer: the own prompt, rounded down
        (48, 60, 0, 48),
        (60, 60, 16, 16),  # the prompts diverge after 16 tokens
    ],
)
def test_the_default_is_the_largest_prefix_that_both_can_name(own: int, offer: int, use: int, expected: int) -> None:
    made = claim(chain(range(own)), offer, use)
    assert made == ContentClaim(expected, chain(range(expected)).digest(expected))


def test_a_ragged_offer_can_be_used_whole_when_its_length_was_known() -> None:
    own = chain(range(60), also_at=40)
    assert claim(own, 40, 0).tokens == 40
    assert claim(own, 40, 40).tokens == 40


@pytest.mark.parametrize(
    ("own", "offer", "use"),
    [(10, 40, 0), (40, 10, 0), (40, 40, 17), (40, 40, 48), (40, 20, 32), (20, 40, 32), (40, 40, -16), (60, 40, 40)],
)
def test_a_prefix_that_one_side_cannot_name_is_refused(own: int, offer: int, use: int) -> None:
    with refused(Reason.CONTENT_RANGE, OutOfRange):
        claim(chain(range(own)), offer, use)


def test_an_opaque_id_is_used_whole() -> None:
    own = ContentId(40, opaque=b"request 7")
    assert claim(own, 40, 0) == claim(own, 40, 40) == ContentClaim(40, opaque=b"request 7")
    for offer, use in ((40, 16), (41, 0)):
        with refused(Reason.CONTENT_RANGE, OutOfRange):
            claim(own, offer, use)


def test_what_both_computed_from_the_same_matches() -> None:
    offer = chain(FORTY)
    for tokens in (16, 32, 40):
        check(offer, ContentClaim(tokens, chain(FORTY[:tokens]).digest(tokens)))
    check(ContentId(4, opaque=b"x"), ContentClaim(4, opaque=b"x"))


@pytest.mark.parametrize(
    "other",
    [
        chain([*FORTY[:15], 0, *FORTY[16:]]),
        chain(FORTY, adapter="a"),
        chain(FORTY, cache_salt="a"),
        chain(FORTY, weights_revision="a"),
        chain(FORTY, items=[Item(b"x", 3, 1)]),
    ],
    ids=["tokens", "adapter", "salt", "weights", "item"],
)
def test_what_was_computed_from_something_else_does_not_match(other: ContentId) -> None:
    for tokens in (16, 32, 40):
        with refused(Reason.CONTENT_MISMATCH, PreconditionFailed):
            check(chain(FORTY), ContentClaim(tokens, other.digest(tokens)))


def test_prompts_match_up_to_where_they_diverge() -> None:
    other = chain([*FORTY[:20], 0, *FORTY[21:]])
    check(chain(FORTY), claim(other, 40, 16))
    with refused(Reason.CONTENT_MISMATCH):
        check(chain(FORTY), claim(other, 40, 32))


def test_a_claim_past_or_inside_the_offer_is_refused() -> None:
    for tokens in (0, 17, 41, 48):
        with refused(Reason.CONTENT_RANGE, OutOfRange):
            check(chain(FORTY), ContentClaim(tokens, b"d" * 32))


def test_both_sides_state_their_content_in_the_same_form() -> None:
    for offer, wanted in (
        (chain(FORTY), ContentClaim(40, opaque=b"x")),
        (ContentId(40, opaque=b"x"), ContentClaim(40, b"d" * 32)),
    ):
        with refused(Reason.CONTENT_REQUIRED, PreconditionFailed):
            check(offer, wanted)


def test_an_opaque_id_for_more_tokens_than_are_on_offer_is_refused() -> None:
    for tokens in (0, 41, 48):
        with refused(Reason.CONTENT_RANGE, OutOfRange):
            check(ContentId(40, opaque=b"x"), ContentClaim(tokens, opaque=b"x"))


def test_opaque_ids_are_compared_whole() -> None:
    offer = ContentId(40, opaque=b"x")
    for wanted in (ContentClaim(40, opaque=b"y"), ContentClaim(32, opaque=b"x")):
        with refused(Reason.CONTENT_MISMATCH, PreconditionFailed):
            check(offer, wanted)


@given(st.integers(0, 100), st.integers(1, 100), st.integers(1, 100))
def test_a_prefix_is_as_many_whole_units_as_both_begin_with(same: int, offer: int, own: int) -> None:
    """If all wanted tokens are the same, all are used; otherwise no token is used that was not proved equal."""
    offered = chain([*range(min(same, offer)), *range(1000, 1000 + max(offer - same, 0))])
    mine = chain([*range(min(same, own)), *range(2000, 2000 + max(own - same, 0))], also_at=offer)
    if offer > own and own < 16:
        return
    asked = claim(mine, offer, 0, prefix=True)
    common = asked.tokens if same >= asked.tokens else min(same, offer, own) // 16 * 16
    if common:
        assert check(offered, asked) == common
    else:
        with refused(Reason.CONTENT_MISMATCH, PreconditionFailed):
            check(offered, asked)


def test_a_claim_states_digests_of_whole_units_only() -> None:
    own = chain(FORTY)
    assert claim(own, 40, 0).prefix == b""
    assert claim(own, 40, 0, prefix=True).prefix == own.digests[:64]
    for stated in (own.digests, own.digests[:33]):
        with refused(Reason.INVALID_FIELD, InvalidRequest):
            ContentClaim(40, own.digest(40), prefix=stated)


def test_a_claim_of_too_many_tokens_states_none() -> None:
    """A larger claim would exceed the size of a message."""
    tokens = PREFIX_BYTES_MAX // 2
    for more, stated in ((0, PREFIX_BYTES_MAX), (16, 0)):
        own = ContentId(tokens + more, bytes((tokens + more) * 2))
        assert len(claim(own, tokens + more, 0, prefix=True).prefix) == stated
