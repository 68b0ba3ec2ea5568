"""Requests that wait in decode's queue for longer than the lifetime of what was prefilled for them."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import Engines, Pair, prompt_of, wait_until

LIFE_S = 3.0
"""Lifetime of what nobody renews, in seconds."""
LONG = 3_900
"""Number of tokens of an answer that occupies decode's only place."""


@pytest.fixture(scope="module", params=["push", "pull"])
def queueing(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Pair]:
    """Yields engines where decode computes one request at a time."""
    limits = {"registration_timeout_s": LIFE_S, "lease_ttl_s": LIFE_S, "firm_ttl_s": 0.5}
    with closing(
        Pair(engines, each={"D": {"max_num_seqs": 1, "max_model_len": 4_000}}, mode=request.param, limits=limits)
    ) as pair:
        pair.start()
        yield pair


def outlives(pair: Pair) -> None:
    """Waits until what the next request in the queue takes has outlived its own lifetime."""

    def ages() -> list[float]:
        with pair.p.lead() as lead:
            return [lease.age.ToNanoseconds() / 1e9 for lease in lead.list_leases().leases]

    wait_until(lambda: not ages() or max(ages()) > 2 * LIFE_S)
    assert ages()


def test_what_was_prefilled_lasts_while_its_request_is_in_the_queue(queueing: Pair) -> None:
    pair, prompt = queueing, prompt_of(300, 1)
    expected, before = pair.expected(prompt), received(pair.d)
    busy = pair.d.begin(prompt_of(20, 2), max_tokens=LONG)
    waits = pair.d.begin(prompt, pair.prefilled(prompt))
    outlives(pair)
    assert not pair.d.answered(waits)
    pair.d.abort(busy)
    answer = pair.d.answer(waits)
    assert (answer.tokens, answer.failed) == (expected, False)
    assert received(pair.d) > before
    pair.at_rest()


def test_what_a_request_waited_for_that_left_the_queue_is_kept_no_longer(queueing: Pair) -> None:
    pair, prompt = queueing, prompt_of(300, 3)
    busy = pair.d.begin(prompt_of(20, 4), max_tokens=LONG)
    waits = pair.d.begin(prompt, pair.prefilled(prompt))
    outlives(pair)
    pair.d.abort(waits)
    wait_until(lambda: not pair.p.held(), pair.p.held)
    assert not pair.d.answered(busy)
    pair.d.abort(busy)
    pair.at_rest()
