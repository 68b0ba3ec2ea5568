"""A pull between two servers whose bytes are on their way when something happens to one of them."""

from typing import Any

from kvgrpc.v1 import transfer_pb2
from tests.service.engines import SUCCEEDED, Engine, wait_until
from tests.service.values import prompt

ACTIVE = transfer_pb2.TRANSFER_STATE_ACTIVE
TOKENS = prompt(256)
BLOCKS = 16
# 16 blocks of 2 KiB take half a second.
SLOW = ("--bandwidth-limit-bytes-per-s", "60000")
LIMITS = """[limits]
peer_grace_s = 0.6
connect_timeout_s = 1.0
queue_timeout_s = 3.0
transfer_timeout_s = 3.0
settle_timeout_s = 1.0
"""


def begin_slow_pull(source: Engine, destination: Engine, **fields: Any) -> tuple[str, transfer_pb2.Transfer]:
    """(lease, pull) of a transfer whose bytes are on their way."""
    handed = source.hand_over(TOKENS, **fields)
    pulled = destination.pull(handed.grant, TOKENS, destination.allocate(BLOCKS))
    wait_until(lambda: destination.get(pulled.transfer_id).state == ACTIVE)
    return handed.lease.lease_id, pulled


def check_a_good_pull(source: Engine, destination: Engine) -> None:
    blocks, target = source.allocate(2), destination.allocate(2)
    written = source.write(blocks, seed=99)
    grant = source.hand_over(prompt(32, seed=7), blocks).grant
    assert destination.wait(destination.pull(grant, prompt(32, seed=7), target).transfer_id).state == SUCCEEDED
    assert destination.read(target) == written
