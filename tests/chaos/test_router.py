"""A router that is killed, or stands still, in the middle of a request: what it held ends with its time."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.router import STEPS
from tests.e2e.test_deaths import LIMITS, SLOW, check_a_good_pull
from tests.service.conftest import TEST_S, Start
from tests.service.engines import Engine, wait_until

# A pull that nobody gives blocks to renews its lease up to the cap.
SETTINGS = f"{LIMITS}lease_cap_s = 4.0\n"
ROOT = Path(__file__).resolve().parents[2]


def free(engine: Engine) -> bool:
    counts = engine.counts()
    return counts.free == counts.blocks and not engine.pins()


@pytest.mark.timeout(TEST_S)
@pytest.mark.parametrize("deed", ["killed", "stopped"])
@pytest.mark.parametrize("step", [pytest.param(s, marks=[pytest.mark.slow] * (s in STEPS[::3])) for s in STEPS])
def test_what_a_router_held_is_free_when_its_time_is_over(start: Start, step: str, deed: str) -> None:
    source, destination = start((), SLOW, settings=SETTINGS)
    command = [sys.executable, "-m", "tests.chaos.router", source.address, destination.address]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=-1, stdout=-1) as router:
        assert router.stdout is not None
        assert router.stdin is not None
        try:
            for reached in STEPS[: STEPS.index(step) + 1]:
                assert router.stdout.readline() == f"{reached}\n"
                if reached != step:
                    print(file=router.stdin, flush=True)
            router.send_signal(signal.SIGKILL if deed == "killed" else signal.SIGSTOP)
            wait_until(lambda: free(source) and free(destination), what=lambda: (source.pins(), destination.pins()))
            check_a_good_pull(source, destination)
        finally:
            router.kill()
