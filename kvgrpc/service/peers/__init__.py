"""Peers: the channels to other leads, and the typed errors of their calls."""
