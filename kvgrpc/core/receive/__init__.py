"""Receive: the destination's side. Pulls, and reservations into which a source pushes.

`moves` has the parts that reach a move's peer and close its access there.
"""
