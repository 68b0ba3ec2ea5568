"""The minimal engine's model behind the router in Go: engines compute in blocks that the router chose, and KV moves."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from examples.minimal_engine.model import MinimalModel, encode, greedy_token
from tests.examples.go_router import MODES, NEEDS_GO, ask, binary, held, listening, running
from tests.examples.http_engines import until
from tests.service.conftest import Start, start

__all__ = ["binary", "start"]

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("Hello, KV!", "Thirty-one bytes and one start.", "The lease is a promise with an end, known from the start.")
COUNT = 12
pytestmark = [*NEEDS_GO, pytest.mark.slow]

Engines = dict[str, tuple[str, str]]
"""(URL, lead) by name."""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Returns the tokens that one engine makes of each prompt."""
    model, found = MinimalModel(), list[list[int]]()
    for text in PROMPTS:
        ids, kv = encode(text), [torch.zeros(model.config.kv_shape(16, 16)) for _ in range(model.config.layers)]
        logits, start = model.forward(ids, 0, range(16), kv), len(ids)
        for _ in range(COUNT):
            ids.append(greedy_token(logits))
            logits = model.forward(ids[-1:], len(ids) - 1, range(16), kv)
        found.append(ids[start:])
    return found


@pytest.fixture
def engines(start: Start, tmp_path: Path) -> Iterator[Engines]:
    """Yields two leads without a pool of their own, and the engines that bring one."""
    names = ("P", "D")
    sockets = [tmp_path / name for name in names]
    leads = start(
        *(("--no-pool", "--engine-id", n, "--session-socket", str(s)) for n, s in zip(names, sockets, strict=True))
    )
    with ExitStack() as stack:
        logs = [tmp_path / f"{name}.log" for name in names]
        processes = [
            stack.enter_context(
                running(
                    [sys.executable, "-m", "examples.minimal_engine.driven", "--session-socket", str(socket)],
                    log,
                    {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                )
            )
            for socket, log in zip(sockets, logs, strict=True)
        ]
        urls = [listening(process, log, "driven: ") for process, log in zip(processes, logs, strict=True)]
        yield {name: (url, lead.address) for name, url, lead in zip(names, urls, leads, strict=True)}


@pytest.mark.parametrize("mode", MODES)
def test_two_engines_give_the_tokens_of_one(
    engines: Engines, binary: Path, tmp_path: Path, expected: list[list[int]], mode: str
) -> None:
    (p_url, p_lead), (d_url, d_lead) = engines["P"], engines["D"]
    command = [str(binary), "-listen", "127.0.0.1:0", "-mode", mode]
    command += ["-prefill", f"drive,{p_url},{p_lead}", "-decode", f"drive,{d_url},{d_lead}"]
    with running(command, tmp_path / "router.log", {}) as process:
        url = listening(process, tmp_path / "router.log", "router: ")
        until(lambda: ask(url, "GET", "/healthz")[0] == 200)
        for text, tokens in zip(PROMPTS, expected, strict=True):
            body = {"prompt": encode(text), "max_tokens": COUNT}
            status, answer = ask(url, "POST", "/v1/completions", body)
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == tokens
    for lead in (p_lead, d_lead):
        until(lambda lead=lead: held(lead) == {}, lambda lead=lead: held(lead))  # type: ignore[misc]
