"""What callers of FleetService can make a server do is bounded, measured against other calls on the same machine."""

from pathlib import Path

import grpc
import pytest

from kvgrpc.v1 import common_pb2, fleet_pb2
from tests.service.conftest import Start
from tests.service.engines import Engine, wait_until
from tests.service.fleet.conftest import EnginesFile, row

CALLS = 12
HEAVY = bytes(32) * 120_000
"""Digests of the longest chain that a message holds."""


def spent_s(engine: Engine) -> float:
    """Returns the processor time of a server, in ticks."""
    fields = Path(f"/proc/{engine.process.pid}/stat").read_text().rpartition(")")[2].split()
    return float(fields[11]) + float(fields[12])


def test_a_pick_for_the_longest_prompt_costs_little_more_than_to_read_the_request(
    start: Start, engines_file: EnginesFile
) -> None:
    lead, other = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead), row(other)])
    whole = common_pb2.ContentChain(digests=HEAVY, token_count=120_000 * 16)
    wait_until(lambda: lead.api.fleet.PickPair(fleet_pb2.PickPairRequest(chain=whole)).HasField("prefill"))
    began = spent_s(lead)
    for _ in range(CALLS):
        lead.api.fleet.PickPair(fleet_pb2.PickPairRequest(chain=whole))
    picking = spent_s(lead) - began
    wrong = common_pb2.ContentChain(digests=HEAVY, token_count=16)
    began = spent_s(lead)
    for _ in range(CALLS):
        with pytest.raises(grpc.RpcError):
            lead.api.fleet.PickPair(fleet_pb2.PickPairRequest(chain=wrong))
    refusing = spent_s(lead) - began
    assert picking < 4 * refusing + 20


def test_a_lead_whom_nobody_asks_checks_nobody(start: Start, engines_file: EnginesFile) -> None:
    lead, asked = start(("--engine-id", "a"), ("--engine-id", "b"), **engines_file.environment)
    engines_file.write([row(lead), row(asked)])
    wait_until(lambda: asked.api.fleet.PickPair(fleet_pb2.PickPairRequest()).HasField("prefill"))
    found = Path(f"/proc/{lead.process.pid}/net/tcp").read_text()
    port = f":{int(asked.address.rpartition(':')[2]):04X}"
    inodes = {line.split()[9] for line in found.splitlines()[1:] if line.split()[2].endswith(port)}
    own = {str(link.readlink()) for link in Path(f"/proc/{lead.process.pid}/fd").iterdir() if link.is_symlink()}
    assert not {f"socket:[{inode}]" for inode in inodes} & own, "no connection to the other lead"
