"""Reads from languages.toml what each language needs, and how its executor is built and started."""

import asyncio
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from .process import bound, stop

ROOT = Path(__file__).resolve().parents[3]
FILE = Path(__file__).resolve().parents[1] / "languages.toml"
BUILD_S = 1_800.0


@dataclass(frozen=True)
class Language:
    """One row of languages.toml."""

    name: str
    start: str
    """The command that starts the executor; `{python}` is the interpreter of the runner."""
    cwd: str = "."
    """Working directory of the commands, from the root of the repository."""
    needs: tuple[str, ...] = ()
    """Commands that must be on the PATH."""
    fetch: str = ""
    """The shell command that fetches what the build needs, or looks for it. If it fails, the language is skipped."""
    build: str = ""
    """The shell command that builds the executor; empty when there is nothing to build."""
    built: str = ""
    """A file, below `cwd`, that exists once the executor is built."""

    @property
    def folder(self) -> Path:
        return ROOT / self.cwd

    @property
    def command(self) -> str:
        return self.start.replace("{python}", sys.executable)

    def missing(self) -> str:
        """Returns why the executor cannot be built, or an empty text."""
        for command in self.needs:
            if shutil.which(command) is None:
                return f"{command} is not on the PATH"
        return "" if self.folder.is_dir() else f"there is no folder {self.cwd}"

    def unbuilt(self) -> str:
        """Returns why the executor cannot be started, or an empty text."""
        return f"{self.cwd}/{self.built} is not built" if self.built and not (self.folder / self.built).exists() else ""


def load(path: Path = FILE) -> list[Language]:
    """Returns all languages, in the order of the file."""
    rows = tomllib.loads(path.read_text())["language"]
    return [Language(**{**row, "needs": tuple(row.get("needs", ()))}) for row in rows]


async def failing(language: Language, command: str) -> str:
    """Runs `fetch` or `build` of a language at low priority. Returns why it failed, or an empty text."""
    if not command:
        return ""
    process = await asyncio.create_subprocess_exec(
        *bound("nice", "/bin/sh", "-c", command),
        cwd=language.folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), BUILD_S)
    except TimeoutError:
        await stop(process)
        return f"`{command}` took more than {BUILD_S:g} s"
    if process.returncode == 0:
        return ""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return f"`{command}` failed: {lines[-1] if lines else process.returncode}"
