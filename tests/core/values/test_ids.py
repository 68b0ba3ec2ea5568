"""Identifiers contain their incarnation, and lease ids cannot be guessed."""

import re

from kvgrpc.core.values.ids import LABEL_BYTES_MAX, format_incarnation, mint_id, mint_lease_id, peer_key, request_label


def test_an_incarnation_is_written_in_16_hex_digits() -> None:
    assert format_incarnation(0) == "0" * 16
    assert format_incarnation(2**64 - 1) == "f" * 16


def test_ids_say_what_they_are_and_whose() -> None:
    assert re.fullmatch(r"l-00000000000000ab-[0-9a-f]{32}", mint_lease_id(b"s", 0xAB, "lead", 7))
    for kind in ("transfer", "blocks"):
        made = mint_id(b"s", 0xAB, kind, "lead", 7)
        assert re.fullmatch(rf"{kind[0]}-00000000000000ab-[0-9a-f]{{32}}", made)
    assert peer_key("p", 0xAB) == "p@00000000000000ab"


def test_ids_of_two_incarnations_differ() -> None:
    assert mint_id(b"s", 1, "transfer", "lead", 5) != mint_id(b"s", 2, "transfer", "lead", 5)
    assert mint_lease_id(b"s", 1, "lead", 5) != mint_lease_id(b"s", 2, "lead", 5)
    assert peer_key("p", 1) != peer_key("p", 2)


def test_a_lease_id_depends_on_the_secret_the_minter_and_the_number() -> None:
    made = {
        mint_lease_id(secret, 1, minter, number)
        for secret in (b"s", b"t")
        for minter in ("lead", "engine")
        for number in (1, 11)
    }
    assert len(made) == 8
    assert mint_lease_id(b"s", 1, "lead", 1) == mint_lease_id(b"s", 1, "lead", 1)


def test_no_two_lives_have_one_key_whatever_the_engine_is_called() -> None:
    assert peer_key("p@" + "0" * 16, 1) != peer_key("p", 0)


def test_a_label_is_the_id_or_fits_and_differs_from_those_of_other_ids() -> None:
    for id_ in ("", "r1", "é" * 128, "r" * LABEL_BYTES_MAX):
        assert request_label(id_) == id_
    long = ["r" * 257, "r" * 258, "é" * 129, "é" * 130, "\U0001f600" * 70, "r" * 300 + "\ud800"]
    labels = [request_label(id_) for id_ in long]
    assert len(set(labels)) == len(long)
    assert all(LABEL_BYTES_MAX - 4 < len(label.encode()) <= LABEL_BYTES_MAX for label in labels)
    assert labels[0].startswith("r" * 200)
    assert request_label("\ud800") == "?"
