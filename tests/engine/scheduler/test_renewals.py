"""Leases for a scheduler's requests last while the requests wait for blocks, or for the start of their prefill."""

from collections.abc import Iterator

import pytest

from kvgrpc.core.policy.values import LoadEnded, ModeChoice, Outcome, SendEnded
from kvgrpc.engine.scheduler import ScheduledRequest, Source
from kvgrpc.v1 import transfer_pb2
from tests.engine.conftest import SETTINGS, Attach, Leads
from tests.engine.scheduler.schedulers import PROMPT, TARGET, At, R, give, same
from tests.engine.support import Lead

LIFE_S = 0.5
"""Life of an unrenewed lease at the source, in seconds."""


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lead]:
    """Yields a lead on which the other side of a push must come soon."""
    settings = f"{SETTINGS}registration_timeout_s = {LIFE_S}\n"
    lead = Lead(tmp_path_factory.mktemp("hasty"), "H", settings=settings)
    try:
        yield lead.wait_ready()
    finally:
        lead.close()


def waiting(p: At, d: At, *, keep: bool = False) -> ScheduledRequest:
    """Sends `d` a request for KV that `p` will push, and returns the other leg of the request."""
    prefill = give(ModeChoice.PUSH)
    take = Source(p.side.engine.address, keep=keep)
    d.scheduler.arrived(ScheduledRequest(R, PROMPT, transfer_key=prefill.transfer_key, take=take))
    return prefill


def outlives(d: At, hasty: Lead) -> None:
    """Checks that a lease at the source gets four times as old as without renewals."""
    d.until(lambda: any(lease.age.ToNanoseconds() > 4e9 * LIFE_S for lease in hasty.leases()) or not hasty.leases())
    assert hasty.leases()


def test_what_is_pushed_lasts_while_its_request_waits_for_blocks(hasty: Lead, leads: Leads, attach: Attach) -> None:
    p, d = At(attach(hasty)), At(attach(leads[1]), renew_s=LIFE_S / 10)
    p.prefilled(waiting(p, d))
    outlives(d, hasty)
    d.load()
    assert d.told(LoadEnded).loss is None
    assert same(p, d)
    assert p.told(SendEnded).loss is None


@pytest.mark.parametrize("left", ["finished", "aborted"])
def test_nothing_is_renewed_for_a_request_that_left(hasty: Lead, leads: Leads, attach: Attach, left: str) -> None:
    p, d = At(attach(hasty)), At(attach(leads[1]), renew_s=LIFE_S / 10)
    p.prefilled(waiting(p, d, keep=True))
    outlives(d, hasty)
    if left == "aborted":
        d.scheduler.aborted(R)
    else:
        d.scheduler.finished(R, PROMPT, TARGET, 0, Outcome.ABORTED)
    d.until(lambda: not hasty.leases())
    assert p.told(SendEnded).loss is not None


def test_a_prefill_that_is_expected_is_waited_for(hasty: Lead, leads: Leads, attach: Attach) -> None:
    p = At(attach(hasty, expects_pushes=True))
    d = At(attach(leads[1]), renew_s=LIFE_S / 10)
    prefill = waiting(p, d)
    d.load()
    p.scheduler.arrived(prefill)

    def outlived() -> bool:
        p.scheduler.step()
        pending = transfer_pb2.TransferFilter(states=[transfer_pb2.TRANSFER_STATE_PENDING])
        found = hasty.api.transfers.ListTransfers(transfer_pb2.ListTransfersRequest(filter=pending)).transfers
        return any(transfer.age.ToNanoseconds() > 4e9 * LIFE_S for transfer in found)

    d.until(outlived)
    p.scheduler.allocated(R, [[1, 2, 9]], 0, 0)
    p.side.fill([1, 2, 9], 1)
    p.scheduler.finished(R, PROMPT, [[1, 2, 9]], len(PROMPT), Outcome.COMPLETE)
    p.scheduler.step()
    assert d.told(LoadEnded).loss is None
    assert same(p, d)
