"""The lead's end of the void page: it finds the lease of a flag, whatever an engine names and sets."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvgrpc.core.tables.leases import LeaseTable
from kvgrpc.errors import InvalidRequest
from kvgrpc.service.session.void_page import SLOTS, VoidPage


@pytest.fixture
def page() -> Iterator[VoidPage]:
    made = VoidPage()
    yield made
    made.close()
    made.close()


def flag(page: VoidPage, slot: int, value: int = 1) -> None:
    """Sets a flag like an engine does, through the same descriptor."""
    os.pwrite(page.fd, bytes([value]), slot - 1)


def test_a_flag_tells_of_the_lease_of_its_slot_until_that_has_ended(page: VoidPage) -> None:
    page.name(1, "l-1")
    page.name(SLOTS, "l-2")
    page.name(1, "l-1")
    assert page.voided() == ()
    flag(page, SLOTS)
    flag(page, 7)
    assert page.voided() == ("l-2",)
    page.ended("l-2")
    page.ended("l-2")
    assert page.voided() == ()
    flag(page, SLOTS, 0)
    page.name(SLOTS, "l-3")
    assert page.voided() == ()


def test_flags_of_slots_that_no_lease_has_tell_nothing(page: VoidPage) -> None:
    os.pwrite(page.fd, b"\1" * SLOTS, 0)
    assert page.voided() == ()
    page.name(SLOTS, "l-2")
    page.name(1, "l-1")
    page.name(2, "l-3")
    flag(page, 2, 0)
    assert sorted(page.voided()) == ["l-1", "l-2"]


@pytest.mark.parametrize(
    ("slot", "lease_id"), [(0, "l-9"), (SLOTS + 1, "l-9"), (1, "l-9"), (2, "l-1"), (3, "")],
    ids=["no slot", "a slot that is not there", "a slot in use", "a second slot", "no lease"],
)  # fmt: skip
def test_a_slot_that_cannot_be_is_refused_and_changes_nothing(page: VoidPage, slot: int, lease_id: str) -> None:
    page.name(1, "l-1")
    with pytest.raises(InvalidRequest):
        page.name(slot, lease_id)
    flag(page, 1)
    assert page.voided() == ("l-1",)
    page.ended("l-1")
    page.name(2, "l-1")
    page.name(1, "l-9")
    assert page.voided() == ("l-9",)


def test_the_slot_of_a_hand_over_that_was_refused_is_free(page: VoidPage) -> None:
    page.name(1, "l-1")
    page.refused("l-1", LeaseTable(4))
    page.name(1, "l-2")


def test_no_process_can_shrink_the_page_under_its_reader(page: VoidPage) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(page.fd, 0)


# An engine process that sets and clears all flags as fast as it can, until it is killed.
ENGINE = f"""
import mmap, sys
page = mmap.mmap(int(sys.argv[1]), {SLOTS})
print(flush=True)
while True:
    page[:] = bytes({SLOTS})
    page[:] = b"\\1" * {SLOTS}
"""


def test_an_engine_may_set_flags_at_any_moment(page: VoidPage) -> None:
    page.name(1, "l-1")
    with subprocess.Popen([sys.executable, "-c", ENGINE, str(page.fd)], pass_fds=[page.fd], stdout=-1) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        try:
            assert {page.voided() for _ in range(2000)} <= {(), ("l-1",)}
        finally:
            engine.kill()
