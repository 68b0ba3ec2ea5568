"""`make overload`: the bytes of its calls, its figures, and a short run of its load generator."""

import pytest

from bench.overload import frames
from bench.overload.other import Seen
from bench.overload.run import WINDOW_SLOTS, Flooded, full_speed_s, percentile, summary


def taken(data: bytes) -> tuple[list[frames.Frame], bytearray]:
    buffer = bytearray(data)
    return list(frames.frames(buffer)), buffer


def test_whole_frames_are_taken_and_a_part_of_one_is_left() -> None:
    call = frames.call(5, b"block", b"body")
    found, left = taken(call + call[:3])
    assert [(one.kind, one.stream) for one in found] == [(frames.HEADERS, 5), (frames.DATA, 5)]
    assert found[1].payload == b"\0\0\0\0\x04body"
    assert found[1].flags == frames.END_STREAM
    assert bytes(left) == call[:3]


def test_settings_say_how_many_streams_a_connection_may_have() -> None:
    said = frames.STREAMS_SETTING.to_bytes(2, "big") + (100).to_bytes(4, "big")
    assert frames.streams_of(b"\0\4\0\0\0\1" + said) == 100
    assert frames.streams_of(b"") == 0


@pytest.mark.parametrize(
    ("trailers", "found"),
    [
        (b"\x0bgrpc-status\x010", (0, "")),
        (b"\x0bgrpc-status\x018\x0cgrpc-message\x05later", (8, "")),
        (b"\x0bgrpc-status\x018...\x0a\x0eLIMIT_EXCEEDED\x12\x06kvgrpc", (8, "LIMIT_EXCEEDED")),
        (b"nothing", (-1, "")),
    ],
)
def test_the_status_and_the_reason_of_an_answer_are_found(trailers: bytes, found: tuple[int, str]) -> None:
    assert frames.status_of(trailers) == found


def test_a_percentile_is_a_time_that_was_measured() -> None:
    assert percentile([], 99) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(time) for time in range(1, 101)], 99) == 99.0


def _slots(*served: int) -> dict[str, int]:
    return {str(slot): count for slot, count in enumerate(served)}


def test_full_speed_lasts_for_half_a_second() -> None:
    full = [10] * WINDOW_SLOTS
    assert full_speed_s(_slots(*full), 100.0) == 0.0
    assert full_speed_s(_slots(0, 0, *full), 100.0) == pytest.approx(0.2)
    assert full_speed_s(_slots(10, 0, 10, 0, 10), 100.0) is None


def test_figures_are_medians_over_rounds_that_have_them() -> None:
    rounds: list[dict[str, object]] = [{"p99_s": time_s, "refused": {}} for time_s in (1.0, 3.0, None)]
    found = summary(100.0, 1000.0, rounds)
    assert found["median_p99_s"] == 2.0
    assert "median_refused" not in found
    assert found["rounds"] == rounds


def test_what_others_met_in_a_flood_is_what_they_met_in_its_first_second_and_later() -> None:
    first, later = Seen(unary=[0.4]), Seen(pulls=[0.1], health=[0.02])
    flooded = Flooded({}, first, later, [])
    first.unary.append(0.9)  # a pull that began in the first second, and ended later
    assert flooded.seen == Seen(pulls=[0.1], unary=[0.4, 0.9], health=[0.02])
