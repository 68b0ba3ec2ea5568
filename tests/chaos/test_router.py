"""A router is killed, stopped or cut off in the middle of a request: what it held is freed after its time."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.network import Proxy
from tests.chaos.router import MIDWAY, REFUSED, STEPS
from tests.e2e.conftest import PATHS
from tests.e2e.pushing import LIMITS, SLOW
from tests.e2e.slow_pulls import check_a_good_pull
from tests.service.conftest import TEST_S, Start
from tests.service.engines import Engine, wait_until
from tests.service.pushes import check_a_good_push

# A lease that nobody comes for is renewed up to its cap.
SETTINGS = LIMITS.replace("registration_timeout_s = 2.5", "registration_timeout_s = 5.0") + "lease_cap_s = 5.0\n"
ROOT = Path(__file__).resolve().parents[2]
QUICK = {
    ("shm", "pull", "waiting for blocks", "killed"),
    ("shm", "push", "registered", "stopped"),
    ("nixl", "layers", MIDWAY, "killed"),
    ("shm", "layers", "between two layers", "cut"),
}
"""Cases that run with all tests: they cover every mode and deed."""


def cases() -> Iterator[object]:
    for path in PATHS:
        for mode, steps in STEPS.items():
            for step in steps:
                for deed in ("killed", "stopped", "cut"):
                    case = path, mode, step, deed
                    marks = [] if case in QUICK else [pytest.mark.chaos, pytest.mark.slow]
                    yield pytest.param(*case, marks=marks, id=", ".join(case))


def free(engine: Engine) -> bool:
    counts = engine.counts()
    return counts.free_block_count == counts.block_count and not engine.pins()


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize(("path", "mode", "step", "deed"), list(cases()))
def test_what_a_router_held_is_free_after_its_time(start: Start, path: str, mode: str, step: str, deed: str) -> None:
    flags, environment = PATHS[path]
    pair = start(*[(*flags, *SLOW)] * 2, settings=SETTINGS, **environment)
    with ExitStack() as stack:
        proxies = [Proxy() for _ in pair]
        for proxy, engine in zip(proxies, pair, strict=True):
            stack.callback(proxy.close)
            host, _, port = engine.address.rpartition(":")
            proxy.target = host, int(port)
        command = [sys.executable, "-m", "tests.chaos.router", *(proxy.address for proxy in proxies), mode]
        router = stack.enter_context(subprocess.Popen(command, cwd=ROOT, text=True, stdin=-1, stdout=-1))
        stack.callback(router.kill)
        assert router.stdout is not None
        assert router.stdin is not None
        steps = STEPS[mode]
        for reached in steps[: steps.index(step) + 1]:
            assert router.stdout.readline() == f"{reached}\n"
            if reached != step:
                print(file=router.stdin, flush=True)
        if deed == "cut":
            for proxy in proxies:
                proxy.cut()
        else:
            router.send_signal(signal.SIGKILL if deed == "killed" else signal.SIGSTOP)
        wait_until(lambda: all(map(free, pair)), what=lambda: [engine.pins() for engine in pair])
        if deed == "cut":
            for proxy in proxies:
                proxy.mend()
            assert router.stdout.readline() == f"{REFUSED}\n", "a renewal that comes late revives nothing"
            assert all(map(free, pair))
        source, destination = pair
        check_a_good_pull(source, destination)
        check_a_good_push(source, destination)
