"""The choice of a pair: compatible, healthy, cheapest, and soon."""

import random
import time
from hashlib import sha256

from kvgrpc.fleet.directory import Directory
from kvgrpc.fleet.entry import EngineEntry, EngineRole
from kvgrpc.fleet.history import EngineHistory
from kvgrpc.fleet.pairing import NoPair, PairPicker, PairRequest, PickedPair
from kvgrpc.fleet.prefixes import HOLDERS_MAX, STEP_UNITS, PrefixIndex
from tests.fleet.entries import entry, listing, proved

P, D = EngineRole.PREFILL, EngineRole.DECODE


def picker(*entries: EngineEntry) -> tuple[PairPicker, Directory]:
    directory = Directory()
    directory.listed(listing(*entries))
    return PairPicker(EngineHistory(proved(directory))), directory


def picked(by: PairPicker, now: float = 0.0, request: PairRequest | None = None) -> tuple[str, str]:
    found = by.pick_pair(request or PairRequest(), now)
    assert isinstance(found, PickedPair), found
    return found.prefill.entry.engine_id, found.decode.entry.engine_id


def chain(units: int, seed: int = 0) -> list[bytes]:
    return [sha256(f"{seed} {unit}".encode()).digest() for unit in range(units)]


def test_only_engines_with_one_model_and_one_layout_are_paired() -> None:
    made, _ = picker(
        entry("p", role=P), entry("other", role=D, layout="x"), entry("model", role=D, model="y"), entry("d", role=D)
    )  # fmt: skip
    assert picked(made) == ("p", "d")
    found = made.pick_pair(PairRequest(model="y"), 0.0)
    assert isinstance(found, NoPair)
    assert "0 prefill and 1 decode" in found.reason


def test_a_request_may_name_its_model_and_its_layout() -> None:
    rows = [("a", "m", "x"), ("a", "m", "y"), ("b", "m", "x")]
    made, _ = picker(
        *(
            entry(f"{role.value}-{name}-{layout}", role=role, model_name=name, model=model, layout=layout)
            for name, model, layout in rows
            for role in (P, D)
        )
    )
    assert picked(made, request=PairRequest(model_name="b")) == ("prefill-b-x", "decode-b-x")
    assert picked(made, request=PairRequest(layout="y")) == ("prefill-a-y", "decode-a-y")
    assert isinstance(made.pick_pair(PairRequest(model_name="b", layout="y"), 0.0), NoPair)


def test_an_engine_that_can_decode_is_found_alone() -> None:
    made, directory = picker(entry("p", role=P), entry("d", role=D), entry("both", model_name="b"))
    directory.loaded("both", 0.5, 0.0)
    found = [made.pick_alone(request, 0.0) for request in (PairRequest(), PairRequest(model_name="b"))]
    assert [one.entry.engine_id for one in found if one is not None] == ["d", "both"]
    assert made.pick_alone(PairRequest(exclude=frozenset({"d", "both"})), 0.0) is None


def test_an_engine_that_was_found_alone_counts_as_picked() -> None:
    made, _ = picker(entry("a", role=D), entry("b", role=D))
    found = [made.pick_alone(PairRequest(), 0.0) for _ in range(2)]
    assert {one.entry.engine_id for one in found if one is not None} == {"a", "b"}


def test_the_parts_of_a_cost_are_told() -> None:
    made, directory = picker(entry("p", role=P, host="h1"), entry("d", role=D, host="h2"))
    directory.loaded("p", 0.5, 0.0)
    found = made.pick_pair(PairRequest(chain=chain(4)), 0.0)
    assert isinstance(found, PickedPair)
    cost = found.cost
    assert (cost.prefill_load, cost.decode_load, cost.computed_share, cost.distance) == (0.5, 0.0, 1.0, 0.25)
    again = made.pick_pair(PairRequest(), 0.0)
    assert isinstance(again, PickedPair)
    assert again.cost.decode_load > 0.0, "the first pick counts"


def test_why_there_is_no_pair_counts_the_tenants_own_engines() -> None:
    made, _ = picker(entry("p", role=P, tenant="a"), entry("q", role=P, tenant="b"), entry("d", tenant="b", role=D))
    found = made.pick_pair(PairRequest(tenant="a"), 0.0)
    assert isinstance(found, NoPair)
    assert "engines: 1 healthy; compatible: 1 prefill and 0 decode" in found.reason


