"""Spans over real sockets: who may list them, and which."""

from pathlib import Path

import pytest

from kvgrpc.errors import PermissionDenied
from kvgrpc.service import telemetry
from kvgrpc.service.span_ring import RingSpans, SpanRing
from tests.identity.servers import People, serving

TOKENS = list(range(32))


async def test_a_viewer_of_a_tenant_sees_the_spans_of_its_tenants_transfers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = SpanRing(1_000)
    for name, value in (("installed", True), ("ring", ring), ("spans", RingSpans(ring, None))):
        monkeypatch.setattr(telemetry._Sdk, name, value)
    people = People(tmp_path)
    people.give(red="router@red", redviewer="viewer@red", blueviewer="viewer@blue", viewer="viewer")
    async with serving(people, "p") as server:
        async with people.client(server, "red") as red:
            handed = await red.finished_blocks(await red.allocate(2, ttl_s=60), TOKENS)
            await red.cancel(handed.transfer.transfer_id)
            with pytest.raises(PermissionDenied):
                await red.spans(transfer_id=handed.transfer.transfer_id)
        seen = {}
        for who in ("viewer", "redviewer", "blueviewer"):
            async with people.client(server, who) as client:
                by_transfer = await client.spans(transfer_id=handed.transfer.transfer_id)
                by_trace = await client.spans(trace_id=handed.transfer.trace_id)
                assert by_trace.spans == by_transfer.spans
                seen[who] = {span.name for span in by_transfer.spans}
    expected = {"kvgrpc.v1.HandoffService/FinishedBlocks", "kvgrpc.send"}
    assert seen["viewer"] >= expected
    assert seen["redviewer"] >= expected
    assert seen["blueviewer"] == set()
