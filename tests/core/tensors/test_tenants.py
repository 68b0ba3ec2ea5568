"""Tenants: a tensor of a tenant is unknown to callers of another one, and the house knows of all."""

import pytest

from kvgrpc.core.tensors.descriptions import ExpectedTensor, WantedTensor
from kvgrpc.core.tensors.rows import Purpose
from kvgrpc.errors import AlreadyExists, KVGrpcError, PreconditionFailed, Reason
from tests.core.tensors.made_tensors import named, store

RED, BLUE, HOUSE = "red", "blue", ""
OTHER = ExpectedTensor(dtype="float64")


def test_a_tensor_is_given_to_its_tenant_and_the_house_and_to_nobody_else() -> None:
    for first in (True, False):
        made = store()
        if first:
            made.store("a", tenant=RED)
        calls = {tenant: made.ask("a", tenant=tenant) for tenant in (BLUE, RED, HOUSE)}
        if not first:
            made.store("a", tenant=RED)
        assert made.answers.keys() == {calls[RED], calls[HOUSE]}
        made.pass_time(10.0)
        late = made.answers[calls[BLUE]]
        assert isinstance(late, KVGrpcError)
        assert late.reason is Reason.DEADLINE


def test_a_tensor_of_the_house_is_given_to_every_tenant() -> None:
    made = store()
    made.store("a")
    calls = [made.ask("a", tenant=tenant) for tenant in (RED, BLUE)]
    assert made.answers.keys() == set(calls)


def test_an_offer_is_given_to_its_tenant_and_the_house_and_to_nobody_else() -> None:
    made = store()
    early = {tenant: made.ask("a", Purpose.OFFERED, tenant=tenant) for tenant in (BLUE, RED, HOUSE)}
    made.table.offered(made.offer("a", tenant=RED), b"token", "t-1")
    made.take()
    assert made.answers.keys() == {early[RED], early[HOUSE]}
    late = {tenant: made.ask("a", Purpose.OFFERED, tenant=tenant) for tenant in (BLUE, RED)}
    assert late[RED] in made.answers
    assert late[BLUE] not in made.answers
    with pytest.raises(AlreadyExists):
        made.ask("a", tenant=RED)  # its own engine's is not for the engine
    assert made.ask("a", tenant=BLUE) not in made.answers


def test_offers_of_two_tenants_do_not_go_together() -> None:
    made = store()
    for name, tenant in (("a", RED), ("b", BLUE), ("c", RED)):
        made.table.offered(made.offer(name, allocation=f"b-{name}", tenant=tenant), b"token", f"t-{name}")
    wanted = [WantedTensor(named(name)) for name in "abc"]
    found = {tenant: made.table.kept.together(wanted, 8, tenant) for tenant in (RED, BLUE, HOUSE)}
    names = {tenant: [offer.id.name for offer in offers] for tenant, offers in found.items()}
    assert names == {RED: ["a", "c"], BLUE: ["b"], HOUSE: ["a", "c"]}


def test_a_name_that_a_tenant_has_is_taken_for_others() -> None:
    made = store()
    made.store("a", tenant=RED)
    with pytest.raises(AlreadyExists):
        made.arrive("a", tenant=BLUE)
    made.offer("b", tenant=RED)
    with pytest.raises(AlreadyExists):
        made.offer("b", tenant=BLUE)


def test_what_another_tenant_expects_refuses_no_tensor() -> None:
    made = store()
    call = made.ask("a", expected=OTHER, tenant=BLUE)
    made.store("a", tenant=RED)
    assert call not in made.answers
    made.ask("b", expected=OTHER, tenant=RED)
    with pytest.raises(PreconditionFailed):
        made.arrive("b", tenant=RED)


def test_a_release_ends_what_its_tenant_knows_of() -> None:
    made = store()
    made.store("a", tenant=RED)
    made.store("b", tenant=BLUE)
    made.store("c")
    calls = {tenant: made.ask("d", tenant=tenant) for tenant in (RED, BLUE, HOUSE)}
    assert made.release("a", tenant=BLUE) == []
    assert made.release(tenant=BLUE) == ["b", "c"]
    assert made.answers.keys() == {calls[BLUE], calls[HOUSE]}
    made.arrive("e", tenant=RED)
    for tenant in (BLUE, HOUSE):
        with pytest.raises(PreconditionFailed):
            made.arrive("f", tenant=tenant)
    assert sorted(made.release()) == ["a", "e"]
    with pytest.raises(PreconditionFailed):
        made.arrive("f", tenant=RED)


def test_whoever_waits_renews_what_its_tenant_knows_of() -> None:
    made = store()
    for name, tenant in (("a", RED), ("b", BLUE), ("c", HOUSE)):
        made.table.offered(made.offer(name, allocation=f"b-{name}", tenant=tenant), b"token", f"t-{name}")
    made.ask("z", tenant=RED)
    assert made.renewed == [[named("a"), named("c")]]
