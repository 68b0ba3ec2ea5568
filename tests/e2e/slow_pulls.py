"""A pull between two servers that is slow enough for one of them to fail while its bytes move."""

import re
from typing import Any

from kvgrpc.v1 import transfer_pb2
from tests.service.engines import SUCCEEDED, Engine, meet, wait_until
from tests.service.values import prompt

PENDING, ACTIVE = transfer_pb2.TRANSFER_STATE_PENDING, transfer_pb2.TRANSFER_STATE_ACTIVE
TOKENS = prompt(256)
BLOCKS = 16
# 16 blocks of 2 KiB take two seconds.
SLOW = ("--bandwidth-limit-bytes-per-s", "15000")
LIMITS = """[limits]
peer_grace_s = 3.0
connect_timeout_s = 10.0
queue_timeout_s = 3.0
transfer_timeout_s = 30.0
settle_timeout_s = 1.0
"""


def limits(**changes: float) -> str:
    """Returns LIMITS with some values changed."""
    lines = LIMITS
    for name, seconds in changes.items():
        lines, found = re.subn(rf"^{name} = .*$", f"{name} = {seconds}", lines, flags=re.MULTILINE)
        assert found == 1, name
    return lines


def begin_slow_pull(source: Engine, destination: Engine, **fields: Any) -> tuple[str, transfer_pb2.Transfer]:
    """Returns (lease id, pull) of a transfer whose bytes move."""
    meet(source, destination)
    handed = source.hand_over(TOKENS, **fields)
    pulled = destination.pull(handed.grant, TOKENS, destination.allocate(BLOCKS))
    wait_active(destination, pulled.transfer_id)
    return handed.lease.lease_id, pulled


def wait_active(destination: Engine, transfer_id: str) -> None:
    """Waits until the bytes of a transfer move."""
    wait_until(lambda: destination.get(transfer_id).state != PENDING)
    found = destination.get(transfer_id)
    assert found.state == ACTIVE, found


def check_a_good_pull(source: Engine, destination: Engine) -> None:
    blocks, target = source.allocate(2), destination.allocate(2)
    written = source.write(blocks, seed=99)
    grant = source.hand_over(prompt(32, seed=7), blocks).grant
    end = destination.wait(destination.pull(grant, prompt(32, seed=7), target).transfer_id)
    assert end.state == SUCCEEDED, end
    assert destination.read(target) == written
