"""The Rust crate passes its own tests, and its rank does its part at a real lead."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.engine import Engine, content
from tests.clients.native.builds import ROOT, need, run
from tests.engine.made import BLOCKS, LAYER_BYTES, layout
from tests.engine.support import Lead, Side, new_key, received, tokens

WORKSPACE = ROOT / "clients/rust"
PROMPT = tokens(16)
pytestmark = pytest.mark.timeout(900)


def cargo(*arguments: str) -> None:
    """Runs cargo on the crate. Skips the test where cargo, a C compiler or a crate is missing."""
    need("cargo", "cc")
    if subprocess.run(["cargo", "fetch", "--quiet"], cwd=WORKSPACE, capture_output=True, check=False).returncode:
        pytest.skip("cargo cannot fetch the crates")
    run("cargo", *arguments, "--quiet", "-p", "kvgrpc-rank", cwd=WORKSPACE)


def test_the_crate_passes_its_tests() -> None:
    cargo("test")


@pytest.mark.parametrize("own", [False, True])
def test_a_rank_in_rust_holds_the_pool_and_reports_its_steps(tmp_path: Path, own: bool) -> None:
    cargo("build", "--examples")
    p, d = Lead(tmp_path, "P"), Lead(tmp_path, "D")
    try:
        p.wait_ready()
        destination = Side(d.wait_ready())
        with Engine.attach(p.socket_path, pool=layout(), private_memory=own) as engine:
            worker = subprocess.Popen(
                [WORKSPACE / "target/debug/examples/worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert worker.stdin is not None
            assert worker.stdout is not None

            def ask(line: str) -> str:
                assert worker.stdin is not None
                assert worker.stdout is not None
                print(line, file=worker.stdin, flush=True)
                return worker.stdout.readline().strip()

            ticket = engine.ticket
            pieces = f" 5000 {layout().total_bytes - 5000}" if own else ""
            assert ask(f"{ticket.socket_path} {ticket.secret.hex()}{pieces}") == f"attached {layout().total_bytes}"
            for layer in range(2):
                offset = (layer * BLOCKS + 3) * LAYER_BYTES
                assert ask(f"write {offset} {LAYER_BYTES} {layer + 1}") == "written"
                assert ask(f"read {offset} {LAYER_BYTES}") == str((layer + 1) * LAYER_BYTES)
            handover = engine.finished_blocks([3], content(PROMPT), transfer_key=new_key(), after_step=2)
            engine.flush()
            pull = destination.engine.pull(handover.grant, content(PROMPT))
            pull.start([5])
            destination.round_trip()
            assert not pull.over
            assert ask("step 2") == "reported"
            received(destination.finish(pull))
            assert np.array_equal(destination.read([5])[:, 0, 0], [1, 2])
            worker.stdin.close()
            assert worker.wait(15.0) == 0
            worker.stdout.close()
        p.wait_no_engine()
        destination.close()
    finally:
        p.close()
        d.close()
