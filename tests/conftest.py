"""One Hypothesis profile for everybody: the same examples in every run, so that a failure repeats.

To look for new examples: `HYPOTHESIS_PROFILE=explore make test`.
"""

import os

from hypothesis import settings

# No deadlines: they measure the machine, and a busy one is not a bug.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

pytest_plugins = ["tests.sampling"]
