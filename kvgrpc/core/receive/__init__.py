"""Receive: the destination's side. Pulls, and reservations into which a source pushes.

How a move reaches its peer and ends there is in `moves`.
"""