def test_why_there_is_no_pair_does_not_tell_whether_another_tenant_has_the_model() -> None:
    made, _ = picker(entry("q", role=P, tenant="b", model_name="theirs"))
    reasons = [made.pick_pair(PairRequest(tenant="a", model_name=name), 0.0).reason for name in ("theirs", "none")]
    assert reasons[0].replace("theirs", "none") == reasons[1]


def test_a_tenant_gets_its_engines_and_those_of_all() -> None:
    made, _ = picker(entry("p", role=P, tenant="a"), entry("d", role=D))
    assert picked(made, request=PairRequest(tenant="a")) == ("p", "d")
    assert isinstance(made.pick_pair(PairRequest(tenant="b"), 0.0), NoPair)
    mixed, _ = picker(entry("p-a", role=P, tenant="a"), entry("p", role=P), entry("d", role=D))
    assert picked(mixed, request=PairRequest(tenant="b")) == ("p", "d")


def test_an_engine_that_is_not_healthy_is_not_chosen() -> None:
    made, directory = picker(entry("p", role=P), entry("d1", role=D), entry("d2", role=D))
    (check,) = [due for due in directory.checks_due(5.0) if due.engine_id == "d1"]
    directory.failed(check, 5.0)
    assert picked(made) == ("p", "d2")
    found = made.pick_pair(PairRequest(), 100.0)
    assert isinstance(found, NoPair)
    assert found.reason.count("unproven") == 1
    assert "1 failed, 2 unproven" in found.reason


def test_an_excluded_engine_is_not_chosen() -> None:
    made, _ = picker(entry("p", role=P), entry("d1", role=D), entry("d2", role=D))
    assert picked(made, request=PairRequest(exclude=frozenset({"d1"}))) == ("p", "d2")


def test_an_engine_of_both_roles_is_no_pair_with_itself() -> None:
    alone, _ = picker(entry("a"))
    assert isinstance(alone.pick_pair(PairRequest(), 0.0), NoPair)
    two, _ = picker(entry("a"), entry("b"))
    assert sorted(picked(two)) == ["a", "b"]


def test_the_same_host_comes_first_until_it_is_too_busy() -> None:
    made, directory = picker(
        entry("p", role=P, host="h1"), entry("near", role=D, host="h1"), entry("far", role=D, host="h2")
    )
    directory.loaded("near", 0.2, 0.0)
    assert picked(made) == ("p", "near")
    directory.loaded("near", 0.4, 0.0)
    assert picked(made) == ("p", "far")


def test_engines_without_a_host_are_not_on_the_same_one() -> None:
    made, _ = picker(entry("p", role=P, host=""), entry("d", role=D, host=""))
    found = made.pick_pair(PairRequest(), 0.0)
    assert isinstance(found, PickedPair)
    assert not found.same_host


def test_the_holder_of_the_longest_prefix_computes_unless_it_is_busy() -> None:
    made, directory = picker(entry("p1", role=P), entry("p2", role=P), entry("d", role=D))
    prompt = chain(64)
    made.prefixes.add("p2", prompt[:32])
    request = PairRequest(chain=prompt)
    found = made.pick_pair(request, 0.0)
    assert isinstance(found, PickedPair)
    assert (found.prefill.entry.engine_id, found.prefix_units) == ("p2", 32)
    assert "p2 (load 0.00, 32 of 64 units held by earlier picks)" in found.reason
    directory.loaded("p2", 0.9, 0.0)
    assert picked(made, request=request) == ("p1", "d")


def test_what_a_lead_offers_counts_as_much_as_what_its_engine_was_picked_for_and_says_so() -> None:
    made, _ = picker(entry("p1", role=P), entry("p2", role=P), entry("p3", role=P), entry("d", role=D))
    prompt = chain(64)
    made.prefixes.add("p1", prompt[:16])
    book = made.offers.book("p2")
    book.began(1, b"".join(prompt[unit - 1] for unit in (1, 16, 32)))
    found = made.pick_pair(PairRequest(chain=prompt), 0.0)
    assert isinstance(found, PickedPair)
    assert (found.prefill.entry.engine_id, found.prefix_units, found.cost.computed_share) == ("p2", 32, 0.5)
    assert "p2 (load 0.00, 32 of 64 units held by offers of its lead)" in found.reason
    book.ended(1)
    found = made.pick_pair(PairRequest(chain=prompt), 0.0)
    assert isinstance(found, PickedPair)
    assert "p1 (load 0.00, 16 of 64 units held by earlier picks)" in found.reason


