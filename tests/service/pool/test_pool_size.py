"""A pool that does not fit its container is refused before a byte is taken, else the kernel would kill the server."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

EXIT_POOL = 4
LIMIT_BYTES = 512 << 20
"""Memory limit in bytes: enough for a server, too little for the pool."""
POOL_FLAGS = ("--blocks", "4096")
"""A pool of 1 GiB with the default layers, which is less than any host has."""


@dataclass(frozen=True)
class Container:
    """A memory cgroup for this test."""

    folder: Path
    limit_file: str


@pytest.fixture
def container() -> Iterator[Container]:
    """Makes a limited cgroup below this process's own. Skips if this user may not make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            mount, limit_file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        elif not controllers:
            mount, limit_file = Path("/sys/fs/cgroup"), "memory.max"
        else:
            continue
        folder = mount / path.lstrip("/") / f"kvgrpc-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit_file).write_text(str(LIMIT_BYTES))
        except OSError:
            folder.rmdir()
            continue
        yield Container(folder, limit_file)
        folder.rmdir()
        return
    pytest.skip("this user may make no memory cgroup here")


def test_a_pool_larger_than_its_container_is_refused_with_what_limits_it(container: Container) -> None:
    serve = [sys.executable, "-m", "kvgrpc", "serve", "--port", "0", "--data-paths", "shm", *POOL_FLAGS]
    # The shell enters the cgroup, then becomes the server.
    inside = f"echo $$ > {container.folder}/cgroup.procs && exec {shlex.join(serve)}"
    done = subprocess.run(["/bin/sh", "-c", inside], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == EXIT_POOL, done.stderr
    assert "does not fit" in done.stderr
    assert f"{container.limit_file} of cgroup" in done.stderr
    assert container.folder.name in done.stderr
    assert "serving" not in done.stdout
