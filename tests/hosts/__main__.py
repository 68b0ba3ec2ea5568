"""Times pulls between two hosts by data path and network, beside one TCP stream with as many bytes.

    make hosts ARGS=--json

The hosts are network namespaces on a switch, which is a process and uses a processor itself: the ratio to the stream
says what the data path costs, and the bandwidth says little about other machines.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.hosts import hosts, raw_stream
from tests.hosts.hosts import Host
from tests.hosts.switched import CONDITIONS, Network, switched
from tests.hosts.system import PATHS
from tests.service.engines import SUCCEEDED, Engine, ServeProcess
from tests.service.values import prompt

POOL = ("--layers", "8", "--kv-heads", "8", "--head-dim", "64", "--blocks", "320")
BLOCKS, BLOCK_BYTES = 64, 256 * 1024
NBYTES = BLOCKS * BLOCK_BYTES
PORT = 5_201
LIMITS = "[limits]\nqueue_timeout_s = 120.0\ntransfer_timeout_s = 120.0\nconnect_timeout_s = 60.0\n"


def main() -> int:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeats", type=int, default=5, help="pulls by each path on each network (5)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, switched(2) as network:
        if isinstance(network, str):
            sys.stderr.write(f"SKIP: {network}\n")
            return 0
        rows = [row for path in PATHS for row in measured(Path(folder), network, path, options.repeats)]
    if options.json:
        sys.stdout.write(json.dumps({"bytes": NBYTES, "repeats": options.repeats, "rows": rows}) + "\n")
    else:
        for row in rows:
            sys.stdout.write("  ".join(f"{name} {value}" for name, value in row.items()) + "\n")
    return 0


def measured(folder: Path, network: Network, path: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Yields the medians of one path on each network. Pulls and streams take turns."""
    first, second = network.hosts
    with ExitStack() as stack:
        processes = [_lead(folder / f"{path}-{host.number}", host, path) for host in network.hosts]
        for process in processes:
            stack.callback(process.end)
        source, destination = (Engine(process) for process in processes)
        for engine in (source, destination):
            stack.callback(engine.api.close)
        stack.enter_context(_sender(first))
        pulled(source, destination, path)  # the first one loads libraries and connects
        for name, condition in CONDITIONS.items():
            network.set(**condition)
            pulls, streams = [], []
            for _ in range(repeats):
                pulls.append(pulled(source, destination, path))
                streams.append(streamed(first, second))
            pull_s, stream_s = statistics.median(pulls), statistics.median(streams)
            yield {
                "path": path,
                "network": name,
                "pull_ms": round(pull_s * 1e3),
                "pull_mb_per_s": round(NBYTES / pull_s / 1e6, 1),
                "stream_ms": round(stream_s * 1e3),
                "ratio_of_times": round(pull_s / stream_s, 2),
            }
        network.set()


def _lead(folder: Path, host: Host, path: str) -> ServeProcess:
    data_paths, transports = PATHS[path]
    return ServeProcess(
        folder, "--listen", f"{host.address}:0", "--data-paths", data_paths, "--insecure", "--drain-s", "0",
        "--dial-allow", f"{hosts.NETWORK}.0/24", *POOL, settings=LIMITS, within=host.within,
        environment={"UCX_TLS": transports, "UCX_NET_DEVICES": host.device},
    )  # fmt: skip


def pulled(source: Engine, destination: Engine, path: str) -> float:
    """Returns the seconds of one pull, from the call to the end that the destination reports."""
    tokens = prompt(BLOCKS * 16)
    blocks, target = source.allocate(BLOCKS), destination.allocate(BLOCKS)
    handed = source.hand_over(tokens, blocks)
    end = destination.wait(destination.pull(handed.grant, tokens, target).transfer_id, timeout_s=240.0)
    assert end.state == SUCCEEDED, f"{path}: {end}"
    assert end.moved_bytes == NBYTES
    source.free(blocks)
    destination.free(target)
    return max(phase.start.ToNanoseconds() + phase.duration.ToNanoseconds() for phase in end.phases) / 1e9


@contextmanager
def _sender(host: Host) -> Iterator[None]:
    command = [*host.within, sys.executable, raw_stream.__file__, "send", host.address, str(PORT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield
        process.stdin.close()
        process.wait(10)


def streamed(source: Host, destination: Host) -> float:
    """Returns the seconds of one stream with the bytes of a pull."""
    command = [*destination.within, sys.executable, raw_stream.__file__]
    command += ["receive", source.address, str(PORT), str(NBYTES)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


if __name__ == "__main__":
    sys.exit(main())
