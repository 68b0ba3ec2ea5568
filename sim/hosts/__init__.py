"""Simulated leads around the real core, honest ones and liars."""
