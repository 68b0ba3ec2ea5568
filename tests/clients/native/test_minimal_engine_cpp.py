"""The minimal engines in C++ and in Python prefill and decode for each other: tokens are those of one engine.

Leads, engines and sockets are real, and the prompts are those of the demo.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from examples.demo.processes import EngineProcess, engine, server
from examples.demo.run import PROMPTS
from tests.clients.native.builds import build

COUNT = 12
WRONG_LINES = [
    '{"op": "decode", "kv_transfer_params": {"kvgrpc_grant": "?"}}',
    '{"op": "prefill", "prompt": "x", "transfer_key": "zz"}',
    '{"op": "generate", "prompt": "x", "count": -1}',
    '{"op": "none"}',
    "{",
    '{"op": "\\ud800"}',
]
_wanted: dict[str, list[int]] = {}
pytestmark = pytest.mark.timeout(900)
on_stage = pytest.mark.asyncio(loop_scope="module")
Engines = dict[str, EngineProcess]


@asynccontextmanager
async def engine_cpp(program: Path, socket: Path, *flags: str) -> AsyncIterator[EngineProcess]:
    """Runs the engine in C++, attached at `socket`. It ends when its input does."""
    process = await asyncio.create_subprocess_exec(
        program, "--session-socket", str(socket), *flags, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        started = EngineProcess("C++", process)
        assert await started.reply() == {"ready": True}
        yield started
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """Runs an engine in Python, one in C++ and one that brings its memory, each at a lead, and one in Python that does
    all by itself.
    """
    program = await asyncio.to_thread(build, "examples/minimal_engine_cpp") / "minimal-engine"
    folder = tmp_path_factory.mktemp("leads")
    async with AsyncExitStack() as stack:
        for name in ("python", "cpp", "own"):
            await stack.enter_async_context(server(folder, name, "auto", {}))
        yield {
            "reference": await stack.enter_async_context(engine("reference", None)),
            "python": await stack.enter_async_context(engine("python", folder / "python.sock")),
            "cpp": await stack.enter_async_context(engine_cpp(program, folder / "cpp.sock")),
            "own": await stack.enter_async_context(engine_cpp(program, folder / "own.sock", "--own-memory")),
        }


async def said(one: EngineProcess, **request: Any) -> dict[str, Any]:
    """Returns an engine's answer, which is no error."""
    answer = await one.ask(**request)
    assert "error" not in answer, answer
    return answer


async def wanted_tokens(engines: Engines, prompt: str) -> list[int]:
    """Returns the tokens of one engine that does all by itself, computed once."""
    if prompt not in _wanted:
        _wanted[prompt] = (await said(engines["reference"], op="generate", prompt=prompt, count=COUNT))["tokens"]
    return _wanted[prompt]


async def moved(engines: Engines, source: str, destination: str, prompt: str, way: str, **decode: Any) -> list[int]:
    """Returns the tokens that one engine decodes from what another one prefilled."""
    labels = {"transfer_key": os.urandom(16).hex(), "request_id": way, "prompt": prompt}
    if way == "pull":
        given = await said(engines[source], op="prefill", **labels)
        decode |= {"kv_transfer_params": given["kv_transfer_params"]}
    else:
        reserved = await said(engines[destination], op="reserve", **labels)
        to = reserved["kv_transfer_params"]
        await said(engines[source], op="prefill", push_to=to, layerwise=way == "push by layer", **labels)
    answer = await said(engines[destination], op="decode", count=COUNT, **labels, **decode)
    assert answer["transfer_id"]
    return list(answer["tokens"])


@on_stage
@pytest.mark.parametrize("way", ["pull", "push", "push by layer"])
@pytest.mark.parametrize(
    ("source", "destination"), [("cpp", "python"), ("python", "cpp"), ("own", "python"), ("python", "own")]
)
async def test_tokens_are_those_of_one_engine(engines: Engines, source: str, destination: str, way: str) -> None:
    for name, prompt in PROMPTS:
        await said(engines["python"], op="forget")
        wanted = await wanted_tokens(engines, prompt)
        assert await moved(engines, source, destination, prompt, way) == wanted, name
    await all_returned(engines)


async def all_returned(engines: Engines) -> None:
    """Waits until every block is back: what was handed over comes back with the end of its lease."""
    async with asyncio.timeout(15.0):
        for name in ("cpp", "own", "python"):
            while (await said(engines[name], op="usage"))["used_blocks"]:  # noqa: ASYNC110 - the engine is asked
                await asyncio.sleep(0.02)


@on_stage
@pytest.mark.parametrize(("source", "destination"), [("cpp", "own"), ("own", "cpp")])
async def test_tokens_are_those_of_one_engine_between_both_memories(
    engines: Engines, source: str, destination: str
) -> None:
    name, prompt = PROMPTS[0]
    assert await moved(engines, source, destination, prompt, "pull") == await wanted_tokens(engines, prompt), name
    await all_returned(engines)


@on_stage
@pytest.mark.parametrize(("source", "destination"), [("cpp", "python"), ("python", "cpp"), ("python", "own")])
async def test_a_changed_block_changes_the_tokens(engines: Engines, source: str, destination: str) -> None:
    name, prompt = PROMPTS[2]
    await said(engines["python"], op="forget")
    wanted = await wanted_tokens(engines, prompt)
    assert await moved(engines, source, destination, prompt, "pull", corrupt=True) != wanted, name


@on_stage
async def test_a_grant_for_another_prompt_is_refused_with_its_reason(engines: Engines) -> None:
    labels = {"transfer_key": os.urandom(16).hex(), "request_id": "r"}
    prompt = PROMPTS[2][1]
    given = await said(engines["python"], op="prefill", prompt=prompt, ttl_s=1, **labels)
    grant, other = given["kv_transfer_params"], "X" + prompt[1:]
    refused = await engines["cpp"].ask(op="decode", prompt=other, count=1, kv_transfer_params=grant, **labels)
    assert refused["error"].startswith("CONTENT_MISMATCH: "), refused
    await all_returned(engines)


@on_stage
@pytest.mark.parametrize("line", WRONG_LINES)
async def test_a_line_that_is_wrong_is_answered_alone(engines: Engines, line: str) -> None:
    process = engines["cpp"]._process
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    assert (await engines["cpp"].reply())["error"]
    await all_returned(engines)
