"""The protocol core: pure and deterministic.

Nothing under this package reads a clock, sleeps, locks, logs, awaits or does I/O. Time enters as `now`, randomness
as ids in the events, and everything that must happen outside leaves as actions.
"""
