"""Counts how far a reader walks: the calls and files of a request, and the size of the code.

    make walk                  # a table
    make walk ARGS=--json      # one JSON object
    make walk ARGS=--files     # with the calls of each file

The counts vary by some percent, because the servers' own ticks are counted as well.
"""

import argparse
import json
import logging

from bench.walk.house import docstring_openings, own_lines
from bench.walk.walks import ROOT, main as walked


def main() -> None:
    """Counts, and prints."""
    parser = argparse.ArgumentParser(
        prog="make walk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--files", action="store_true", help="print the calls of each file, too")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    walks, openings = walked(), docstring_openings(ROOT)
    if options.json:
        counts = {name: walk.to_json() for name, walk in walks.items()}
        print(json.dumps({**counts, "own_lines": own_lines(ROOT), "docstring_openings": openings}))
        return
    for name, walk in walks.items():
        print(f"{name:<12}{walk.calls:>6} calls in {len(walk.by_file)} files")
        if options.files:
            for path, calls in sorted(walk.by_file.items(), key=lambda row: -row[1]):
                print(f"{calls:>10}  {path.removeprefix(f'{ROOT}/')}")
    print(f"{own_lines(ROOT)} lines by hand")
    print(f"{openings['dependent']} of {openings['all']} docstrings begin with a dependent word")


if __name__ == "__main__":
    main()
