"""Measures: what is done on a stage, one after the other, and what comes of it."""
