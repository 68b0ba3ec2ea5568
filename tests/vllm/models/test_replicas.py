"""A data-parallel engine: its replicas share only their configuration, and each has a lead of its own."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvgrpc.client import connect_sync
from kvgrpc.core.values.grants import from_json, read_claims
from tests.vllm.engines import HELD, LEAD, PREFILL, Engine, Engines, Pair, prompt_of, pushed, wait_until

REPLICAS = 2
PROMPT_TOKENS = 300
PULLED, PUSHED = ([prompt_of(PROMPT_TOKENS, 10 * way + replica) for replica in range(REPLICAS)] for way in range(2))
"""Prompts that move from each replica."""


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Iterator[Pair]:
    """Yields P with two replicas, and D alone. Afterwards neither may hold anything."""
    with closing(Pair(engines, each={"P": {"data_parallel_size": REPLICAS}})) as made:
        made.start()
        yield made
        for replica in range(REPLICAS):
            wait_until(lambda replica=replica: not held(made.p, replica))  # type: ignore[misc]
            made.p.ask([5, 6, 7], None, 1, replica=replica)  # an idle vLLM hears in its next step what came back
        wait_until(made.p.forgets)
        wait_until(lambda: made.d.held() == {}, made.d.held)
        wait_until(made.d.rests)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """Returns D's own tokens of each prompt, pulled ones first. D then forgets the prompts."""
    found = [pair.d.ask(prompt).tokens for prompt in (*PULLED, *PUSHED)]
    assert pair.d.forgets()
    return found


def address_of(engine: Engine, replica: int) -> str:
    """Returns the address of a replica's lead."""
    host, _, port = engine.address.rpartition(":")
    return f"{host}:{int(port) + replica}"


def held(engine: Engine, replica: int) -> dict[str, int]:
    with connect_sync(address_of(engine, replica)) as lead:
        counts = lead.status().counts
    return {name: getattr(counts, name) for name in HELD if getattr(counts, name)}


def taken(pair: Pair, before: dict[str, int]) -> tuple[int, int]:
    """Returns the requests whose KV D received since, and the tokens that it did not compute by vLLM's own count."""
    after = pair.d.counts()
    return tuple(after.get(name, 0) - before.get(name, 0) for name in ("received", "external_hits"))  # type: ignore[return-value]


def test_each_replica_has_a_lead_at_the_next_port_with_an_id_of_its_own(pair: Pair) -> None:
    assert len(pair.p.tree(LEAD)) == REPLICAS
    for replica in range(REPLICAS):
        with connect_sync(address_of(pair.p, replica)) as lead:
            assert lead.status().header.engine_id == f"P_dp{replica}"


@pytest.mark.parametrize("replica", range(REPLICAS))
def test_d_pulls_from_either_replica(pair: Pair, expected: list[list[int]], replica: int) -> None:
    before = pair.d.counts()
    params = pair.prefilled(PULLED[replica], replica=replica)
    assert read_claims(from_json(params)).address == address_of(pair.p, replica)
    assert pair.d.ask(PULLED[replica], params).tokens == expected[replica]
    wait_until(lambda: taken(pair, before) == (1, PROMPT_TOKENS))


@pytest.mark.parametrize("replica", range(REPLICAS))
def test_either_replica_pushes_to_d(pair: Pair, expected: list[list[int]], replica: int) -> None:
    before, key = pair.d.counts(), os.urandom(16)
    source = {"do_remote_prefill": True, **pushed(key, address_of(pair.p, replica))}
    decode = pair.d.begin(PUSHED[replica], source)
    prefill = pair.p.begin(PUSHED[replica], {**PREFILL, **pushed(key)}, 1, replica=replica)
    assert not pair.p.answer(prefill).failed
    assert pair.d.answer(decode).tokens == expected[REPLICAS + replica]
    wait_until(lambda: taken(pair, before) == (1, PROMPT_TOKENS))
