"""One Hypothesis profile for everybody: the same examples in every run, so that a failure repeats.

To look for new examples: `HYPOTHESIS_PROFILE=explore make test`.
"""

import os

from hypothesis import settings

# No deadlines: they measure the machine, and a busy one is not a bug.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

pytest_plugins = ["tests.sampling", "tests.lost_workers"]


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Shows every item of a list that should be empty."""
    if op == "==" and isinstance(left, list) and right == []:
        return [f"{len(left)} found, none expected:", *map(repr, left)]
    return None
