"""TLS: what mutual TLS adds to a call, to a pull, and to the rate of pulls, and what the gate takes of a call. Data
paths move plain bytes either way.
"""

import statistics
import tempfile
import time
from pathlib import Path

from bench.measures.authorization import authorization_us
from bench.measures.rate import ServerPair, pair
from bench.plan import TLS_DIR, PullPlan, environment_of
from bench.results.pulls import PullResult
from examples.certs import Authority, usual_names
from kvgrpc.tls import Tls
from kvgrpc.v1 import transfer_pb2, transfer_pb2_grpc

_CALL_S = 30.0


async def measure(plan: PullPlan, found: PullResult) -> None:
    """Fills in the figures. Raises KVGrpcError if a call fails."""
    usual = environment_of(plan.data_paths[0])
    with tempfile.TemporaryDirectory(prefix="kvgrpc-bench-") as folder:
        files = Authority().issue(Path(folder), usual_names("bench"))
        secured = usual | {TLS_DIR: folder}
        async with pair(plan, secured, Tls(files).channel_credentials()) as tls, pair(plan, usual) as plain:
            calls = [(await _call_s(tls), await _call_s(plain)) for _ in range(plan.pulls)]
            pulls = [(await _pull_s(tls), await _pull_s(plain)) for _ in range(plan.pulls)]
            rates = [
                ((await tls.sample()).pulls_per_s, (await plain.sample()).pulls_per_s) for _ in range(plan.repeats + 1)
            ][1:]
        found.authorization_us = await authorization_us(files, plan.pulls)
    found.tls_call_ratio = statistics.median(a / b for a, b in calls)
    found.tls_pull_ratio = statistics.median(a / b for a, b in pulls)
    found.tls_rate_ratio = statistics.median(a / b for a, b in rates)
    found.details |= {
        "tls_call_ms_p50": statistics.median(a for a, _ in calls) * 1e3,
        "tls_pull_ms_p50": statistics.median(a for a, _ in pulls) * 1e3,
        "tls_pulls_per_s": statistics.median(a for a, _ in rates),
    }


async def _call_s(servers: ServerPair) -> float:
    """Returns the seconds of our lightest call."""
    lightest = transfer_pb2_grpc.TransferServiceStub(servers.caller.destination).AcknowledgeTransfers
    began = time.perf_counter()
    await lightest(transfer_pb2.AcknowledgeTransfersRequest(), timeout=_CALL_S)
    return time.perf_counter() - began


async def _pull_s(servers: ServerPair) -> float:
    """Returns the seconds of one pull of one block."""
    (moved,) = await servers.caller.one_block(1)
    return moved.seconds
