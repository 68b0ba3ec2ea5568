"""EndpointSlices as candidates: which endpoints count, and what is known of them."""

from typing import Any

import pytest

from kvgrpc.fleet.entry import EngineRole
from kvgrpc.registry.introductions import Candidate
from kvgrpc.registry.kubernetes.slices import candidates
from tests.registry.apiservers import endpoint, slice_of


def of(*slices: dict[str, Any], domain: str = "") -> list[Candidate]:
    return candidates(slices, "grpc", domain)


def test_an_endpoint_is_a_candidate_with_what_service_and_slice_say_of_it() -> None:
    said = {"kvgrpc.dev/role": "prefill", "kvgrpc.dev/tenant": "t1", "other": "x"}
    one = slice_of("s", endpoint("p-0", "10.0.0.1"), annotations=said)
    key = "llm/p-0:50051"
    expected = Candidate(key, "10.0.0.1:50051", EngineRole.PREFILL, "t1", "node-1", draining=False)
    assert of(one) == [expected]
    # What nobody says is left to the lead; an unknown role, too.
    for annotations in ({}, {"kvgrpc.dev/role": "chief"}, None):
        assert of(slice_of("s", endpoint("p-0", "10.0.0.1"), annotations=annotations)) == [
            Candidate(key, "10.0.0.1:50051", host="node-1")
        ]


@pytest.mark.parametrize(
    ("ready", "serving", "terminating", "listed", "draining"),
    [
        (True, True, False, True, False),
        (None, None, None, True, False),  # what is not known counts as good
        (True, None, None, True, False),
        (False, None, None, False, False),
        (False, False, False, False, False),  # the engine loads its weights
        (True, False, False, False, False),  # the same behind a Service that publishes what is not ready
        (False, True, True, True, True),  # the pod ends, and still serves
        (True, True, True, True, True),
        (False, False, True, False, False),
    ],
)
def test_readiness_decides_who_is_listed_and_who_takes_no_new_work(
    ready: bool | None, serving: bool | None, terminating: bool | None, listed: bool, draining: bool
) -> None:
    one = endpoint("p-0", "10.0.0.1")
    one["conditions"] = {"ready": ready, "serving": serving, "terminating": terminating}
    assert [found.draining for found in of(slice_of("s", one))] == ([draining] if listed else [])


def test_a_pod_in_several_slices_is_one_candidate() -> None:
    ends = slice_of("old", endpoint("p-0", "10.0.0.1", terminating=True))
    lives = slice_of("new", endpoint("p-0", "10.0.0.1"))
    six = slice_of("six", endpoint("p-0", "fd00::1"), addressType="IPv6")
    for slices in ((ends, lives, six), (six, lives, ends)):
        assert [(one.address, one.draining) for one in of(*slices)] == [("10.0.0.1:50051", False)]
    assert [one.address for one in of(six)] == ["[fd00::1]:50051"]


def test_a_pod_with_a_host_name_is_called_by_name_where_the_domain_is_known() -> None:
    named, unnamed = endpoint("p-0", "10.0.0.1"), endpoint("p-1", "10.0.0.2")
    del unnamed["hostname"]
    found = of(slice_of("s", named, unnamed), domain="svc")
    assert [one.address for one in found] == ["p-0.kv.llm.svc:50051", "10.0.0.2:50051"]


def test_a_slice_without_the_port_and_an_endpoint_without_an_address_are_left_out() -> None:
    one = endpoint("p-0", "10.0.0.1")
    assert not of(slice_of("s", one, ports=[{"name": "http", "port": 8000}]))
    assert not of(slice_of("s", one, ports=None))
    assert not of(slice_of("s", one, endpoints=None))
    assert not of(slice_of("s", {**one, "addresses": []}))
    assert not of({})


def test_an_endpoint_without_a_pod_is_known_by_its_address() -> None:
    one = endpoint("", "10.0.0.9")
    del one["targetRef"]
    assert [found.key for found in of(slice_of("s", one))] == ["llm/10.0.0.9:50051"]
