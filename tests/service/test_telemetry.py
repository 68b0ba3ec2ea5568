"""Spans are recorded only with an SDK. An endpoint without one is reported, and ends nothing."""

import json
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

assert not telemetry.configure("p", "1")
assert not telemetry.enabled()
"""


def test_an_endpoint_without_an_sdk_is_said_and_ends_nothing() -> None:
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    ended = subprocess.run([sys.executable, "-c", NO_SDK], check=True, env=environment, capture_output=True, text=True)
    assert "kvgrpc with the extra otel" in ended.stderr


RESOURCE = """
import json
from opentelemetry import trace
from kvgrpc.service import telemetry

assert telemetry.configure("p", "1.2.3")
print(json.dumps(dict(trace.get_tracer_provider().resource.attributes)))
"""


def resource_of(**environment: str) -> dict[str, str]:
    """Returns what spans say about the lead that made them."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    whole = usual | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"} | environment
    ended = subprocess.run([sys.executable, "-c", RESOURCE], check=True, env=whole, capture_output=True, text=True)
    found: dict[str, str] = json.loads(ended.stdout)
    return found


def test_all_leads_are_instances_of_one_service() -> None:
    found = resource_of()
    said = [found[f"service.{name}"] for name in ("name", "instance.id", "version")]
    assert said == ["kvgrpc", "p", "1.2.3"]


def test_the_environment_names_service_and_instance() -> None:
    found = resource_of(OTEL_SERVICE_NAME="decode", OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-7,zone=b")
    assert [found[name] for name in ("service.name", "service.instance.id", "zone")] == ["decode", "pod-7", "b"]
