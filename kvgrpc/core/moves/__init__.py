"""Moves: what pulls and pushes have in common, from reaching the peer to closing its accesses.

What only a pull, a reservation or a push does is in `receive` and `send`.
"""
