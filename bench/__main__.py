"""The command line of the benchmarks: `python -m bench pull | push | layerwise | geometry | tensors`."""

import signal
import sys

from bench.command import bench


def main() -> None:
    """Runs a command and exits with its code. After SIGTERM, too, it first ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    bench()


if __name__ == "__main__":
    main()
