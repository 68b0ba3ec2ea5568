"""A data-parallel engine: its replicas share nothing but their configuration, and each has a lead of its own."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.core.values.grants import from_json, read_claims
from tests.vllm.engines import HELD, LEAD, PREFILL, Engine, Engines, Pair, prompt_of, pushed, wait_until

REPLICAS = 2
PROMPT_TOKENS = 300


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Iterator[Pair]:
    """P has two replicas, D is alone."""
    with closing(Pair(engines, each={"P": {"data_parallel_size": REPLICAS}})) as made:
        made.start()
        yield made


def address_of(engine: Engine, replica: int) -> str:
    """Where a replica's lead serves."""
    host, _, port = engine.address.rpartition(":")
    return f"{host}:{int(port) + replica}"


def held(engine: Engine, replica: int) -> dict[str, int]:
    with connect_sync(address_of(engine, replica)) as lead:
        counts = lead.status().counts
    return {name: getattr(counts, name) for name in HELD if getattr(counts, name)}


def test_each_replica_has_a_lead_at_the_next_port_with_an_id_of_its_own(pair: Pair) -> None:
    assert len(pair.p.tree(LEAD)) == REPLICAS
    for replica in range(REPLICAS):
        with connect_sync(address_of(pair.p, replica)) as lead:
            assert lead.status().header.engine_id == f"P_dp{replica}"


@pytest.mark.parametrize("replica", range(REPLICAS))
def test_d_pulls_from_either_replica(pair: Pair, replica: int) -> None:
    prompt = prompt_of(PROMPT_TOKENS, replica)
    expected = pair.expected(prompt)
    before = pair.d.counts()
    params = pair.prefilled(prompt, replica=replica)
    assert read_claims(from_json(params)).address == address_of(pair.p, replica)
    assert pair.d.ask(prompt, params).tokens == expected
    after = pair.d.counts()
    assert after["received"] == before.get("received", 0) + 1
    assert after["external_hits"] - before["external_hits"] == PROMPT_TOKENS - 1
    for number in range(REPLICAS):
        wait_until(lambda number=number: not held(pair.p, number))  # type: ignore[misc]


@pytest.mark.parametrize("replica", range(REPLICAS))
def test_either_replica_pushes_to_d(pair: Pair, replica: int) -> None:
    prompt, key = prompt_of(PROMPT_TOKENS, 10 + replica), os.urandom(16)
    expected = pair.expected(prompt)
    source = {"do_remote_prefill": True, **pushed(key, address_of(pair.p, replica))}
    decode = pair.d.begin(prompt, source)
    prefill = pair.p.begin(prompt, {**PREFILL, **pushed(key)}, 1, replica=replica)
    assert not pair.p.answer(prefill).failed
    assert pair.d.answer(decode).tokens == expected
    wait_until(lambda: not held(pair.p, replica))
