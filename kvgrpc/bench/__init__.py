"""`kvgrpc bench`: what this machine does, measured against what it could do.

A run starts processes of its own: a source and a destination, which are servers, and processes for the baselines, which
map the very same pools. Every ratio is of a pair measured one right after the other, and the median of all pairs is
shown: what disturbs the machine then disturbs both. `plan` says what is measured, `run` measures it: the `measures` on
their `stages`, whose child processes have `roles`, and give `results`.
"""
