"""Senders and receivers whose lead dies at a bad moment."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.managers import (
    FAILED,
    PAGE_TOKENS,
    PAGES,
    SUCCESS,
    Side,
    numbers,
    polled_until,
    receives,
    registered,
    replaced,
    request,
    sends,
    side,
)


@pytest.fixture(scope="module")
def prefill(folder: Path) -> Iterator[Side]:
    with side("prefill", folder / "model") as made:
        yield made


@pytest.fixture(scope="module")
def decode(folder: Path) -> Iterator[Side]:
    with side("decode", folder / "model") as made:
        yield made


def hand_over(prefill: Side, decode: Side, room: int, rid: str = "") -> None:
    """Moves two pages and their aux, and compares the bytes."""
    for number, array in enumerate((*prefill.kv, *prefill.aux)):
        array[:3] = (number + room) % 251
    req = request(2 * PAGE_TOKENS, room)
    req.rid = rid or req.rid
    sender, receiver = sends(prefill, req, (1, 2)), receives(decode, prefill, req, (4, 5), 1)
    registered(sender, receiver)
    sender.send(numbers((1,)))
    sender.send(numbers((2,)))
    polled_until(lambda: receiver.poll() == sender.poll() == SUCCESS, lambda: (sender._failure, receiver._failure))
    for here, there in zip(decode.kv, prefill.kv, strict=True):
        assert (here[4:6] == there[1:3]).all()
    for here, there in zip(decode.aux, prefill.aux, strict=True):
        assert (here[1] == there[0]).all()


def test_a_request_is_handed_over(prefill: Side, decode: Side) -> None:
    hand_over(prefill, decode, 1)


def test_a_request_with_a_long_id_is_handed_over(prefill: Side, decode: Side) -> None:
    hand_over(prefill, decode, 5, rid="r" * 300)


def test_a_first_chunk_that_prefills_lead_refuses_fails_its_request_at_decode(prefill: Side, decode: Side) -> None:
    req = request(2 * PAGE_TOKENS, 40)
    sender, receiver = sends(prefill, req, (40, PAGES)), receives(decode, prefill, req, (40, 41))
    registered(sender, receiver)
    sender.send(numbers((PAGES,)))  # one more than there are
    polled_until(lambda: [sender.poll(), receiver.poll()] == [FAILED] * 2, lambda: (sender._failure, receiver._failure))
    assert "SOURCE_FAILED" in receiver._failure
    hand_over(prefill, decode, 6)


def test_an_engine_without_requests_replaces_its_dead_lead(prefill: Side, decode: Side) -> None:
    life = decode.engine.incarnation
    os.kill(decode.engine.lead_pid, signal.SIGKILL)
    replaced(decode, life)
    hand_over(prefill, decode, 7)


def test_the_death_of_decodes_lead_fails_all_that_wait_and_decode_takes_the_next_one(
    prefill: Side, decode: Side
) -> None:
    waiting = [
        receives(decode, prefill, request(PAGE_TOKENS, 10 + number), (10 + number,), number) for number in (0, 1, 2)
    ]
    os.kill(decode.engine.lead_pid, signal.SIGKILL)
    polled_until(
        lambda: [one.poll() for one in waiting] == [FAILED] * 3 and not any(not one._at_rest for one in waiting),
        lambda: [one._failure for one in waiting],
    )
    assert all("ENGINE_LOST" in one._failure for one in waiting)
    hand_over(prefill, decode, 2)


def test_a_first_chunk_between_two_leads_of_prefill_fails_its_request(prefill: Side, decode: Side) -> None:
    req = request(2 * PAGE_TOKENS, 20)
    sender, receiver = sends(prefill, req, (20, 21)), receives(decode, prefill, req, (20, 21))
    registered(sender, receiver)
    life = prefill.engine.incarnation
    os.kill(prefill.engine.lead_pid, signal.SIGKILL)
    polled_until(lambda: prefill.engine.lead_gone, lambda: "the lead lives")
    prefill.manager.hear()  # the engine sees it
    sender.send(numbers((20,)))
    assert sender.poll() == FAILED
    sender.abort()
    replaced(prefill, life)
    polled_until(lambda: receiver.poll() == FAILED, lambda: receiver._failure)
    hand_over(prefill, decode, 3)


def test_a_later_chunk_between_two_leads_fails_its_request_and_its_pages_come_back(prefill: Side, decode: Side) -> None:
    req = request(2 * PAGE_TOKENS, 30)
    sender, receiver = sends(prefill, req, (30, 31)), receives(decode, prefill, req, (30, 31))
    registered(sender, receiver)
    sender.send(numbers((30,)))
    life = prefill.engine.incarnation
    os.kill(prefill.engine.lead_pid, signal.SIGKILL)
    polled_until(lambda: prefill.engine.lead_gone, lambda: "the lead lives")
    sender.send(numbers((31,)))
    polled_until(lambda: sender.poll() == receiver.poll() == FAILED, lambda: (sender._failure, receiver._failure))
    replaced(prefill, life)
    hand_over(prefill, decode, 4)
