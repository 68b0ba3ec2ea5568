"""Moves: the common parts of pulls and pushes, from reaching the peer to closing accesses.

`receive` and `send` have the parts that only a pull, a reservation or a push needs.
"""
