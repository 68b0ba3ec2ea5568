"""Hosts: simulated leads, honest ones and liars, around the real core."""
