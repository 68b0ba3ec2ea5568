"""`python -m bench` measures this machine against what it could do.

A run starts its own processes: a source and a destination, which are servers, and baselines that map the very same
pools. Every ratio compares two measurements made one right after the other, and the median of all pairs is shown, so
that a disturbance affects both. `plan` says what is measured, and `run` measures it: the `measures` on their `stages`,
whose child processes have `roles`, and give `results`.
"""
