"""The storm of `make fleet`, short: real leads are killed and added while routers move KV over them."""

import json
import random
import subprocess
import sys

import pytest

from bench.fleet.storm.prompts import BLOCK_TOKENS, block_count, kv, prompt
from kvgrpc.core.values.limits import Limits
from tests.docs.pages import ROOT
from tests.registry.etcds import needs_etcd

STORM_S = 20


@needs_etcd
@pytest.mark.timeout(240)
def test_requests_over_leads_that_come_and_go_are_answered_rightly_or_end_in_a_typed_error() -> None:
    command = [sys.executable, "-m", "bench.fleet", "--json", "--parts", "storm", "--storm-s", str(STORM_S)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["storm"]
    assert found["kills"], found
    assert found["tries_failed"], f"no request met a lead that had died: {found}"
    for part in (found, found["quiet"]):
        assert part["answers"], found
        assert (part["wrong"], part["untyped"]) == (0, 0), found
        assert part["answers"] + part["typed"] == part["requests"], found
    assert found["held_blocks"] == 0, found
    assert found["slowest_s"] <= found["quiet"]["slowest_s"] + Limits().firm_ttl_s, found


def test_the_kv_of_a_block_depends_on_all_tokens_before_its_end() -> None:
    tokens = prompt(random.Random(1))
    other = [tokens[0] + 1, *tokens[1:]]
    assert len(kv(tokens)) == block_count(tokens)
    assert not set(kv(tokens)) & set(kv(other))
    assert kv(tokens)[:1] == kv(tokens[:BLOCK_TOKENS]), "what follows changes nothing"
