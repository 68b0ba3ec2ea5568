"""Beats to many peers: rarer than to few, never too late, and at moments that peers share."""

import math

from kvgrpc.service.peers.channel import BEAT_SLOTS, BEATS_PER_S, pause_to_beat

GRACE_S = 10.0
NOWS = (0.0, 0.39, 0.4, 1_234.567)


def test_a_beat_comes_within_a_third_of_the_grace_for_any_number_of_peers() -> None:
    late = [(peers, now) for peers in (1, 300, 500, 1_024) for now in NOWS if pause_to_beat(peers, GRACE_S, now) > 3.34]
    assert late == []
    assert all(1.5 < pause_to_beat(1, GRACE_S, now) <= GRACE_S / 5 for now in NOWS)


def test_a_lead_sends_a_bounded_number_of_beats_in_a_second() -> None:
    slot_s = GRACE_S / BEAT_SLOTS
    for peers in (1, 300, 450):
        assert peers / (pause_to_beat(peers, GRACE_S, 0.0) + slot_s) <= BEATS_PER_S


def test_beats_fall_on_moments_that_peers_share() -> None:
    slot_s = GRACE_S / BEAT_SLOTS
    ends = [(now + pause_to_beat(peers, GRACE_S, now)) / slot_s for peers in (1, 500) for now in NOWS]
    assert all(math.isclose(end, round(end), abs_tol=1e-6) for end in ends), ends
