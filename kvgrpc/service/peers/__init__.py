"""Peers: the channels to other leads, and how their errors come back."""