def test_the_decode_engine_that_holds_the_prompt_comes_first_among_those_on_other_hosts() -> None:
    made, directory = picker(
        entry("p", role=P, host="h1"), *(entry(f"d{n}", role=D, host=f"h{n}") for n in range(2, 6))
    )
    prompt = chain(64)
    made.offers.book("d5").began(1, b"".join(prompt[unit - 1] for unit in (1, 16, 32)))
    directory.loaded("d5", 0.1, 0.0)
    found = made.pick_pair(PairRequest(chain=prompt), 0.0)
    assert isinstance(found, PickedPair)
    assert (found.decode.entry.engine_id, found.decode_units, found.cost.distance) == ("d5", 32, 0.125)
    assert "d5 (load 0.10, 32 of 64 units held by offers of its lead)" in found.reason
    directory.loaded("d5", 0.2, 0.0)
    assert picked(made, request=PairRequest(chain=prompt))[1] != "d5", "moving half a prompt costs less than that load"


def test_picks_spread_before_engines_tell_their_load() -> None:
    made, _ = picker(*(entry(f"p{n}", role=P) for n in range(4)), *(entry(f"d{n}", role=D) for n in range(4)))
    pairs = [picked(made) for _ in range(8)]
    assert sorted(one for one, _ in pairs) == sorted([f"p{n}" for n in range(4)] * 2)
    assert picked(made, 14.0) is not None, "picks are forgotten"


def test_the_pair_is_the_cheapest_of_all() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        entries = [
            entry(f"e{n}", role=rng.choice(list(EngineRole)), host=rng.choice(["", "a", "b", "c"])) for n in range(12)
        ]
        made, directory = picker(*entries)
        loads = {one.engine_id: rng.random() for one in entries}
        for engine_id, load in loads.items():
            directory.loaded(engine_id, load, 0.0)
        prompt, held = chain(64), {one.engine_id: rng.choice([0, 0, 16, 64]) for one in entries}
        for engine_id, units in held.items():
            told = b"".join(prompt[unit - 1] for unit in (1, 16, 32, 48, 64) if unit <= units)
            made.offers.book(engine_id).began(1, told)
        lacked = {engine_id: 1 - units / 64 for engine_id, units in held.items()}
        costs = [
            loads[p.engine_id] + loads[d.engine_id] + lacked[p.engine_id]
            + (0.0 if p.host and p.host == d.host else 0.25 * lacked[d.engine_id])
            for p in entries for d in entries
            if p is not d and p.role is not D and d.role is not P
        ]  # fmt: skip
        found = made.pick_pair(PairRequest(chain=prompt), 0.0)
        assert isinstance(found, PickedPair)
        assert abs(found.cost.total - min(costs)) < 1e-9, seed


def test_an_index_of_prefixes_is_bounded() -> None:
    index = PrefixIndex(most=4)
    for seed in range(5):
        index.add("p", chain(STEP_UNITS, seed))
    assert len(index) == 4
    assert index.units_held(chain(STEP_UNITS, 0)) == {}
    assert index.units_held(chain(STEP_UNITS + 3, 4)) == {"p": STEP_UNITS}
    for number in range(HOLDERS_MAX + 2):
        index.add(f"e{number}", chain(1, 4))
    assert len(index.units_held(chain(1, 4))) == HOLDERS_MAX
    assert index.units_held([]) == {}


def test_a_pair_of_a_thousand_engines_is_chosen_much_sooner_than_a_listing_is_read() -> None:
    """Both are measured on the same machine: an absolute time would fail on a slow one."""
    entries = [entry(f"e{n}", role=P if n % 2 else D, host=f"h{n % 100}", model=f"m{n // 500}") for n in range(1_000)]
    directory = Directory()
    began = time.process_time()
    directory.listed(listing(*entries))
    reading = time.process_time() - began
    made = PairPicker(EngineHistory(proved(directory)))
    prompt = chain(256)
    made.prefixes.add("e1", prompt)
    began = time.process_time()
    for _ in range(50):
        picked(made, request=PairRequest(model="m0", chain=prompt))
    assert (time.process_time() - began) / 50 < reading / 4
