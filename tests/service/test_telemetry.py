"""Whether spans are wanted."""

import subprocess
import sys

SDK_COMES_LATER = """
import time
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from kvgrpc.service import telemetry

assert not telemetry.enabled()
trace.set_tracer_provider(TracerProvider())
until = time.monotonic() + 30
while not telemetry.enabled():
    assert time.monotonic() < until
    time.sleep(0.01)
assert telemetry.enabled()
"""


def test_an_sdk_that_the_process_installs_after_the_first_call_is_noticed() -> None:
    subprocess.run([sys.executable, "-c", SDK_COMES_LATER], check=True)
