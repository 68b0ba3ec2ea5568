"""The registry without a server, and the follower's health checks."""

import asyncio
import json
from functools import partial
from pathlib import Path

from kvgrpc.fleet.directory import Directory, EngineState
from kvgrpc.registry.files import FileRegistry
from tests.registry.following import following, ids, until


def rows(*names: str) -> str:
    return json.dumps({"engines": [{"engine_id": name, "addresses": [f"{name}:1"]} for name in names]})


def stale(directory: Directory) -> bool:
    return directory.stale_s(0.0) is not None


async def test_only_engines_of_a_file_that_pass_their_health_checks_are_healthy(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_text(rows("a", "b"))
    async with following(FileRegistry(path), lambda engine_id: engine_id == "a") as directory:
        now = asyncio.get_running_loop().time

        def state(engine_id: str) -> EngineState | None:
            one = directory.find(engine_id)
            return None if one is None else directory.state(one, now())

        await until(lambda: (state("a"), state("b")) == (EngineState.HEALTHY, EngineState.FAILED))


async def test_a_file_is_looked_at_again_and_one_that_breaks_keeps_what_it_said(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_text(rows("a", "b"))
    async with following(FileRegistry(path, look_s=0.02)) as directory:
        await until(lambda: ids(directory) == ["a", "b"])
        path.write_text("{")
        await until(lambda: directory.stale_s(0.0) is not None)
        assert ids(directory) == ["a", "b"]
        path.write_text(rows("b", "c"))
        await until(lambda: ids(directory) == ["b", "c"])
        path.unlink()
        await until(lambda: directory.stale_s(0.0) is not None)
        assert ids(directory) == ["b", "c"]


async def test_a_file_may_be_toml_and_two_rows_may_have_one_id(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text("".join(f'[[engines]]\nengine_id = "a"\naddresses = ["h{n}:1"]\n' for n in range(2)))
    async with following(FileRegistry(path)) as directory:
        await until(lambda: len(directory) == 2)
        assert ids(directory) == ["a", "a"]


async def test_a_file_with_one_wrong_row_is_not_taken(tmp_path: Path) -> None:
    for text in ("[]", '{"engines": 1}', '{"engines": [{}]}'):
        path = tmp_path / "engines.json"
        path.write_text(text)
        async with following(FileRegistry(path)) as directory:
            await until(partial(stale, directory))
            assert not directory.complete
