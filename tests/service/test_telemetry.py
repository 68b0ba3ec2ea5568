"""Spans are recorded only with an SDK. An endpoint without one is reported, and ends nothing."""

import os
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


NO_SDK = """
import sys
sys.modules["opentelemetry.sdk.trace"] = None
from kvgrpc.service import telemetry

assert not telemetry.configure("p")
assert not telemetry.enabled()
"""


def test_an_endpoint_without_an_sdk_is_said_and_ends_nothing() -> None:
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    ended = subprocess.run(
        [sys.executable, "-c", NO_SDK], check=True, env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert "kvgrpc with the extra otel" in ended.stderr
